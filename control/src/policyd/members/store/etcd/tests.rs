//! Against real servers of etcd: the store alone, and authorities that share one.

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;
use crate::members::{Member, Secret};
use crate::policy::{Deal, Peer};
use crate::policyd::figures::Figures;
use crate::policyd::members::registrar::{Answer, Event, Origin, Unanswered};
use crate::policyd::members::roster::Refusal;
use crate::policyd::members::{Members, start};
use crate::policyd::publication::Publication;
use crate::source::etcd::tests::server::{LONG, Server};

const TTL: Duration = Duration::from_secs(1);
const PACE: Duration = Duration::from_millis(150);

fn config(server: &Server) -> config::Etcd {
    config::Etcd { endpoints: vec![server.endpoint()], prefix: "/vipgate/".into() }
}

fn view(number: u64) -> View {
    let members = vec![Member { serving: true, incarnation: 1, ..Member::new("a".into(), number) }];
    View { number, serving_changes: 1, members }
}

const NOTHING: Change<'_> = Change { beats: &[], view: None, silent: &[], gone: &[] };

/// Reads what is there, as a first commit does.
async fn read(store: &mut Etcd) -> Snapshot {
    match store.commit(NOTHING).await.unwrap() {
        Committed::Outdated(snapshot) => snapshot,
        Committed::Done => panic!("nothing was read"),
    }
}

fn is_done(committed: &Committed) -> bool {
    matches!(committed, Committed::Done)
}

#[tokio::test]
async fn nothing_is_written_under_another_view_than_the_one_that_stands() {
    let server = Server::running().await;
    let (mut one, mut other) = (Etcd::open(&config(&server), TTL), Etcd::open(&config(&server), TTL));
    assert_eq!(read(&mut one).await.view, None);
    assert_eq!(read(&mut other).await.view, None);
    let (a, first) = (Beat::bare("a", 1, Wish::Ready, 0), view(1));
    let change = Change { beats: &[&a], view: Some(&first), ..NOTHING };
    assert!(is_done(&one.commit(change).await.unwrap()));
    let late = other.commit(Change { beats: &[&a], ..NOTHING }).await.unwrap();
    let Committed::Outdated(there) = late else { panic!("it was acknowledged under no view") };
    assert_eq!(there.view.as_deref(), Some(&first));
    assert_eq!(there.beats, std::slice::from_ref(&a), "one that came just now is what it was");
    assert!(is_done(&other.commit(Change { beats: &[&a], ..NOTHING }).await.unwrap()));
}

#[tokio::test]
async fn nobody_is_silent_who_was_heard_elsewhere() {
    let server = Server::running().await;
    let (mut one, mut other) = (Etcd::open(&config(&server), TTL), Etcd::open(&config(&server), TTL));
    read(&mut one).await;
    let (a, first, second) = (Beat::bare("a", 1, Wish::Ready, 1), view(1), view(2));
    assert!(is_done(&one.commit(Change { beats: &[&a], view: Some(&first), ..NOTHING }).await.unwrap()));
    let there = read(&mut other).await;
    assert_eq!(there.beats, [Beat::bare("a", 1, Wish::Joining, 1)], "what it wanted long ago is no wish");
    assert!(is_done(&one.commit(Change { beats: &[&a], ..NOTHING }).await.unwrap()));
    let silent = [Arc::from("a")];
    let change = Change { view: Some(&second), silent: &silent, ..NOTHING };
    let Committed::Outdated(there) = other.commit(change).await.unwrap() else { panic!("it beats") };
    assert_eq!(there.beats, [a]);
    let change = Change { view: Some(&second), silent: &silent, gone: &silent, ..NOTHING };
    assert!(is_done(&other.commit(change).await.unwrap()));
    let Committed::Outdated(there) = one.commit(NOTHING).await.unwrap() else { panic!("there is a new view") };
    assert_eq!((there.view.as_deref(), there.beats.len()), (Some(&second), 0));
}

/// A whole authority.
struct Authority {
    members: Members,
    _publish: watch::Sender<Option<Arc<Publication>>>,
}

impl Authority {
    fn start(server: &Server) -> Self {
        let peer = |name: &str| Peer {
            name: name.into(),
            node: "n".into(),
            zone: "".into(),
            address: None,
            pods: [].into(),
            uncovered: None,
        };
        let deal = Deal { peers: vec![peer("a"), peer("b")], ..Deal::default() };
        let publication = Arc::new(Publication::default().next(Arc::new(deal)).unwrap());
        let (publish, published) = watch::channel(Some(publication));
        let store = Etcd::open(&config(server), TTL);
        Self { members: start(TTL, store, published, Arc::<Figures>::default()), _publish: publish }
    }

    async fn hears(&self, beat: Beat) -> Result<Answer, Unanswered> {
        let (sender, answer) = oneshot::channel();
        self.members.events.send(Event::Beat(beat, Origin::default(), sender)).await.unwrap();
        timeout(LONG, answer).await.expect("an answer in time").expect("the authority lives")
    }

    async fn is(&self, what: impl Fn(&View) -> bool) -> Arc<View> {
        let mut view = self.members.view.clone();
        timeout(LONG, view.wait_for(|view| what(view))).await.expect("a view in time").unwrap().clone()
    }
}

/// A gateway that wants to serve, and the answers that it gets.
struct Gateway {
    task: JoinHandle<()>,
    leases: watch::Receiver<Option<Instant>>,
}

impl Gateway {
    fn start(name: &'static str, at: &Authority) -> Self {
        Self::beating(at, move |seen| Beat::bare(name, 1, Wish::Ready, seen))
    }

    /// One that shows a secret.
    fn showing(name: &'static str, process: u8, at: &Authority) -> Self {
        Self::beating(at, move |seen| shows(name, process, seen))
    }

