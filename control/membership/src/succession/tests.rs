//! Which claims are accepted, and which promises are made.

use super::*;

const LEASE_MS: u32 = 540;

fn claim(incarnation: u64, predecessors: &[u64]) -> Claim {
    Claim::new(incarnation, predecessors.to_vec())
}

fn at(ms: u32) -> Tick {
    // Shortly before ticks wrap.
    Tick(u32::MAX - 100).plus(ms)
}

fn peer(named: u64) -> PeerProcess {
    PeerProcess::new(named, None, at(0))
}

/// Accepts a process, as over a link.
fn link(peer: &mut PeerProcess, claim: &Claim) -> Result<bool, ClaimRefusal> {
    peer.check(claim, None)?;
    Ok(peer.accept(claim.incarnation))
}

#[test]
fn a_successor_counts_in_place_of_the_process_in_the_view() {
    let mut peer = peer(1);
    assert_eq!(link(&mut peer, &claim(1, &[])), Ok(false));
    assert_eq!(peer.check(&claim(2, &[1]), Some(1)), Err(ClaimRefusal::PredecessorLinked));
    assert_eq!(link(&mut peer, &claim(2, &[1])), Ok(true));
    assert_eq!((peer.current(), peer.successor()), (2, Some(KnownSuccessor { named: 1, successor: 2 })));
    assert_eq!(link(&mut peer, &claim(2, &[1])), Ok(false), "it reconnects");
    assert_eq!(peer.check(&claim(2, &[1]), Some(2)), Ok(()), "its own link may be half-open");
    assert_eq!(peer.check(&claim(1, &[]), None), Err(ClaimRefusal::OtherProcess), "its predecessor, which still runs");
}

#[test]
fn a_claim_that_does_not_name_the_process_that_counts_is_refused() {
    let mut peer = peer(5);
    for other in [claim(2, &[]), claim(2, &[1]), claim(2, &[4, 6])] {
        assert_eq!(peer.check(&other, None), Err(ClaimRefusal::OtherProcess), "{other:?}");
    }
    // Two successors of one process, one of them by a file that was copied or rolled back: the first one counts.
    assert_eq!(link(&mut peer, &claim(6, &[4, 5])), Ok(true));
    assert_eq!(peer.check(&claim(7, &[4, 5]), None), Err(ClaimRefusal::OtherProcess));
}

#[test]
fn a_successor_of_a_successor_is_accepted_whether_or_not_the_first_one_was() {
    let (mut knows, mut does_not) = (peer(1), peer(1));
    assert_eq!(link(&mut knows, &claim(2, &[1])), Ok(true));
    let third = claim(3, &[1, 2]);
    for peer in [&mut knows, &mut does_not] {
        assert_eq!(link(peer, &third), Ok(true));
        assert_eq!(peer.check(&claim(2, &[1]), None), Err(ClaimRefusal::OtherProcess));
    }
}

#[test]
fn a_view_that_names_another_process_decides() {
    let mut peer = peer(1);
    assert_eq!(link(&mut peer, &claim(2, &[1])), Ok(true));
    peer.set_named(1);
    assert_eq!(peer.current(), 2, "a later view that names the same process changes nothing");
    let mut named_itself = peer.clone();
    named_itself.set_named(2);
    assert_eq!((named_itself.current(), named_itself.successor()), (2, None));
    peer.set_named(9);
    assert_eq!((peer.current(), peer.successor()), (9, None));
    assert_eq!(peer.check(&claim(2, &[1]), None), Err(ClaimRefusal::OtherProcess));
}

#[test]
fn a_restarted_gateway_knows_which_process_it_has_accepted() {
    let known = Some(KnownSuccessor { named: 1, successor: 2 });
    let mut peer = PeerProcess::new(1, known, at(0));
    assert_eq!(peer.current(), 2);
    assert!(peer.promise(2, 1, at(1), LEASE_MS), "as its predecessor did");
    assert_eq!(PeerProcess::new(3, known, at(0)).current(), 3, "of an older view");
}

#[test]
fn promises_to_two_processes_do_not_overlap() {
    let mut peer = peer(1);
    assert!(peer.promise(1, 1, at(10), LEASE_MS));
    assert!(!peer.promise(2, 1, at(20), LEASE_MS), "it wasn't accepted");
    assert_eq!(link(&mut peer, &claim(2, &[1])), Ok(true));
    assert!(!peer.promise(1, 1, at(20), LEASE_MS), "what it has sent before");
    assert!(!peer.promise(2, 1, at(549), LEASE_MS));
    assert!(peer.promise(2, 1, at(550), LEASE_MS));
    assert!(peer.promise(2, 1, at(551), LEASE_MS));
    // The same if a view has changed the process.
    peer.set_named(3);
    assert!(!peer.promise(2, 1, at(560), LEASE_MS));
    assert!(!peer.promise(3, 3, at(1_090), LEASE_MS));
    assert!(peer.promise(3, 3, at(1_091), LEASE_MS));
}

#[test]
fn a_promise_of_before_a_restart_is_fenced_too() {
    let mut peer = peer(1);
    assert_eq!(link(&mut peer, &claim(2, &[1])), Ok(true));
    assert!(!peer.promise(2, 1, at(539), LEASE_MS), "this gateway's previous process may have promised it to 1");
    assert!(peer.promise(2, 1, at(540), LEASE_MS));
    let mut new = PeerProcess::new(0, None, at(0));
    new.set_named(4);
    assert!(new.promise(4, 4, at(1), LEASE_MS), "there was no process before");
}

#[test]
fn nothing_is_promised_under_a_view_that_names_another_process() {
    let mut peer = peer(1);
    assert!(!peer.promise(1, 2, at(600), LEASE_MS), "the latest view names another one; the one in use doesn't yet");
    assert_eq!(link(&mut peer, &claim(2, &[1])), Ok(true));
    assert!(peer.promise(2, 2, at(600), LEASE_MS), "the latest view names it");
    assert!(!peer.promise(2, 3, at(601), LEASE_MS));
}

#[test]
fn a_claim_names_the_latest_predecessors() {
    let claim = Claim::new(1_000, (1..=200).collect());
    assert_eq!(claim.predecessors.len(), MAX_PREDECESSORS);
    assert!(claim.succeeds(200) && claim.succeeds(73) && !claim.succeeds(72));
}
