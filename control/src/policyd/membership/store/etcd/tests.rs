//! The etcd store against real etcd servers: the store alone, and membership authorities that share one.

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use vipgate_policy::compiler::{Peer, Placement};

use super::*;
use crate::membership::authority::Rejection;
use crate::membership::{Member, Secret};
use crate::policyd::membership::coordinator::{HeartbeatError, HeartbeatReply, StreamEvent, StreamOrigin};
use crate::policyd::membership::{MembershipHandle, start};
use crate::policyd::stats::Stats;
use crate::source::etcd::tests::server::{EtcdServer, TEST_TIMEOUT};
use crate::xds::publication::Publication;

const TTL: Duration = Duration::from_secs(1);
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(150);

fn config(server: &EtcdServer) -> config::Etcd {
    config::Etcd { endpoints: vec![server.endpoint()], prefix: "/vipgate/".into() }
}

fn view(number: u64) -> MembershipView {
    let members = vec![Member { serving: true, incarnation: 1, ..Member::new("a".into(), number) }];
    MembershipView { number, serving_changes: 1, members }
}

const EMPTY: Transaction<'_> = Transaction { heartbeats: &[], view: None, unchanged: &[], removed: &[] };

/// Reads the contents, like the first transaction of a server.
async fn read(store: &mut EtcdStore) -> StoreContents {
    match store.commit(EMPTY).await.unwrap() {
        CommitOutcome::Conflict(contents) => contents,
        CommitOutcome::Committed => panic!("nothing was read"),
    }
}

fn is_committed(outcome: &CommitOutcome) -> bool {
    matches!(outcome, CommitOutcome::Committed)
}

#[tokio::test]
async fn a_transaction_under_an_outdated_view_conflicts() {
    let server = EtcdServer::running().await;
    let (mut one, mut other) = (EtcdStore::open(&config(&server), TTL), EtcdStore::open(&config(&server), TTL));
    assert_eq!(read(&mut one).await.view, None);
    assert_eq!(read(&mut other).await.view, None);
    let (a, first) = (Heartbeat::minimal("a", 1, DesiredState::Ready, 0), view(1));
    let transaction = Transaction { heartbeats: &[&a], view: Some(&first), ..EMPTY };
    assert!(is_committed(&one.commit(transaction).await.unwrap()));
    let outcome = other.commit(Transaction { heartbeats: &[&a], ..EMPTY }).await.unwrap();
    let CommitOutcome::Conflict(contents) = outcome else { panic!("committed without the view") };
    assert_eq!(contents.view.as_deref(), Some(&first));
    assert_eq!(contents.heartbeats, std::slice::from_ref(&a), "a recent heartbeat is read unchanged");
    assert!(is_committed(&other.commit(Transaction { heartbeats: &[&a], ..EMPTY }).await.unwrap()));
}

#[tokio::test]
async fn a_gateway_whose_heartbeat_another_server_accepted_is_not_deactivated() {
    let server = EtcdServer::running().await;
    let (mut one, mut other) = (EtcdStore::open(&config(&server), TTL), EtcdStore::open(&config(&server), TTL));
    read(&mut one).await;
    let (a, first, second) = (Heartbeat::minimal("a", 1, DesiredState::Ready, 1), view(1), view(2));
    assert!(is_committed(&one.commit(Transaction { heartbeats: &[&a], view: Some(&first), ..EMPTY }).await.unwrap()));
    let contents = read(&mut other).await;
    assert_eq!(
        contents.heartbeats,
        [Heartbeat::minimal("a", 1, DesiredState::Joining, 1)],
        "a heartbeat of unknown age isn't ready"
    );
    assert!(is_committed(&one.commit(Transaction { heartbeats: &[&a], ..EMPTY }).await.unwrap()));
    let names = [Arc::from("a")];
    let transaction = Transaction { view: Some(&second), unchanged: &names, ..EMPTY };
    let CommitOutcome::Conflict(contents) = other.commit(transaction).await.unwrap() else { panic!("a is alive") };
    assert_eq!(contents.heartbeats, [a]);
    let transaction = Transaction { view: Some(&second), unchanged: &names, removed: &names, ..EMPTY };
    assert!(is_committed(&other.commit(transaction).await.unwrap()));
    let CommitOutcome::Conflict(contents) = one.commit(EMPTY).await.unwrap() else { panic!("there is a new view") };
    assert_eq!((contents.view.as_deref(), contents.heartbeats.len()), (Some(&second), 0));
}

