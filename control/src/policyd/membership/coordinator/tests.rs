//! The coordinator with an unavailable store.

use vipgate_policy::compiler::{Peer, Placement};

use super::*;

/// A store whose commits always fail.
struct UnavailableStore;

impl Store for UnavailableStore {
    async fn commit(&mut self, _: Transaction<'_>) -> Result<CommitOutcome, StoreError> {
        Err(StoreError::Unavailable("no leader".to_owned()))
    }

    async fn next_remote_write(&mut self) -> RemoteWrite {
        std::future::pending().await
    }
}

#[tokio::test]
async fn a_batch_without_a_write_does_not_end_a_store_outage() {
    let ttl = Duration::from_millis(600);
    let peer =
        Peer { name: "a".into(), node: "n".into(), zone: "".into(), address: None, pods: [].into(), uncovered: None };
    let placement = Arc::new(Placement { peers: vec![peer], ..Placement::default() });
    let (_publish, published) = watch::channel(Publication::default().next(placement).map(Arc::new));
    let state = MembershipState::new(ttl);
    let mut coordinator = Coordinator {
        ttl,
        shared_state: Arc::new(ArcSwap::from_pointee(state.clone())),
        state,
        store: UnavailableStore,
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
    let heartbeat = Heartbeat {
        gateway: "a".into(),
        incarnation: 1,
        commitment: None,
        predecessor: None,
        desired_state: DesiredState::Ready,
        seen_view: 0,
        fingerprint: None,
        peer: None,
        tunnel_key: None,
        unable: None,
        view: None,
    };
    for _ in 0..3 {
        let (sender, reply) = oneshot::channel();
        coordinator
            .process([StreamEvent::Heartbeat(heartbeat.clone(), StreamOrigin::default(), sender)].into_iter())
            .await;
        assert!(matches!(reply.await.unwrap(), Err(HeartbeatError::Store(_))));
        assert!(coordinator.outage.is_active());
        coordinator.process(std::iter::empty()).await;
        assert!(coordinator.outage.is_active(), "nothing was written");
    }
    coordinator.process([StreamEvent::Closed("a".into(), 1, StreamOrigin::default())].into_iter()).await;
    assert!(coordinator.outage.is_active());
}
