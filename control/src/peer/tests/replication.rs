//! Session replication between gateways over real links.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use vipgate_dataplane::flow::ids::GatewayId;

use crate::peer::tests::testbed::{Gateway, SESSIONS_PER_GATEWAY, set_view, wait_until};
use crate::peer::{LinkError, PeerEvent};

const A: GatewayId = GatewayId(0);
const B: GatewayId = GatewayId(1);
const C: GatewayId = GatewayId(2);

#[tokio::test(flavor = "multi_thread")]
async fn records_are_replicated_and_acknowledged() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "in sync", |peer| peer.replication.in_sync_to && peer.replication.in_sync_from).await;
    (0..1000).for_each(|number| a.workers.open(number, B));
    (0..500).for_each(|number| b.workers.open(SESSIONS_PER_GATEWAY + number, A));
    (0..300).for_each(|number| a.workers.end(number));
    wait_until("standby sessions", || b.workers.standby() == a.workers.own() && a.workers.standby() == b.workers.own())
        .await;
    wait_until("acknowledged", || a.workers.is_acknowledged(B) && b.workers.is_acknowledged(A)).await;
    let status =
        a.wait_until("b", "counters", |peer| peer.replication.sent == 1300 && peer.replication.received == 500).await;
    assert_eq!((status.replication.resyncs, status.replication.queued_bytes), (1, 0));
    let start = Instant::now();
    a.workers.open(5000, B);
    wait_until("one more", || a.workers.is_acknowledged(B)).await;
    println!("one session was acknowledged after {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_peer_gets_the_sessions_it_is_the_replica_target_of() {
    let [a, b, c] = ["a", "b", "c"].map(Gateway::new);
    (0..900).for_each(|number| a.workers.insert(number, if number % 3 == 0 { B } else { C }));
    set_view(1, &[&a, &b, &c]);
    wait_until("standby sessions", || b.workers.standby().len() == 300 && c.workers.standby().len() == 600).await;
    // A release: first the queued records, then the Released frame.
    (900..1000).for_each(|number| a.workers.open(number, B));
    let release = crate::peer::Release { view: 5, policy: "v1".into(), applied: 1, seen: 0 };
    a.peers.release("b", release.clone());
    let mut events = b.events;
    loop {
        let event = events.recv().await.unwrap();
        if event == (PeerEvent::Released { gateway: "a".into(), release: release.clone() }) {
            break;
        }
        assert!(matches!(event, PeerEvent::Synced { .. }));
    }
    assert_eq!(b.workers.standby().len(), 400, "all records arrive before the Released frame");
    a.wait_until("b", "release acknowledged", |peer| peer.replication.released.as_ref().is_some_and(|it| it.view == 5))
        .await;
    assert_eq!(b.peers.status().borrow().peers["a"].replication.peer_released.as_ref().map(|it| it.view), Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_lose_no_records() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    // A proxy between them can cut connections.
    let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (to, cut) = (b.member.address.unwrap(), Arc::new(Notify::new()));
    b.member.address = Some(between.local_addr().unwrap());
    let cut_by_test = cut.clone();
    let proxy = tokio::spawn(async move {
        loop {
            let (mut downstream, _) = between.accept().await.unwrap();
            let mut upstream = TcpStream::connect(to).await.unwrap();
            tokio::select! {
                _ = copy_bidirectional(&mut downstream, &mut upstream) => {}
                () = cut_by_test.notified() => {}
            }
        }
    });
    (0..20_000).for_each(|number| a.workers.insert(number, B));
    set_view(1, &[&a, &b]);
    let mut number = 20_000;
    for round in 1..=3 {
        a.wait_until("b", "linked", |peer| peer.linked).await;
        // During the full sync, or shortly after.
        tokio::time::sleep(Duration::from_millis(20 * round)).await;
        let before = a.status("b").failures;
        for _ in 0..1000 {
            a.workers.open(number, B);
            a.workers.end(number - 20_000);
            number += 1;
        }
        cut.notify_one();
        a.wait_until("b", "connection lost", |peer| peer.failures > before).await;
        (0..100).for_each(|n| a.workers.end(number - 1000 + n));
        (0..100).for_each(|n| a.workers.open(number - 1000 + n, B));
    }
    a.wait_until("b", "in sync", |peer| peer.replication.in_sync_to).await;
    wait_until("standby sessions", || b.workers.standby() == a.workers.own()).await;
    wait_until("acknowledged", || a.workers.is_acknowledged(B)).await;
    assert!(a.status("b").replication.resyncs >= 3);
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn records_lost_in_a_full_replication_queue_are_resynced() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "in sync", |peer| peer.replication.in_sync_to).await;
    // Faster than the queue can be read.
    (0..200_000).for_each(|number| a.workers.open(number, B));
    (0..100_000).for_each(|number| a.workers.end(number));
    wait_until("standby sessions", || b.workers.standby() == a.workers.own()).await;
    let status = a.wait_until("b", "in sync", |peer| peer.replication.in_sync_to).await;
    println!(
        "of a burst of 300 000 records {} were sent, with {} full syncs",
        status.replication.sent, status.replication.resyncs
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_sync_transfers_a_hundred_thousand_sessions() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    (0..100_000).for_each(|number| a.workers.insert(number, B));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "linked", |peer| peer.linked).await;
    let start = Instant::now();
    b.wait_until("a", "in sync", |peer| peer.replication.in_sync_from).await;
    println!("100 000 sessions were transferred in {:?}", start.elapsed());
    assert_eq!(b.workers.standby(), a.workers.own());
    a.workers.insert(SESSIONS_PER_GATEWAY - 1, B);
    (0..1000).for_each(|number| a.workers.end(number));
    a.peers.resync("b");
    wait_until("standby sessions", || b.workers.standby() == a.workers.own()).await;
    // In the other direction: the receiver requests a full sync.
    b.workers.clear_standby();
    b.peers.request_sync("a");
    wait_until("standby sessions", || b.workers.standby() == a.workers.own()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_reply_ends_the_link() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    b.workers.unresponsive.store(true, Ordering::Relaxed);
    a.workers.insert(1, B);
    set_view(1, &[&a, &b]);
    b.wait_until("a", "link ended", |peer| matches!(peer.last_failure, Some(LinkError::WorkerUnavailable(_)))).await;
    b.workers.unresponsive.store(false, Ordering::Relaxed);
    wait_until("standby sessions", || b.workers.standby() == a.workers.own()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_is_synced_once_the_policy_contains_it() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    a.workers.without_policy.store(true, Ordering::Relaxed);
    (0..100).for_each(|number| a.workers.insert(number, B));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "in sync", |peer| peer.replication.in_sync_to).await;
    assert_eq!(b.workers.standby(), Vec::<u32>::new(), "nothing is replicated yet");
    a.workers.without_policy.store(false, Ordering::Relaxed);
    wait_until("standby sessions", || b.workers.standby() == a.workers.own()).await;
}
