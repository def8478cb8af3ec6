//! Links that come and go as the view says.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::room::{Gateway, enter, said, until};
use crate::peer::{Broken, Event, View};

#[tokio::test(flavor = "multi_thread")]
async fn three_gateways_link_in_pairs_and_hear_each_other() {
    let gateways = ["a", "b", "c"].map(Gateway::new);
    let begin = Instant::now();
    enter(4, &gateways.each_ref());
    for one in &gateways {
        for other in gateways.iter().filter(|other| other.member.name != one.member.name) {
            let name = &other.member.name;
            let status = one.until(name, "linked and echoed", |peer| peer.linked && peer.echoed.is_some()).await;
            assert_eq!(status.echoed.unwrap().view, 4);
            assert!(status.rtt.unwrap() < Duration::from_secs(1) && status.version == 1);
            // Who has echoed to us has promised, and not before we sent.
            let theirs = other.until(&one.member.name, "promised", |peer| peer.promised.is_some()).await;
            assert!(theirs.promised.unwrap().reached(status.echoed.unwrap().sent));
        }
    }
    println!("three gateways linked and echoed after {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_serve_is_not_echoed() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    b.member.serving = false;
    enter(1, &[&a, &b]);
    b.until("a", "echoes", |peer| peer.linked && peer.promised.is_some()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(b.status("a").echoed, None);
    assert_eq!(a.status("b").promised, None);
    b.member.serving = true;
    enter(2, &[&a, &b]);
    let status = b.until("a", "is echoed", |peer| peer.echoed.is_some()).await;
    assert!(status.linked && status.failures == 0, "the link stayed: {status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_ends_when_its_pin_goes_away_and_comes_back_with_it() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    enter(1, &[&a, &b]);
    a.until("b", "linked", |peer| peer.linked).await;
    b.peers.set_view(&Arc::new(View { number: 2, members: vec![b.member.clone()], ..View::default() }));
    a.until("b", "unlinked", |peer| !peer.linked && peer.failures > 0).await;
    enter(3, &[&a, &b]);
    a.until("b", "linked again", |peer| peer.linked).await;
    // Views of the past don't count.
    b.peers.set_view(&Arc::new(View { number: 2, members: vec![b.member.clone()], ..View::default() }));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(a.status("b").linked && b.status("a").linked);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_stays_behind_is_told_the_view_of_others() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    enter(1, &[&a, &b]);
    a.until("b", "linked", |peer| peer.linked).await;
    let both = vec![a.member.clone(), b.member.clone()];
    a.peers.set_view(&Arc::new(View { number: 6, members: both, said: said(6) }));
    let told = async {
        while let Some(event) = b.events.recv().await {
            if let Event::Told { gateway, view } = event {
                return Some((gateway, view));
            }
        }
        None
    };
    let told = tokio::time::timeout(Duration::from_secs(30), told).await.unwrap();
    assert_eq!(told, Some(("a".into(), said(6))));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_of_the_name_takes_over_when_the_view_says_so() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    enter(1, &[&a, &b]);
    b.until("a", "linked", |peer| peer.linked).await;
    let since = b.status("a").since;
    let mut next = Gateway::new("a");
    next.member.incarnation = 7;
    next.peers.set_view(&Arc::new(View {
        number: 1,
        members: vec![next.member.clone(), b.member.clone()],
        ..View::default()
    }));
    next.until("b", "refused", |peer| peer.failures >= 2).await;
    assert_eq!(b.status("a").since, since, "the link of the first one stands");
    assert!(b.peers.status().borrow().strangers >= 1, "and the other one is counted");
    enter(2, &[&next, &b]);
    b.until("a", "linked to the next", |peer| peer.linked && peer.since != since).await;
    next.until("b", "linked", |peer| peer.linked).await;
    until("the first one is out", || !a.status("b").linked).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbouring_versions_work_together() {
    let (a, b) = (Gateway::speaking("a", (1, 2)), Gateway::speaking("b", (2, 3)));
    enter(1, &[&a, &b]);
    a.until("b", "linked", |peer| peer.linked && peer.version == 2).await;
    b.until("a", "linked", |peer| peer.linked && peer.version == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_too_far_apart_are_refused_and_said() {
    let (a, b) = (Gateway::speaking("a", (1, 1)), Gateway::speaking("b", (2, 3)));
    enter(1, &[&a, &b]);
    let at_a = a.until("b", "refused", |peer| peer.refused >= 1).await;
    let at_b = b.until("a", "refused", |peer| peer.refused >= 1).await;
    assert_eq!(at_a.last_failure, Some(Broken::Version { theirs: (2, 3), ours: (1, 1) }));
    assert_eq!(at_b.last_failure, Some(Broken::Version { theirs: (1, 1), ours: (2, 3) }));
    assert!(!at_a.linked && !at_b.linked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_ends_is_missed_at_once() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    enter(1, &[&a, &b]);
    a.until("b", "linked", |peer| peer.linked).await;
    let begin = Instant::now();
    drop(b.peers);
    a.until("b", "unlinked", |peer| !peer.linked).await;
    println!("a gateway that ended was missed after {:?}", begin.elapsed());
}
