//! The coordinator with an unavailable store, those of several servers that elect a leader, and a lost record.

use vipgate_policy::compiler::Placement;

use super::*;
use crate::membership::DesiredState;
use crate::policyd::membership::store::fake::Fault;
use crate::xds::fixtures::peer;

/// A policy with these gateways.
fn placement(gateways: &[&str]) -> Arc<Placement> {
    Arc::new(Placement { peers: gateways.iter().map(|name| peer(name)).collect(), ..Placement::default() })
}

#[tokio::test]
async fn a_batch_without_a_write_does_not_end_a_store_outage() {
    let (ttl, store) = (Duration::from_millis(600), FakeStore::default());
    let (_publish, published) = watch::channel(Publication::default().next(placement(&["a"])).map(Arc::new));
    let state = MembershipState::new(ttl);
    let mut coordinator = Coordinator {
        ttl,
        shared_state: Arc::new(ArcSwap::from_pointee(state.clone())),
        state,
        role: Role::new(None),
        records: store.writer(),
        events: mpsc::channel(1).1,
        published,
        view: watch::channel(Arc::default()).0,
        stats: Arc::default(),
        unknown_gateways: BTreeSet::new(),
        origins: BTreeMap::new(),
        rivals: BTreeMap::new(),
        outage: Outage::default(),
    };
    coordinator.load_policy();
    let heartbeat = Heartbeat::minimal("a", 1, DesiredState::Ready, 0);
    assert!(coordinator.take_role().await);
    store.fail_next_write(Fault::RequestLost);
    let (sender, reply) = oneshot::channel();
    coordinator
        .process([StreamEvent::Heartbeat(Box::new(heartbeat), StreamOrigin::default(), sender)].into_iter())
        .await;
    assert!(matches!(reply.await.unwrap(), Err(HeartbeatError::Store(_))));
    assert!(coordinator.outage.is_active() && !coordinator.decides());
    coordinator.process(std::iter::empty()).await;
    assert!(coordinator.outage.is_active(), "nothing was written");
    coordinator.process([StreamEvent::Closed("a".into(), 1, StreamOrigin::default())].into_iter()).await;
    assert!(coordinator.outage.is_active());
}

/// A server of those that elect a leader, with the store in a fake API.
struct Server {
    handle: MembershipHandle,
    leadership: watch::Sender<Leadership>,
    _publish: watch::Sender<Option<Arc<Publication>>>,
    sequence: u64,
}

const TTL: Duration = Duration::from_millis(600);

impl Server {
    fn start(api: &FakeStore) -> Self {
        let (publish, published) = watch::channel(Publication::default().next(placement(&["a", "b"])).map(Arc::new));
        let (leadership, receiver) = watch::channel(None);
        let state = MembershipState::new(TTL);
        let handle = start_with(state, Some(receiver), api.writer(), published, Arc::default());
        Self { handle, leadership, _publish: publish, sequence: 0 }
    }

    fn lead(&self, duration: Duration) {
        self.leadership.send_replace(Some((Instant::now() + duration).into_std()));
    }

    fn resign(&self) {
        self.leadership.send_replace(None);
    }

    /// Sends a heartbeat of a gateway that has applied the server's view.
    async fn heartbeat(&mut self, gateway: &str) -> Result<HeartbeatReply, HeartbeatError> {
        let seen = self.handle.view.borrow().number;
        let incarnation = u64::from(gateway.as_bytes()[0]);
        self.send(Heartbeat::minimal(gateway, incarnation, DesiredState::Ready, seen)).await
    }

    async fn send(&mut self, heartbeat: Heartbeat) -> Result<HeartbeatReply, HeartbeatError> {
        let incarnation = heartbeat.incarnation;
        self.sequence += 1;
        let origin = StreamOrigin { stream: incarnation, address: None };
        let (sender, reply) = oneshot::channel();
        self.handle.events.send(StreamEvent::Heartbeat(Box::new(heartbeat), origin, sender)).await.unwrap();
        reply.await.unwrap()
    }

    /// Waits until this server has read a view.
    async fn follow(&mut self, view: &MembershipView) {
        let read = self.handle.view.wait_for(|read| **read == *view);
        tokio::time::timeout(Duration::from_secs(20), read).await.expect("the view in time").unwrap();
    }

    /// Sends heartbeats of both gateways until both are active; the view.
    async fn activate(&mut self) -> Arc<MembershipView> {
        for _ in 0..100 {
            for gateway in ["a", "b"] {
                let _ = self.heartbeat(gateway).await;
            }
            let view = self.handle.view.borrow().clone();
            if view.active_members().count() == 2 {
                return view;
            }
            tokio::time::sleep(TTL / 4).await;
        }
        panic!("not active: {:?}", self.handle.view.borrow());
    }
}

