//! Against a real authority in this process, which can go away and come back.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::Code;
use tonic::service::Routes;
use tonic::transport::Server as Tonic;

use super::*;
use crate::policy::{Deal, Peer};
use crate::policyd::figures::Figures;
use crate::policyd::members;
use crate::policyd::publication::Publication;
use crate::xds::proto;
use crate::xds::proto::membership_client::MembershipClient;

/// Far more than anything takes on a slow machine.
const LONG: Duration = Duration::from_secs(20);
/// Long enough for a machine that does other things as well.
const TTL: Duration = Duration::from_millis(800);

/// A server in a thread of its own, so that it can go away as a killed process does.
struct Server {
    port: u16,
    policy: watch::Sender<Option<Arc<Publication>>>,
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl Server {
    fn start(names: &'static [&str]) -> Self {
        Self::at(0, Some(names))
    }

    fn at(port: u16, names: Option<&'static [&str]>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, stopped) = oneshot::channel();
        let (policy, published) = watch::channel(names.map(published));
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
                let routes = match names {
                    Some(_) => {
                        let figures = Arc::<Figures>::default();
                        let all = members::start(TTL, members::Memory, published, figures);
                        Routes::new(members::server(all, Arc::default(), Arc::default()))
                    }
                    None => Routes::default(),
                };
                tokio::select! {
                    served = Tonic::builder().add_routes(routes).serve_with_incoming(incoming) => served.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        Self { port, policy, stop, thread }
    }

    /// Its port, which is free then.
    fn kill(self) -> u16 {
        drop(self.stop);
        self.thread.join().unwrap();
        self.port
    }
}

fn ready(seen_view: u64) -> Wanted {
    Wanted { wish: Wish::Ready, seen_view, unable: None }
}

fn published(names: &'static [&str]) -> Arc<Publication> {
    let peer = |name: &&str| Peer {
        name: (*name).into(),
        node: "n".into(),
        zone: "".into(),
        address: None,
        pods: [].into(),
        uncovered: None,
    };
    let deal = Deal { peers: names.iter().map(peer).collect(), ..Deal::default() };
    Arc::new(Publication::default().next(Arc::new(deal)).unwrap())
}

/// A clock that begins with it, and the end of the lease.
struct Clock {
    start: Instant,
    until: Mutex<Option<Tick>>,
}

impl LeaseClock for Clock {
    fn now(&self) -> Tick {
        Tick(self.start.elapsed().as_millis() as u32)
    }

    fn extend(&self, until: Tick) {
        let mut known = self.until.lock().unwrap();
        *known = Some(known.map_or(until, |known| known.later(until)));
    }
}

fn secret(process: u8) -> Secret {
    Secret::from_slice(&[process; 32]).unwrap()
}

struct Gateway {
    clock: Arc<Clock>,
    handle: Handle,
    task: JoinHandle<()>,
}

impl Gateway {
    /// A process with a secret that is made of this number.
    fn start(name: &str, process: u8, port: u16) -> Self {
        Self::after(name, process, None, port)
    }

    /// One that knows the secret of another one before it.
    fn after(name: &str, process: u8, before: Option<u8>, port: u16) -> Self {
        let clock = Arc::new(Clock { start: Instant::now(), until: Mutex::default() });
        let url = format!("http://127.0.0.1:{port}");
        let server = PolicyServer { url, ca: None, cert: None, key: None, cache: "unused".into() };
        let (client, handle) = MembersClient::open(Plan {
            name: name.into(),
            secret: secret(process),
            predecessor: before.map(secret),
            server,
            fingerprint: [process; 32],
            tunnel_key: [process + 100; 32],
            peer: Some("192.0.2.1:4790".parse().unwrap()),
            lease: clock.clone(),
        });
        Self { clock, handle, task: tokio::spawn(client.run()) }
    }

    async fn is(&mut self, what: impl Fn(&Status) -> bool) -> Status {
        let status = timeout(LONG, self.handle.status.wait_for(what)).await.expect("a status in time").unwrap().clone();
        self.act();
        status
    }

    /// Acts by the last view: only then a lease counts.
    fn act(&self) {
        let number = self.handle.status.borrow().view.number;
        self.handle.wish.send_if_modified(|wanted| std::mem::replace(&mut wanted.seen_view, number) != number);
    }

    /// Says that it is ready for whatever the view is, until it serves.
    async fn serves(&mut self, name: &str) -> Status {
        loop {
            let status = self.handle.status.borrow_and_update().clone();
            if status.view.member(name).is_some_and(|member| member.serving) {
                self.act();
                return status;
            }
            self.handle.wish.send_replace(ready(status.view.number));
            timeout(LONG, self.handle.status.changed()).await.expect("a status in time").unwrap();
        }
    }

    fn has_lease(&self) -> bool {
        self.clock.until.lock().unwrap().is_some_and(|until| !self.clock.now().reached(until))
    }

    /// Waits for a lease.
    async fn holds(&self) {
        let wait = async {
            while !self.has_lease() {
                self.act();
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, wait).await.expect("a lease in time");
    }
}

#[tokio::test]
async fn who_is_ready_serves_and_keeps_its_lease() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.serves("a").await;
    b.serves("b").await;
    let status = a.is(|status| status.view.serving().count() == 2).await;
    assert_eq!(status.authority, Authority::Present);
    let other = status.view.member("b").unwrap();
    assert_eq!((other.incarnation, other.fingerprint), (secret(2).incarnation(), Some([2; 32])));
    assert_eq!(other.peer, Some("192.0.2.1:4790".parse().unwrap()));
    a.holds().await;
    b.holds().await;
    assert_eq!(a.is(|status| status.ttl < TTL).await.ttl, TTL * 9 / 10);
    sleep(TTL * 2).await;
    assert!(a.has_lease() && b.has_lease());
    // Whoever wishes no more beats no more, and its lease ends before the others hear that it is gone.
    let (clock, until) = (a.clock.clone(), Instant::now());
    drop(a.handle);
    timeout(LONG, a.task).await.unwrap().unwrap();
    b.is(|status| status.view.serving().count() == 1).await;
    assert!(clock.now().reached(clock.until.lock().unwrap().unwrap()));
    assert!(until.elapsed() >= TTL / 2);
}

#[tokio::test]
async fn who_drains_is_relieved() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.serves("a").await;
    b.serves("b").await;
    let begun = Instant::now();
    a.handle.wish.send_modify(|wanted| wanted.wish = Wish::Draining);
    b.is(|status| !status.view.member("a").unwrap().serving).await;
    assert!(begun.elapsed() < TTL, "it needs no silence");
}

#[tokio::test]
async fn a_server_that_returns_is_found_and_goes_on_where_the_last_one_stopped() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.serves("a").await;
    let view = b.serves("b").await.view;
    a.is(|status| status.view == view).await;
    let told = Arc::new(View { number: view.number + 1, ..View::default() });
    assert!(!a.handle.hear_elsewhere(told), "as long as the server is heard");
    let port = server.kill();
    a.is(|status| status.authority == Authority::Lost).await;
    assert_eq!(a.handle.status.borrow().view, view);
    // Meanwhile others may know more.
    let later = Arc::new(View { number: view.number + 3, ..View::clone(&view) });
    assert!(a.handle.hear_elsewhere(later.clone()) && !a.handle.hear_elsewhere(later.clone()), "it is news once");
    assert!(!a.handle.hear_elsewhere(view), "nothing of the past");
    a.is(|status| status.view == later).await;
    let server = Server::at(port, Some(&["a", "b"]));
    let begun = Instant::now();
    a.is(|status| status.authority == Authority::Present).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    a.holds().await;
    b.holds().await;
    sleep(TTL * 2).await;
    let view = a.handle.status.borrow().view.clone();
    assert!(
        view.number >= later.number && view.members.len() == 2,
        "it goes on behind what anybody has heard: {view:?}"
    );
    // Who hasn't heard of that view yet acts by it as soon as it has.
    a.holds().await;
    b.holds().await;
    server.kill();
}

