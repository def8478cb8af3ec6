//! Links follow the membership view: pairing, echoes, pins, relayed views, incarnations, versions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::membership::succession::KnownSuccessor;
use crate::peer::tests::testbed::{Gateway, membership_view, set_view, wait_until};
use crate::peer::{LinkError, PeerEvent, PeerMember, PeerView};

#[tokio::test(flavor = "multi_thread")]
async fn three_gateways_link_in_pairs_and_echo_heartbeats() {
    let gateways = ["a", "b", "c"].map(Gateway::new);
    let start = Instant::now();
    set_view(4, &gateways.each_ref());
    for one in &gateways {
        for other in gateways.iter().filter(|other| other.member.name != one.member.name) {
            let name = &other.member.name;
            let status =
                one.wait_until(name, "linked and echoed", |peer| peer.linked && peer.last_echo.is_some()).await;
            assert_eq!(status.last_echo.unwrap().view, 4);
            assert!(status.rtt.unwrap() < Duration::from_secs(1) && status.version == 1);
            // The peer records its echo not before we have sent the heartbeat.
            let at_peer = other.wait_until(&one.member.name, "echo sent", |peer| peer.echo_sent_at.is_some()).await;
            assert!(at_peer.echo_sent_at.unwrap().reached(status.last_echo.unwrap().sent));
        }
    }
    println!("three gateways linked and echoed after {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inactive_member_gets_no_echoes() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    b.member.active = false;
    set_view(1, &[&a, &b]);
    b.wait_until("a", "echo sent", |peer| peer.linked && peer.echo_sent_at.is_some()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(b.status("a").last_echo, None);
    assert_eq!(a.status("b").echo_sent_at, None);
    b.member.active = true;
    set_view(2, &[&a, &b]);
    let status = b.wait_until("a", "echo received", |peer| peer.last_echo.is_some()).await;
    assert!(status.linked && status.failures == 0, "the link stayed: {status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_ends_when_its_pin_is_removed_and_returns_with_it() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "linked", |peer| peer.linked).await;
    b.peers.set_view(&Arc::new(PeerView { number: 2, members: vec![b.member.clone()], ..PeerView::default() }));
    a.wait_until("b", "unlinked", |peer| !peer.linked && peer.failures > 0).await;
    set_view(3, &[&a, &b]);
    a.wait_until("b", "linked again", |peer| peer.linked).await;
    // Older views are ignored.
    b.peers.set_view(&Arc::new(PeerView { number: 2, members: vec![b.member.clone()], ..PeerView::default() }));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(a.status("b").linked && b.status("a").linked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_an_older_view_is_sent_the_current_one() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "linked", |peer| peer.linked).await;
    let both = vec![a.member.clone(), b.member.clone()];
    a.peers.set_view(&Arc::new(PeerView { number: 6, members: both, membership: membership_view(6) }));
    let relayed = async {
        while let Some(event) = b.events.recv().await {
            if let PeerEvent::RelayedView { gateway, view } = event {
                return Some((gateway, view));
            }
        }
        None
    };
    let relayed = tokio::time::timeout(Duration::from_secs(30), relayed).await.unwrap();
    assert_eq!(relayed, Some(("a".into(), membership_view(6))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_of_a_gateway_replaces_the_link_once_the_view_has_its_incarnation() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    set_view(1, &[&a, &b]);
    b.wait_until("a", "linked", |peer| peer.linked).await;
    let since = b.status("a").since;
    let mut next = Gateway::new("a");
    next.member.incarnation = 7;
    next.peers.set_view(&Arc::new(PeerView {
        number: 1,
        members: vec![next.member.clone(), b.member.clone()],
        ..PeerView::default()
    }));
    next.wait_until("b", "rejected", |peer| peer.failures >= 2).await;
    assert_eq!(b.status("a").since, since, "the link of the first process stays up");
    assert!(b.peers.status().borrow().unauthenticated >= 1, "the rejected connection is counted");
    set_view(2, &[&next, &b]);
    b.wait_until("a", "linked to the new process", |peer| peer.linked && peer.since != since).await;
    next.wait_until("b", "linked", |peer| peer.linked).await;
    wait_until("the first process is rejected", || !a.status("b").linked).await;
}

fn view(number: u64, members: [&PeerMember; 2]) -> Arc<PeerView> {
    let members = members.map(PeerMember::clone).into();
    Arc::new(PeerView { number, members, membership: membership_view(number) })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_process_takes_its_place_without_a_view_once_the_former_one_has_ended() {
    const LEASE: Duration = Duration::from_millis(400);
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    b.peers.set_lease_duration(LEASE);
    set_view(1, &[&a, &b]);
    b.wait_until("a", "echoed", |peer| peer.linked && peer.echo_sent_at.is_some()).await;
    let next = Gateway::successor(&a, 8, &[7]);
    next.peers.set_view(&view(1, [&a.member, &b.member]));
    let is_refused = |reason: &LinkError| matches!(reason, LinkError::ClosedByPeer(text) if text.contains("linked"));
    next.wait_until("b", "refused", |peer| peer.last_failure.as_ref().is_some_and(is_refused)).await;
    assert_eq!(b.status("a").successor, None);

    drop(a.peers);
    let status = b.wait_until("a", "succeeded", |peer| peer.linked && peer.successor.is_some()).await;
    assert_eq!(status.successor, Some(KnownSuccessor { named: 7, successor: 8 }));
    // What was promised to the former process has expired when the next one is promised something.
    let promised = next.wait_until("b", "promised", |peer| peer.last_echo.is_some()).await.last_echo.unwrap();
    let age = promised.sent.since(status.echo_sent_at.unwrap());
    assert!(age + 200 >= LEASE.as_millis() as u32, "{age} ms, of a heartbeat of the interval before");

    // The policy server names it, with its own certificate.
    let named = view(2, [&next.member, &b.member]);
    for gateway in [&next, &b] {
        gateway.peers.set_view(&named);
    }
    b.wait_until("a", "named", |peer| peer.linked && peer.successor.is_none() && peer.since != status.since).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_process_is_accepted_by_the_gateway_that_connects_to_it() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    a.peers.set_lease_duration(Duration::from_millis(100));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "linked", |peer| peer.linked).await;
    // The second one is the first that this peer learns of.
    let third = Gateway::successor(&b, 9, &[7, 8]);
    drop(b.peers);
    let member = PeerMember { address: third.member.address, ..b.member };
    let view = view(2, [&a.member, &member]);
    for gateway in [&third, &a] {
        gateway.peers.set_view(&view);
    }
    let status = a.wait_until("b", "succeeded", |peer| peer.linked && peer.successor.is_some()).await;
    assert_eq!(status.successor, Some(KnownSuccessor { named: 7, successor: 9 }));
    third.wait_until("a", "linked", |peer| peer.linked && peer.last_echo.is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn overlapping_version_ranges_negotiate_the_highest_common_version() {
    let (a, b) = (Gateway::with_versions("a", (1, 2)), Gateway::with_versions("b", (2, 3)));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "linked", |peer| peer.linked && peer.version == 2).await;
    b.wait_until("a", "linked", |peer| peer.linked && peer.version == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disjoint_version_ranges_are_rejected_and_reported() {
    let (a, b) = (Gateway::with_versions("a", (1, 1)), Gateway::with_versions("b", (2, 3)));
    set_view(1, &[&a, &b]);
    let at_a = a.wait_until("b", "rejected", |peer| peer.rejections >= 1).await;
    let at_b = b.wait_until("a", "rejected", |peer| peer.rejections >= 1).await;
    assert_eq!(at_a.last_failure, Some(LinkError::UnsupportedVersion { theirs: (2, 3), ours: (1, 1) }));
    assert_eq!(at_b.last_failure, Some(LinkError::UnsupportedVersion { theirs: (1, 1), ours: (2, 3) }));
    assert!(!at_a.linked && !at_b.linked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_exits_is_detected_at_once() {
    let (a, b) = (Gateway::new("a"), Gateway::new("b"));
    set_view(1, &[&a, &b]);
    a.wait_until("b", "linked", |peer| peer.linked).await;
    let start = Instant::now();
    drop(b.peers);
    a.wait_until("b", "unlinked", |peer| !peer.linked).await;
    println!("the exit of a gateway was detected after {:?}", start.elapsed());
}
