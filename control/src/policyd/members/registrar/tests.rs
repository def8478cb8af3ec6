//! A store that can't be written.

use super::*;
use crate::policy::{Deal, Peer};

/// A store that never takes anything.
struct Broken;

impl Store for Broken {
    async fn commit(&mut self, _: Change<'_>) -> Result<Committed, StoreError> {
        Err(StoreError::Unusable("no leader".to_owned()))
    }

    async fn news(&mut self) -> News {
        std::future::pending().await
    }
}

#[tokio::test]
async fn a_turn_with_nothing_to_write_is_no_sign_that_the_store_works() {
    let ttl = Duration::from_millis(600);
    let peer =
        Peer { name: "a".into(), node: "n".into(), zone: "".into(), address: None, pods: [].into(), uncovered: None };
    let deal = Arc::new(Deal { peers: vec![peer], ..Deal::default() });
    let (_publish, published) = watch::channel(Publication::default().next(deal).map(Arc::new));
    let roster = Roster::new(ttl);
    let mut registrar = Registrar {
        ttl,
        shared: Arc::new(ArcSwap::from_pointee(roster.clone())),
        roster,
        store: Broken,
        events: mpsc::channel(1).1,
        published,
        view: watch::channel(Arc::default()).0,
        figures: Arc::default(),
        strangers: BTreeSet::new(),
        origins: BTreeMap::new(),
        rivals: BTreeMap::new(),
        outage: Outage::default(),
    };
    registrar.see_policy();
    let beat = Beat {
        gateway: "a".into(),
        incarnation: 1,
        commitment: None,
        predecessor: None,
        wish: Wish::Ready,
        seen_view: 0,
        fingerprint: None,
        peer: None,
        tunnel_key: None,
        unable: None,
        view: None,
    };
    for _ in 0..3 {
        let (sender, answer) = oneshot::channel();
        registrar.turn([Event::Beat(beat.clone(), Origin::default(), sender)].into_iter()).await;
        assert!(matches!(answer.await.unwrap(), Err(Unanswered::Store(_))));
        assert!(registrar.outage.is_on());
        registrar.turn(std::iter::empty()).await;
        assert!(registrar.outage.is_on(), "it was not asked");
    }
    registrar.turn([Event::Left("a".into(), 1, Origin::default())].into_iter()).await;
    assert!(registrar.outage.is_on());
}
