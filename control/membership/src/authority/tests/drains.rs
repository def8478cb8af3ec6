//! Drains: refused ones, ones that wait, and the limit of unavailable gateways.

use super::*;
use crate::DrainBlockReason;
use crate::authority::UnavailableLimit;

impl Group {
    /// A group in which all of these gateways are active, with these groups of gateways that can own a shard.
    fn with_shard_groups(names: &[&str], groups: &[&[&str]]) -> Self {
        let mut group = Self::active(names);
        let shard_group = |names: &&[&str]| names.iter().map(|name| Arc::from(*name)).collect::<ShardGroup>();
        group.state.set_shard_groups(Arc::new(groups.iter().map(shard_group).collect()));
        group
    }

    fn drain(&mut self, name: &str) -> Option<(DrainBlockReason, Vec<String>)> {
        self.heartbeat(name, 1, DesiredState::Draining).unwrap();
        let block = self.state.drain_block(name)?;
        assert!(self.active_members().contains(&name), "a blocked gateway stays active");
        Some((block.reason, block.gateways.iter().map(ToString::to_string).collect()))
    }
}

fn block(reason: DrainBlockReason, gateways: &[&str]) -> (DrainBlockReason, Vec<String>) {
    (reason, gateways.iter().map(ToString::to_string).collect())
}

#[test]
fn a_drain_that_leaves_a_shard_without_an_owner_is_refused() {
    let mut group = Group::with_shard_groups(&["a", "b", "c"], &[&["a", "b"], &["a", "b", "c"]]);
    assert_eq!(group.drain("a"), None);
    assert_eq!(group.active_members(), ["b", "c"]);
    assert_eq!(group.drain("b"), Some(block(DrainBlockReason::NoBackup, &["a"])), "c can't own the shard of a and b");
    assert_eq!(group.drain("c"), None, "b can own all that c does");
    // Both drain on: whichever is given up, the other one stays as it is.
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!((group.active_members(), group.state.drain_block("b")), (vec!["b"], None));
}

#[test]
fn of_two_simultaneous_drains_of_the_only_candidates_one_is_refused() {
    let mut group = Group::with_shard_groups(&["a", "b", "c"], &[&["a", "b"]]);
    let number = group.state.view().number;
    for name in ["a", "b"] {
        let heartbeat = Heartbeat::minimal(name, 1, DesiredState::Draining, number);
        group.state.heartbeat(group.now, &heartbeat).unwrap();
    }
    group.advance(Duration::ZERO);
    assert_eq!(group.active_members(), ["b", "c"]);
    assert_eq!(group.state.drain_block("b").map(|it| it.reason), Some(DrainBlockReason::NoBackup));
}

#[test]
fn a_candidate_with_a_fault_is_no_backup_and_one_that_starts_is_waited_for() {
    let mut group = Group::with_shard_groups(&["a", "b", "c"], &[&["a", "b"]]);
    group.hold(&["b"], &["a", "c"]);
    assert_eq!(group.active_members(), ["a", "c"]);
    assert_eq!(group.drain("a"), Some(block(DrainBlockReason::NoBackup, &["b"])));
    group.heartbeat_at("b", 1, DesiredState::Joining, 0).unwrap();
    assert_eq!(group.drain("a"), Some(block(DrainBlockReason::BecomingActive, &["b"])));
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    group.advance(Duration::ZERO);
    assert_eq!(group.active_members(), ["b", "c"], "it goes on when b is active");
}

#[test]
fn the_last_active_gateway_is_refused() {
    let mut group = Group::active(&["a", "b"]);
    assert_eq!(group.drain("b"), None);
    assert_eq!(group.drain("a"), Some(block(DrainBlockReason::NoBackup, &["b"])));
}

#[test]
fn drains_wait_while_too_many_gateways_are_unavailable() {
    let names = ["a", "b", "c", "d"];
    let mut group = Group::active(&names);
    group.state.set_max_unavailable(Some(UnavailableLimit::Percent(25)));
    assert_eq!(group.drain("a"), None);
    let waits = |gateways| Some(block(DrainBlockReason::MaxUnavailable(1), gateways));
    assert_eq!(group.drain("b"), waits(&["a"]));
    assert_eq!((group.state.unavailable(), group.state.waiting_drains()), ((vec!["a".into()], Some(1)), 1));
    // It goes on when the other one is back.
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["a", "c", "d"], "a is active again, so b isn't any more");
    // A fault is never held back, but counts.
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), names);
    group.hold(&["d"], &["a", "b", "c"]);
    assert_eq!(group.active_members(), ["a", "b", "c"]);
    assert_eq!(group.drain("c"), waits(&["d"]));
    // So does a crash.
    group.state.set_max_unavailable(Some(UnavailableLimit::Count(2)));
    group.advance(TTL / 2);
    group.hold(&["d"], &["a", "b"]);
    group.advance(TTL / 2);
    assert!(!group.active_members().contains(&"c"), "it is drained, since two may be unavailable");
    assert_eq!(group.drain("b"), Some(block(DrainBlockReason::MaxUnavailable(2), &["c", "d"])));
    group.state.set_max_unavailable(Some(UnavailableLimit::Count(0)));
    assert_eq!(group.drain("a"), Some(block(DrainBlockReason::MaxUnavailable(0), &["c", "d"])), "none may be drained");
}

#[test]
fn percentages_are_rounded_up() {
    for (percent, total, limit) in [(25, 3, 1), (25, 4, 1), (25, 5, 2), (34, 3, 2), (0, 3, 0), (100, 3, 3)] {
        assert_eq!(UnavailableLimit::Percent(percent).of(total), limit, "{percent}% of {total}");
    }
}
