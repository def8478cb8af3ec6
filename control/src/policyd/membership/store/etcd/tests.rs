//! The etcd store against real etcd servers: the store alone, and policy servers that share one and elect a leader.

use std::sync::Arc;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use vipgate_common::Tasks;
use vipgate_policy::compiler::Placement;

use super::*;
use crate::membership::authority::MembershipState;
use crate::membership::{DesiredState, Heartbeat, MembershipView};
use crate::policyd::leader::{self, EtcdLease};
use crate::policyd::membership::MembershipHandle;
use crate::policyd::membership::coordinator::{HeartbeatError, HeartbeatReply, StreamEvent, StreamOrigin, start_with};
use crate::policyd::membership::store::writer::RecordWriter;
use crate::source::etcd::tests::server::{EtcdServer, TEST_TIMEOUT};
use crate::xds::fixtures::peer;
use crate::xds::publication::Publication;

const TTL: Duration = Duration::from_secs(1);
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(150);

fn config(server: &EtcdServer) -> Etcd {
    Etcd { endpoints: vec![server.endpoint()], prefix: "/vipgate/".into() }
}

fn store(server: &EtcdServer) -> EtcdStore {
    EtcdStore::new(&config(server), TTL)
}

fn record(term: u64, number: u64) -> Record {
    Record { term, view: Arc::new(MembershipView { number, ..MembershipView::default() }) }
}

#[tokio::test]
async fn a_write_that_follows_from_another_record_conflicts() {
    let server = EtcdServer::running().await;
    let (mut one, mut other) = (store(&server), store(&server));
    assert!(one.load().await.unwrap().is_none());
    let version = one.compare_and_swap(None, &record(1, 0)).await.unwrap();
    assert_eq!(other.compare_and_swap(None, &record(1, 7)).await, Err(WriteError::Conflict));
    let second = one.compare_and_swap(Some(&version), &record(1, 7)).await.unwrap();
    assert_eq!(other.compare_and_swap(Some(&version), &record(2, 7)).await, Err(WriteError::Conflict));
    let stored = other.load().await.unwrap().unwrap();
    assert_eq!((&stored.version, stored.record), (&second, record(1, 7)));
}

#[tokio::test]
async fn a_value_that_is_no_record_is_named_and_stays() {
    let server = EtcdServer::running().await;
    server.put("/vipgate-members/record", [255]).await;
    let StoreError(reason) = store(&server).load().await.unwrap_err();
    assert!(reason.starts_with("etcd key /vipgate-members/record: not a record of membership"), "{reason}");
}

/// A policy server's membership authority, which takes part in the election.
struct Authority {
    members: MembershipHandle,
    election: JoinHandle<()>,
    tasks: Tasks,
    _publish: watch::Sender<Option<Arc<Publication>>>,
}

impl Authority {
    fn start(server: &EtcdServer) -> Self {
        let placement = Placement { peers: vec![peer("a"), peer("b")], ..Placement::default() };
        let publication = Arc::new(Publication::default().next(Arc::new(placement)).unwrap());
        let (publish, published) = watch::channel(Some(publication));
        let (sender, leadership) = watch::channel(None);
        let tasks = Tasks::default();
        let election = tokio::spawn(leader::run(EtcdLease::new(&config(server)), sender, None, tasks.clone()));
        let records = RecordWriter::shared(store(server), store(server));
        let state = MembershipState::new(TTL);
        let members = start_with(state, Some(leadership), records, published, Arc::default());
        Self { members, election, tasks, _publish: publish }
    }

    async fn heartbeat(members: &MembershipHandle, heartbeat: Heartbeat) -> Result<HeartbeatReply, HeartbeatError> {
        let (sender, reply) = oneshot::channel();
        let event = StreamEvent::Heartbeat(Box::new(heartbeat), StreamOrigin::default(), sender);
        members.events.send(event).await.map_err(|_| HeartbeatError::NotLeader)?;
        timeout(TEST_TIMEOUT, reply).await.expect("a reply in time").unwrap_or(Err(HeartbeatError::NotLeader))
    }