    fn beating(at: &Authority, beat: impl Fn(u64) -> Beat + Send + 'static) -> Self {
        let (sender, leases) = watch::channel(None);
        let at = Authority { members: at.members.clone(), _publish: watch::channel(None).0 };
        let task = tokio::spawn(async move {
            let mut seen = 0;
            loop {
                if let Ok(answer) = at.hears(beat(seen)).await {
                    seen = answer.view.number;
                    if answer.lease.is_some() {
                        sender.send_replace(Some(Instant::now()));
                    }
                }
                sleep(PACE).await;
            }
        });
        Self { task, leases }
    }

    /// Waits for a lease that is given from now on.
    async fn holds(&mut self) {
        let now = Instant::now();
        let given = self.leases.wait_for(|at| at.is_some_and(|at| at > now));
        timeout(LONG, given).await.expect("a lease in time").unwrap();
    }

    fn stop(self) {
        self.task.abort();
    }
}

fn serve_both(view: &View) -> bool {
    view.serving().count() == 2
}

#[tokio::test]
async fn any_of_several_servers_may_be_asked() {
    let server = Server::running().await;
    let (one, other) = (Authority::start(&server), Authority::start(&server));
    let (mut a, mut b) = (Gateway::start("a", &one), Gateway::start("b", &other));
    let view = one.is(serve_both).await;
    assert_eq!(other.is(serve_both).await, view);
    a.holds().await;
    b.holds().await;
    // It goes on at the other one, and nothing changes.
    a.stop();
    let mut a = Gateway::start("a", &other);
    drop(one);
    a.holds().await;
    sleep(TTL * 3).await;
    assert_eq!(other.is(serve_both).await, view);
    // A third one begins where the others are.
    let third = Authority::start(&server);
    assert_eq!(third.is(|view| view.number > 0).await, view);
    b.stop();
    let after = third.is(|view| view.serving().count() == 1).await;
    assert!(after.number > view.number && after.member("a").unwrap().serving);
    assert_eq!(other.is(|view| *view == *after).await, after);
    a.holds().await;
}

/// The process with this secret, as it beats.
fn shows(name: &str, process: u8, seen_view: u64) -> Beat {
    let secret = Secret::from_slice(&[process; 32]).unwrap();
    let commitment = Some(secret.commitment());
    Beat { commitment, ..Beat::bare(name, secret.incarnation(), Wish::Ready, seen_view) }
}

#[tokio::test]
async fn an_impostor_is_refused_at_whichever_server_it_tries() {
    let server = Server::running().await;
    let (one, other) = (Authority::start(&server), Authority::start(&server));
    let (mut a, _b) = (Gateway::showing("a", 1, &one), Gateway::showing("b", 2, &other));
    let view = one.is(serve_both).await;
    assert_eq!(other.is(serve_both).await, view);
    let begun = Instant::now();
    let mut refused = [0, 0];
    while begun.elapsed() < 3 * TTL {
        for at in [&one, &other] {
            let fresh = at.hears(shows("a", 9, view.number)).await;
            match fresh {
                Ok(answer) => assert_eq!(answer.lease, None, "it waits"),
                Err(Unanswered::Refused { refusal: Refusal::UsedTwice { .. }, .. }) => refused[0] += 1,
                Err(why) => panic!("{why}"),
            }
            let incarnation = shows("a", 1, 0).incarnation;
            for commitment in [None, shows("a", 9, 0).commitment] {
                let repeated = Beat { commitment, ..Beat::bare("a", incarnation, Wish::Ready, view.number) };
                let why = at.hears(repeated).await.unwrap_err();
                assert!(matches!(why, Unanswered::Refused { refusal: Refusal::Forged { .. }, .. }), "{why}");
                refused[1] += 1;
            }
        }
        sleep(PACE).await;
    }
    assert!(refused.iter().all(|count| *count > 4), "{refused:?}");
    a.holds().await;
    assert_eq!((one.is(serve_both).await, other.is(serve_both).await), (view.clone(), view.clone()));
    // A server that starts now knows from etcd whose secret is which.
    let third = Authority::start(&server);
    third.is(|now| *now == *view).await;
    let repeated = Beat::bare("a", shows("a", 1, 0).incarnation, Wish::Ready, view.number);
    assert!(third.hears(repeated).await.is_err());
}

#[tokio::test]
async fn while_etcd_is_away_nobody_gets_a_lease_and_nobody_is_dead() {
    let mut server = Server::running().await;
    let one = Authority::start(&server);
    let (mut a, b) = (Gateway::start("a", &one), Gateway::start("b", &one));
    let view = one.is(serve_both).await;
    server.kill();
    let unanswered = one.hears(Beat::bare("a", 1, Wish::Ready, view.number)).await.unwrap_err();
    assert!(unanswered.to_string().contains("etcd can't be asked"), "{unanswered}");
    sleep(TTL * 2).await;
    server.start().await;
    a.holds().await;
    sleep(TTL * 2).await;
    assert_eq!(one.is(serve_both).await, view);
    b.stop();
    one.is(|view| view.serving().count() == 1).await;
}

#[tokio::test]
async fn an_etcd_that_has_lost_everything_is_told_again() {
    let mut server = Server::running().await;
    let one = Authority::start(&server);
    let (mut a, _b) = (Gateway::start("a", &one), Gateway::start("b", &one));
    let view = one.is(serve_both).await;
    server.kill();
    server.wipe();
    server.start().await;
    let after = one.is(|now| now.number > view.number).await;
    assert_eq!(after.serving().count(), 2);
    a.holds().await;
    let other = Authority::start(&server);
    assert_eq!(other.is(|view| view.number > 0).await, after);
}