#[tokio::test]
async fn a_server_without_the_service_is_no_authority() {
    let server = Server::at(0, None);
    let mut a = Gateway::start("a", 1, server.port);
    a.is(|status| status.authority == Authority::None).await;
    let port = server.kill();
    let server = Server::at(port, Some(&["a"]));
    a.is(|status| status.authority == Authority::Present).await;
    let port = server.kill();
    // Nor does it take back who serves: else all would.
    let server = Server::at(port, None);
    a.is(|status| status.authority == Authority::Lost).await;
    sleep(TTL).await;
    assert_eq!(a.handle.status.borrow().authority, Authority::Lost);
    server.kill();
}

#[tokio::test]
async fn the_newer_of_two_processes_with_one_name_gets_nothing() {
    let server = Server::start(&["a"]);
    let mut older = Gateway::start("a", 1, server.port);
    older.serves("a").await;
    let mut newer = Gateway::start("a", 2, server.port);
    newer.is(|status| status.authority == Authority::Present).await;
    newer.is(|status| status.authority == Authority::Lost).await;
    sleep(TTL).await;
    assert!(older.has_lease() && !newer.has_lease());
    assert_eq!(older.handle.status.borrow().view.member("a").unwrap().incarnation, secret(1).incarnation());
}

/// Whoever starts a gateway again doesn't wait for its own lease; whoever comes from elsewhere does.
#[tokio::test]
async fn after_a_crash_the_next_process_has_the_name_within_a_ttl_and_on_the_same_host_at_once() {
    let server = Server::start(&["a"]);
    let mut process = Gateway::start("a", 1, server.port);
    for (next, before) in [(2, None), (3, Some(2))] {
        process.serves("a").await;
        process.holds().await;
        process.task.abort();
        let begun = Instant::now();
        process = Gateway::after("a", next, before, server.port);
        let is_in = move |status: &Status| {
            status.view.member("a").is_some_and(|member| member.incarnation == secret(next).incarnation())
        };
        process.is(is_in).await;
        let took = begun.elapsed();
        println!("process {next} was in after {took:?}");
        assert_eq!(took < TTL / 2, before.is_some(), "{took:?}");
    }
}