    async fn wait_for(&self, is_met: impl Fn(&MembershipView) -> bool) -> Arc<MembershipView> {
        let mut view = self.members.view.clone();
        timeout(TEST_TIMEOUT, view.wait_for(|view| is_met(view))).await.expect("a view in time").unwrap().clone()
    }

    /// Ends it, without giving the lease back if it is killed.
    async fn end(self, is_killed: bool) {
        if is_killed {
            self.election.abort();
        } else {
            self.tasks.stop(TEST_TIMEOUT).await;
            self.election.await.unwrap();
        }
    }
}

/// A ready gateway that sends heartbeats to whichever server decides, and the times of its leases.
struct Gateway {
    task: JoinHandle<()>,
    leases: watch::Receiver<Option<Instant>>,
}

impl Gateway {
    fn start(name: &'static str, servers: &[&Authority]) -> Self {
        let (sender, leases) = watch::channel(None);
        let servers: Vec<MembershipHandle> = servers.iter().map(|server| server.members.clone()).collect();
        let task = tokio::spawn(async move {
            let mut seen = 0;
            loop {
                for server in &servers {
                    let heartbeat = Heartbeat::minimal(name, 1, DesiredState::Ready, seen);
                    let Ok(reply) = Authority::heartbeat(server, heartbeat).await else { continue };
                    seen = seen.max(reply.view.number);
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
async fn one_of_several_servers_decides_and_when_it_ends_another_one_goes_on() {
    for is_killed in [false, true] {
        let server = EtcdServer::running().await;
        let one = Authority::start(&server);
        let (mut a, b) = (Gateway::start("a", &[&one]), Gateway::start("b", &[&one]));
        let view = one.wait_for(both_active).await;
        // It reads the view, and refuses heartbeats.
        let other = Authority::start(&server);
        assert_eq!(other.wait_for(both_active).await, view);
        let heartbeat = Heartbeat::minimal("a", 1, DesiredState::Ready, view.number);
        let refused = Authority::heartbeat(&other.members, heartbeat).await;
        assert_eq!(refused.unwrap_err(), HeartbeatError::NotLeader);
        a.wait_for_lease().await;
        a.stop();
        b.stop();
        one.end(is_killed).await;
        let (mut a, b) = (Gateway::start("a", &[&other]), Gateway::start("b", &[&other]));
        a.wait_for_lease().await;
        sleep(TTL * 2).await;
        assert_eq!(other.wait_for(both_active).await, view, "{is_killed}");
        b.stop();
        let after = other.wait_for(|view| view.active_members().count() == 1).await;
        assert!(after.number > view.number && after.member("a").unwrap().serving);
        a.wait_for_lease().await;
    }
}

#[tokio::test]
async fn while_etcd_is_down_no_lease_is_granted_for_long_and_no_gateway_is_deactivated() {
    let mut server = EtcdServer::running().await;
    let one = Authority::start(&server);
    let (mut a, b) = (Gateway::start("a", &[&one]), Gateway::start("b", &[&one]));
    let view = one.wait_for(both_active).await;
    server.kill();
    let began = Instant::now();
    let heartbeat = || Heartbeat::minimal("a", 1, DesiredState::Ready, view.number);
    while Authority::heartbeat(&one.members, heartbeat()).await.is_ok() {
        assert!(began.elapsed() < TEST_TIMEOUT, "it leads for no longer than its lease");
        sleep(HEARTBEAT_INTERVAL).await;
    }
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
    let (mut a, _b) = (Gateway::start("a", &[&one]), Gateway::start("b", &[&one]));
    let view = one.wait_for(both_active).await;
    server.kill();
    server.wipe();
    server.start().await;
    let after = one.wait_for(|now| now.number > view.number && both_active(now)).await;
    a.wait_for_lease().await;
    let other = Authority::start(&server);
    assert_eq!(other.wait_for(|view| view.number > 0).await, after);
}