#[tokio::test]
async fn only_the_leader_answers_and_the_next_one_goes_on_from_its_view() {
    let api = FakeStore::default();
    let (mut first, mut second) = (Server::start(&api), Server::start(&api));
    assert_eq!(first.heartbeat("a").await.unwrap_err(), HeartbeatError::NotLeader);
    first.lead(Duration::from_hours(1));
    let view = first.activate().await;
    assert_eq!(second.heartbeat("a").await.unwrap_err(), HeartbeatError::NotLeader);
    second.follow(&view).await;

    // Heartbeats are not written.
    let writes = api.writes();
    for _ in 0..10 {
        assert!(first.heartbeat("a").await.unwrap().lease.is_some());
        assert!(first.heartbeat("b").await.unwrap().lease.is_some());
        tokio::time::sleep(TTL / 4).await;
    }
    assert_eq!(api.writes(), writes);

    // Leases go on at once, under the same view.
    first.resign();
    second.lead(Duration::from_hours(1));
    assert_eq!(first.heartbeat("a").await.unwrap_err(), HeartbeatError::NotLeader);
    for gateway in ["a", "b"] {
        let reply = second.heartbeat(gateway).await.unwrap();
        assert!(reply.lease.is_some(), "{gateway}");
        assert_eq!(reply.view, view);
    }
    assert_eq!(api.writes(), writes + 1, "only that it has taken over");
    assert!(first.handle.state.load().record("a").is_none(), "its heartbeats are of the past");
}

#[tokio::test]
async fn a_lead_that_has_ended_grants_nothing_and_one_that_begins_again_takes_over_again() {
    let api = FakeStore::default();
    let mut server = Server::start(&api);
    server.lead(Duration::from_hours(1));
    let view = server.activate().await;
    let writes = api.writes();
    server.lead(TTL / 4);
    tokio::time::sleep(2 * TTL).await;
    assert_eq!(server.heartbeat("a").await.unwrap_err(), HeartbeatError::NotLeader);
    assert_eq!(api.writes(), writes, "no gateway is deactivated by a server that doesn't lead");
    server.lead(Duration::from_hours(1));
    assert!(server.heartbeat("a").await.unwrap().lease.is_some());
    assert_eq!((api.writes(), api.record().unwrap().term), (writes + 1, 2));
    assert_eq!(server.handle.view.borrow().number, view.number);
}

#[tokio::test]
async fn the_next_leader_deactivates_a_silent_gateway_when_its_last_lease_has_expired() {
    let api = FakeStore::default();
    let (mut first, mut second) = (Server::start(&api), Server::start(&api));
    first.lead(Duration::from_hours(1));
    first.activate().await;
    assert!(first.heartbeat("b").await.unwrap().lease.is_some());
    first.resign();
    second.lead(Duration::from_hours(1));
    let began = Instant::now();
    loop {
        let _ = second.heartbeat("a").await;
        let now = second.handle.view.borrow().clone();
        if !now.member("b").unwrap().serving {
            assert_eq!((now.number, now.member("b").unwrap().lease_expired), (2_000_001, true));
            assert!(began.elapsed() >= TTL, "{:?}", began.elapsed());
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{now:?}");
        tokio::time::sleep(TTL / 20).await;
    }
}

#[tokio::test]
async fn after_a_write_without_a_response_views_go_on_and_no_number_is_used_twice() {
    for fault in [Fault::RequestLost, Fault::ResponseLost, Fault::Delayed] {
        let api = FakeStore::default();
        let mut server = Server::start(&api);
        server.lead(Duration::from_hours(1));
        let view = server.activate().await;
        // Gateway b falls silent.
        api.fail_next_write(fault);
        let mut numbers = vec![view.number];
        let began = Instant::now();
        while server.handle.view.borrow().member("b").unwrap().serving {
            assert!(began.elapsed() < Duration::from_secs(20), "{fault:?}: {numbers:?}");
            let _ = server.heartbeat("a").await;
            api.deliver_delayed();
            numbers.push(server.handle.view.borrow().number);
            tokio::time::sleep(TTL / 10).await;
        }
        assert!(!api.has_fault(), "{fault:?}");
        assert!(numbers.is_sorted(), "{fault:?}: {numbers:?}");
        let now = server.handle.view.borrow().clone();
        assert!(!now.member("b").unwrap().serving, "{fault:?}: {now:?}");
        assert_eq!(api.record().unwrap().view, now, "{fault:?}");
    }
}

#[tokio::test]
async fn the_number_never_goes_back_when_the_object_is_deleted() {
    let api = FakeStore::default();
    let (mut first, mut second) = (Server::start(&api), Server::start(&api));
    first.lead(Duration::from_hours(1));
    let view = first.activate().await;
    // The other server knows the view from reading it.
    second.follow(&view).await;
    api.delete();
    first.resign();
    second.lead(Duration::from_hours(1));
    let next = second.activate().await;
    assert!(next.number > view.number, "{} after {}", next.number, view.number);
    assert_eq!(api.record().unwrap().view, next);
}

#[tokio::test]
async fn a_server_whose_record_is_from_a_backup_replies_nothing_until_leases_have_expired() {
    let api = FakeStore::default();
    let mut first = Server::start(&api);
    first.lead(Duration::from_hours(1));
    let view = first.activate().await;
    drop(first);
    let lost = FakeStore::default();
    let mut next = Server::start(&lost);
    next.lead(Duration::from_hours(1));
    let began = Instant::now();
    let seen = |gateway: &str| {
        let incarnation = u64::from(gateway.as_bytes()[0]);
        Heartbeat::minimal(gateway, incarnation, DesiredState::Ready, view.number)
    };
    loop {
        let mut replies = Vec::new();
        for gateway in ["a", "b"] {
            replies.push(next.send(seen(gateway)).await);
        }
        if let [Ok(one), Ok(other)] = &replies[..] {
            assert!(began.elapsed() >= TTL && one.lease.is_some() && other.lease.is_some());
            assert!(one.view.number > view.number && one.view.active_members().count() == 2, "{:?}", one.view);
            assert_eq!(lost.record().unwrap().view, other.view);
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{replies:?}");
        tokio::time::sleep(TTL / 8).await;
    }
}