/// A membership authority with its store.
struct Authority {
    members: MembershipHandle,
    _publish: watch::Sender<Option<Arc<Publication>>>,
}

impl Authority {
    fn start(server: &EtcdServer) -> Self {
        let peer = |name: &str| Peer {
            name: name.into(),
            node: "n".into(),
            zone: "".into(),
            address: None,
            pods: [].into(),
            uncovered: None,
        };
        let placement = Placement { peers: vec![peer("a"), peer("b")], ..Placement::default() };
        let publication = Arc::new(Publication::default().next(Arc::new(placement)).unwrap());
        let (publish, published) = watch::channel(Some(publication));
        let store = EtcdStore::open(&config(server), TTL);
        Self { members: start(TTL, store, published, Arc::<Stats>::default()), _publish: publish }
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, HeartbeatError> {
        let (sender, reply) = oneshot::channel();
        self.members
            .events
            .send(StreamEvent::Heartbeat(Box::new(heartbeat), StreamOrigin::default(), sender))
            .await
            .unwrap();
        timeout(TEST_TIMEOUT, reply).await.expect("a reply in time").expect("the authority is running")
    }

    async fn wait_for(&self, is_met: impl Fn(&MembershipView) -> bool) -> Arc<MembershipView> {
        let mut view = self.members.view.clone();
        timeout(TEST_TIMEOUT, view.wait_for(|view| is_met(view))).await.expect("a view in time").unwrap().clone()
    }
}

/// A ready gateway that sends heartbeats, and the times of its leases.
struct Gateway {
    task: JoinHandle<()>,
    leases: watch::Receiver<Option<Instant>>,
}

impl Gateway {
    fn start(name: &'static str, at: &Authority) -> Self {
        Self::with_heartbeat(at, move |seen| Heartbeat::minimal(name, 1, DesiredState::Ready, seen))
    }

    /// A gateway with a secret.
    fn with_secret(name: &'static str, process: u8, at: &Authority) -> Self {
        Self::with_heartbeat(at, move |seen| secret_heartbeat(name, process, seen))
    }

    fn with_heartbeat(at: &Authority, heartbeat: impl Fn(u64) -> Heartbeat + Send + 'static) -> Self {
        let (sender, leases) = watch::channel(None);
        let at = Authority { members: at.members.clone(), _publish: watch::channel(None).0 };
        let task = tokio::spawn(async move {
            let mut seen = 0;
            loop {
                if let Ok(reply) = at.heartbeat(heartbeat(seen)).await {
                    seen = reply.view.number;
                    if reply.lease.is_some() {
                        sender.send_replace(Some(Instant::now()));
                    }
                }
                sleep(HEARTBEAT_INTERVAL).await;
            }
        });
        Self { task, leases }
    }

    /// Waits for a lease that is granted from now on.
    async fn wait_for_lease(&mut self) {
        let now = Instant::now();
        let granted = self.leases.wait_for(|at| at.is_some_and(|at| at > now));
        timeout(TEST_TIMEOUT, granted).await.expect("a lease in time").unwrap();
    }