/// Somebody who has seen the view repeats what it shows of a process.
#[tokio::test]
async fn a_beat_with_anothers_incarnation_changes_nothing_and_ends_nothing() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.serves("a").await;
    let view = b.serves("b").await.view;
    a.is(|status| *status.view == *view).await;
    let shown = view.member("a").unwrap().clone();
    assert_eq!(shown.incarnation, secret(1).incarnation());
    let mut client = MembershipClient::connect(format!("http://127.0.0.1:{}", server.port)).await.unwrap();
    let commitment = shown.commitment.unwrap().to_vec();
    for secret in [Vec::new(), commitment.clone(), vec![9; 32]] {
        let beat = proto::Beat {
            gateway: "a".to_owned(),
            incarnation: shown.incarnation,
            sequence: 1,
            wish: proto::beat::Wish::Ready.into(),
            seen_view: view.number,
            fingerprint: vec![9; 32],
            peer_address: "192.0.2.9".to_owned(),
            peer_port: 4790,
            secret,
            commitment: commitment.clone(),
            ..proto::Beat::default()
        };
        for _ in 0..3 {
            let beats = tokio_stream::iter([beat.clone()]).chain(tokio_stream::pending());
            let mut notices = client.join(beats).await.unwrap().into_inner();
            let refusal = timeout(LONG, notices.message()).await.expect("an answer").expect_err("it isn't a");
            assert!(matches!(refusal.code(), Code::PermissionDenied | Code::InvalidArgument), "{refusal}");
        }
    }
    // Its streams have ended, and that says nothing about a's process either: another one is refused as ever.
    let mut next = Gateway::start("a", 3, server.port);
    next.is(|status| status.authority == Authority::Lost).await;
    sleep(TTL * 2).await;
    assert!(a.has_lease() && b.has_lease() && !next.has_lease());
    assert_eq!(b.handle.status.borrow().view, view, "nothing has changed");
    assert_eq!(a.handle.status.borrow().view.member("a"), Some(&shown));
}

#[tokio::test]
async fn a_stranger_hears_who_serves_and_gets_no_lease() {
    let server = Server::start(&["a"]);
    let (mut a, mut x) = (Gateway::start("a", 1, server.port), Gateway::start("x", 2, server.port));
    a.serves("a").await;
    let number = x.is(|status| status.view.serving().count() == 1).await.view.number;
    x.handle.wish.send_replace(ready(number));
    sleep(TTL).await;
    assert!(!x.has_lease());
    assert_eq!(x.handle.status.borrow().view.member("x"), None);
}

