//! Copies of sessions between whole meshes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use vipgate_dataplane::snapshot::members::GatewayId;

use super::room::{EACH, Gateway, enter, until};
use crate::peer::{Broken, Event};

const A: GatewayId = GatewayId(0);
const B: GatewayId = GatewayId(1);
const C: GatewayId = GatewayId(2);

#[tokio::test(flavor = "multi_thread")]
async fn news_arrive_and_are_acknowledged() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    enter(1, &[&a, &b]);
    a.until("b", "in sync", |peer| peer.copies.in_sync_to && peer.copies.in_sync_from).await;
    (0..1000).for_each(|number| a.tables.open(number, B));
    (0..500).for_each(|number| b.tables.open(EACH + number, A));
    (0..300).for_each(|number| a.tables.end(number));
    until("copies", || b.tables.copies() == a.tables.own() && a.tables.copies() == b.tables.own()).await;
    until("acknowledged", || a.tables.is_acknowledged(B) && b.tables.is_acknowledged(A)).await;
    let status = a.until("b", "figures", |peer| peer.copies.sent == 1300 && peer.copies.taken == 500).await;
    assert_eq!((status.copies.resyncs, status.copies.queued), (1, 0));
    let begin = Instant::now();
    a.tables.open(5000, B);
    until("one more", || a.tables.is_acknowledged(B)).await;
    println!("one session was acknowledged after {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_gateway_gets_its_own_copies() {
    let [a, b, c] = ["a", "b", "c"].map(Gateway::new);
    (0..900).for_each(|number| a.tables.open_silently(number, if number % 3 == 0 { B } else { C }));
    enter(1, &[&a, &b, &c]);
    until("copies", || b.tables.copies().len() == 300 && c.tables.copies().len() == 600).await;
    // It lets go: news first, and only then the word.
    (900..1000).for_each(|number| a.tables.open(number, B));
    a.peers.release("b", 5);
    let mut events = b.events;
    loop {
        let event = events.recv().await.unwrap();
        if event == (Event::Released { gateway: "a".into(), view: 5 }) {
            break;
        }
        assert!(matches!(event, Event::Synced { .. }));
    }
    assert_eq!(b.tables.copies().len(), 400, "all of it is there when the word comes");
    a.until("b", "knows", |peer| peer.copies.released == Some(5)).await;
    assert_eq!(b.peers.status().borrow().peers["a"].copies.released_by, Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_made_up_for() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    // Between them stands somebody who can break connections.
    let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (to, cut) = (b.member.address.unwrap(), Arc::new(Notify::new()));
    b.member.address = Some(between.local_addr().unwrap());
    let knife = cut.clone();
    let proxy = tokio::spawn(async move {
        loop {
            let (mut near, _) = between.accept().await.unwrap();
            let mut far = TcpStream::connect(to).await.unwrap();
            tokio::select! {
                _ = copy_bidirectional(&mut near, &mut far) => {}
                () = knife.notified() => {}
            }
        }
    });
    (0..20_000).for_each(|number| a.tables.open_silently(number, B));
    enter(1, &[&a, &b]);
    let mut number = 20_000;
    for round in 1..=3 {
        a.until("b", "linked", |peer| peer.linked).await;
        // In the middle of telling all, or shortly after.
        tokio::time::sleep(Duration::from_millis(20 * round)).await;
        let before = a.status("b").failures;
        for _ in 0..1000 {
            a.tables.open(number, B);
            a.tables.end(number - 20_000);
            number += 1;
        }
        cut.notify_one();
        a.until("b", "broken", |peer| peer.failures > before).await;
        (0..100).for_each(|n| a.tables.end(number - 1000 + n));
        (0..100).for_each(|n| a.tables.open(number - 1000 + n, B));
    }
    a.until("b", "in sync", |peer| peer.copies.in_sync_to).await;
    until("copies", || b.tables.copies() == a.tables.own()).await;
    until("acknowledged", || a.tables.is_acknowledged(B)).await;
    assert!(a.status("b").copies.resyncs >= 3);
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_outlet_loses_is_told_again() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    enter(1, &[&a, &b]);
    a.until("b", "in sync", |peer| peer.copies.in_sync_to).await;
    // Faster than anybody can empty it.
    (0..200_000).for_each(|number| a.tables.open(number, B));
    (0..100_000).for_each(|number| a.tables.end(number));
    until("copies", || b.tables.copies() == a.tables.own()).await;
    let status = a.until("b", "in sync", |peer| peer.copies.in_sync_to).await;
    println!("of 300 000 news in one burst {} were sent, all told {} times", status.copies.sent, status.copies.resyncs);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_sessions_are_told_quickly() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    (0..100_000).for_each(|number| a.tables.open_silently(number, B));
    enter(1, &[&a, &b]);
    a.until("b", "linked", |peer| peer.linked).await;
    let begin = Instant::now();
    b.until("a", "in sync", |peer| peer.copies.in_sync_from).await;
    println!("100 000 sessions were told in {:?}", begin.elapsed());
    assert_eq!(b.tables.copies(), a.tables.own());
    a.tables.open_silently(EACH - 1, B);
    (0..1000).for_each(|number| a.tables.end(number));
    a.peers.resync("b");
    until("copies", || b.tables.copies() == a.tables.own()).await;
    // The other way around: who has lost something asks.
    b.tables.forget();
    b.peers.request("a");
    until("copies", || b.tables.copies() == a.tables.own()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_takes_nothing_ends_the_link() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    b.tables.silent.store(true, Ordering::Relaxed);
    a.tables.open_silently(1, B);
    enter(1, &[&a, &b]);
    b.until("a", "ended", |peer| matches!(peer.last_failure, Some(Broken::Worker(_)))).await;
    b.tables.silent.store(false, Ordering::Relaxed);
    until("copies", || b.tables.copies() == a.tables.own()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_policy_learns_of_later_is_told_then() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    a.tables.lawless.store(true, Ordering::Relaxed);
    (0..100).for_each(|number| a.tables.open_silently(number, B));
    enter(1, &[&a, &b]);
    a.until("b", "in sync", |peer| peer.copies.in_sync_to).await;
    assert_eq!(b.tables.copies(), Vec::<u32>::new(), "nothing belongs there yet");
    a.tables.lawless.store(false, Ordering::Relaxed);
    until("copies", || b.tables.copies() == a.tables.own()).await;
}