    fn stop(self) {
        self.task.abort();
    }
}

fn both_active(view: &MembershipView) -> bool {
    view.active_members().count() == 2
}

#[tokio::test]
async fn gateways_may_use_any_of_several_servers() {
    let server = EtcdServer::running().await;
    let (one, other) = (Authority::start(&server), Authority::start(&server));
    let (mut a, mut b) = (Gateway::start("a", &one), Gateway::start("b", &other));
    let view = one.wait_for(both_active).await;
    assert_eq!(other.wait_for(both_active).await, view);
    a.wait_for_lease().await;
    b.wait_for_lease().await;
    // It continues at the other one, and the view stays the same.
    a.stop();
    let mut a = Gateway::start("a", &other);
    drop(one);
    a.wait_for_lease().await;
    sleep(TTL * 3).await;
    assert_eq!(other.wait_for(both_active).await, view);
    // A third one starts with the same view.
    let third = Authority::start(&server);
    assert_eq!(third.wait_for(|view| view.number > 0).await, view);
    b.stop();
    let after = third.wait_for(|view| view.active_members().count() == 1).await;
    assert!(after.number > view.number && after.member("a").unwrap().serving);
    assert_eq!(other.wait_for(|view| *view == *after).await, after);
    a.wait_for_lease().await;
}

/// A heartbeat of the process with this secret.
fn secret_heartbeat(name: &str, process: u8, seen_view: u64) -> Heartbeat {
    let secret = Secret::from_slice(&[process; 32]).unwrap();
    let commitment = secret.commitment();
    Heartbeat { commitment, ..Heartbeat::minimal(name, secret.incarnation(), DesiredState::Ready, seen_view) }
}

#[tokio::test]
async fn an_impostor_is_rejected_at_every_server() {
    let server = EtcdServer::running().await;
    let (one, other) = (Authority::start(&server), Authority::start(&server));
    let (mut a, _b) = (Gateway::with_secret("a", 1, &one), Gateway::with_secret("b", 2, &other));
    let view = one.wait_for(both_active).await;
    assert_eq!(other.wait_for(both_active).await, view);
    let started = Instant::now();
    let mut rejected = [0, 0];
    while started.elapsed() < 3 * TTL {
        for at in [&one, &other] {
            let new_process = at.heartbeat(secret_heartbeat("a", 9, view.number)).await;
            match new_process {
                Ok(reply) => assert_eq!(reply.lease, None, "it is deferred"),
                Err(HeartbeatError::Rejected { rejection: Rejection::NameInUse { .. }, .. }) => rejected[0] += 1,
                Err(error) => panic!("{error}"),
            }
            let incarnation = secret_heartbeat("a", 1, 0).incarnation;
            for commitment in [2, 9].map(|process| secret_heartbeat("a", process, 0).commitment) {
                let forged =
                    Heartbeat { commitment, ..Heartbeat::minimal("a", incarnation, DesiredState::Ready, view.number) };
                let error = at.heartbeat(forged).await.unwrap_err();
                assert!(
                    matches!(error, HeartbeatError::Rejected { rejection: Rejection::InvalidSecret { .. }, .. }),
                    "{error}"
                );
                rejected[1] += 1;
            }
        }
        sleep(HEARTBEAT_INTERVAL).await;
    }
    assert!(rejected.iter().all(|count| *count > 4), "{rejected:?}");
    a.wait_for_lease().await;
    assert_eq!((one.wait_for(both_active).await, other.wait_for(both_active).await), (view.clone(), view.clone()));
    // A server that starts now has the commitments from etcd.
    let third = Authority::start(&server);
    third.wait_for(|now| *now == *view).await;
    let forged = Heartbeat::minimal("a", secret_heartbeat("a", 1, 0).incarnation, DesiredState::Ready, view.number);
    assert!(third.heartbeat(forged).await.is_err());
}

#[tokio::test]
async fn while_etcd_is_down_no_lease_is_granted_and_no_gateway_is_deactivated() {
    let mut server = EtcdServer::running().await;
    let one = Authority::start(&server);
    let (mut a, b) = (Gateway::start("a", &one), Gateway::start("b", &one));
    let view = one.wait_for(both_active).await;
    server.kill();
    let error = one.heartbeat(Heartbeat::minimal("a", 1, DesiredState::Ready, view.number)).await.unwrap_err();
    assert!(error.to_string().contains("etcd is unreachable"), "{error}");
    sleep(TTL * 2).await;
    server.start().await;
    a.wait_for_lease().await;
    sleep(TTL * 2).await;
    assert_eq!(one.wait_for(both_active).await, view);
    b.stop();
    one.wait_for(|view| view.active_members().count() == 1).await;
}

#[tokio::test]
async fn an_etcd_that_has_lost_its_data_gets_the_view_again() {
    let mut server = EtcdServer::running().await;
    let one = Authority::start(&server);
    let (mut a, _b) = (Gateway::start("a", &one), Gateway::start("b", &one));
    let view = one.wait_for(both_active).await;
    server.kill();
    server.wipe();
    server.start().await;
    let after = one.wait_for(|now| now.number > view.number).await;
    assert_eq!(after.active_members().count(), 2);
    a.wait_for_lease().await;
    let other = Authority::start(&server);
    assert_eq!(other.wait_for(|view| view.number > 0).await, after);
}