/// Its word changes nothing while the policy doesn't have it; afterwards it must, or numbers of views would be given out twice.
#[tokio::test]
async fn what_a_stranger_knew_when_it_came_counts_once_the_policy_has_it() {
    let server = Server::start(&["a"]);
    let mut client = MembershipClient::connect(format!("http://127.0.0.1:{}", server.port)).await.unwrap();
    let (beats, receiver) = mpsc::channel(4);
    let known = View { number: 5, ..View::default() };
    let beat = |sequence: u64, view: Option<&View>| proto::Beat {
        gateway: "x".to_owned(),
        incarnation: secret(1).incarnation(),
        secret: secret(1).bytes().to_owned(),
        sequence,
        seen_view: known.number,
        view: view.map(proto::View::from),
        ..proto::Beat::default()
    };
    beats.send(beat(1, Some(&known))).await.unwrap();
    let mut notices = client.join(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    let told = timeout(LONG, notices.message()).await.unwrap().unwrap().unwrap();
    assert_eq!((told.sequence, told.view.map(|view| view.number)), (1, Some(0)));
    server.policy.send_replace(Some(published(&["a", "x"])));
    let mut number = 0;
    for sequence in 2.. {
        beats.send(beat(sequence, None)).await.unwrap();
        let told = timeout(LONG, notices.message()).await.unwrap().unwrap().unwrap();
        number = told.view.map_or(number, |view| view.number);
        // The beat may overtake the policy.
        if number > 0 {
            break;
        }
        assert!(sequence < 100, "what it knew is lost");
        sleep(TTL / 40).await;
    }
    assert_eq!(number, known.number);
}

#[tokio::test]
async fn a_server_that_says_nothing_is_no_authority_yet() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let a = Gateway::start("a", 1, listener.local_addr().unwrap().port());
    sleep(Duration::from_millis(700)).await;
    assert_eq!(a.handle.status.borrow().authority, Authority::Unknown);
    drop(a.handle);
    timeout(LONG, a.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn whoever_has_a_name_hears_of_another_process_that_wants_it() {
    let server = Server::start(&["a"]);
    let beat = |process: u8, sequence: u64| proto::Beat {
        gateway: "a".to_owned(),
        incarnation: secret(process).incarnation(),
        secret: secret(process).bytes().to_owned(),
        sequence,
        ..proto::Beat::default()
    };
    let open = async |process: u8| {
        let mut client = MembershipClient::connect(format!("http://127.0.0.1:{}", server.port)).await.unwrap();
        let (beats, receiver) = mpsc::channel(4);
        beats.send(beat(process, 1)).await.unwrap();
        (beats, client.join(ReceiverStream::new(receiver)).await.unwrap().into_inner())
    };
    let answered = async |notices: &mut tonic::Streaming<proto::Notice>, to: u64| loop {
        let notice = timeout(LONG, notices.message()).await.expect("a notice")?.expect("a notice");
        if notice.sequence == to {
            return Ok::<_, tonic::Status>(notice.rival);
        }
    };
    let (first, mut at_first) = open(1).await;
    assert_eq!(answered(&mut at_first, 1).await.unwrap(), "");
    let (second, mut at_second) = open(2).await;
    assert_eq!(answered(&mut at_second, 1).await.unwrap(), "", "whether the first one lives will show");
    first.send(beat(1, 2)).await.unwrap();
    assert_eq!(answered(&mut at_first, 2).await.unwrap(), "");
    second.send(beat(2, 2)).await.unwrap();
    let refusal = answered(&mut at_second, 2).await.unwrap_err();
    assert_eq!(refusal.code(), Code::AlreadyExists);
    assert!(refusal.message().contains("that one is at 127.0.0.1:"), "{refusal}");
    for (sequence, is_told) in [(3, true), (4, false)] {
        first.send(beat(1, sequence)).await.unwrap();
        let rival = answered(&mut at_first, sequence).await.unwrap();
        assert_eq!(rival.starts_with("127.0.0.1:"), is_told, "{rival}");
    }
}
