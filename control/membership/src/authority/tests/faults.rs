//! Gateways with faults: which are deactivated, which stay active, which are activated as a fallback.

use super::*;

#[test]
fn a_gateway_with_a_fault_is_deactivated_while_another_is_active() {
    let mut group = Group::active(&["a", "b", "c"]);
    group.heartbeat_unable("a");
    assert_eq!(group.active_members(), ["a", "b", "c"], "the others may be about to report it, too");
    assert_eq!(group.member("a").unable.as_deref(), Some("interface gw-out has no carrier"));
    group.hold(&["a"], &["b", "c"]);
    assert_eq!(group.active_members(), ["b", "c"]);
    assert!(!group.member("a").lease_expired && group.member("a").epoch == group.state.view().number);
    group.hold(&["a", "b"], &["c"]);
    group.hold(&["a", "b"], &["c"]);
    assert_eq!(group.active_members(), ["c"]);
    group.hold(&["a", "b", "c"], &[]);
    group.hold(&["a", "b", "c"], &[]);
    assert_eq!(group.active_members(), ["c"], "the last one stays active, and none with a fault replaces it");
    // One of them has recovered; it replaces the last one when that has been stable for a while.
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["b", "c"]);
    group.hold(&["a", "c"], &["b"]);
    assert_eq!(group.active_members(), ["b"]);
    assert_eq!(group.member("b").unable, None);
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["a", "b"]);
}

/// Such as the failure of a shared router, and its recovery.
#[test]
fn a_fault_that_reaches_all_gateways_one_by_one_deactivates_none() {
    let names = ["a", "b", "c"];
    let mut group = Group::active(&names);
    for is_recovery in [false, true] {
        for index in 0..names.len() {
            for (n, name) in names.iter().enumerate() {
                let is_able = (n <= index) == is_recovery;
                if is_able {
                    group.heartbeat(name, 1, DesiredState::Ready).unwrap();
                } else {
                    group.heartbeat_unable(name);
                }
            }
            group.advance(ms(90));
            assert_eq!(group.active_members(), names, "{is_recovery} {index}");
        }
        for _ in 0..10 {
            let (faulty, able): (&[_], &[_]) = if is_recovery { (&[], &names) } else { (&names, &[]) };
            group.hold(faulty, able);
            assert_eq!(group.active_members(), names);
        }
    }
}

#[test]
fn without_other_active_gateways_one_with_a_fault_is_activated() {
    let mut group = Group::active(&["a", "b"]);
    group.heartbeat_unable("a");
    group.hold(&["a"], &["b"]);
    assert_eq!(group.active_members(), ["b"]);
    group.hold(&["a"], &[]);
    group.hold(&["a"], &[]);
    group.advance(ms(1));
    assert_eq!(group.active_members(), ["a"], "b has timed out");
    group.heartbeat_unable("a");
    assert_eq!(group.active_members(), ["a"]);
    // A gateway without a fault that an operator has drained stays drained.
    let mut group = Group::active(&["a", "b"]);
    group.heartbeat("a", 1, DesiredState::Draining).unwrap();
    group.advance(TTL);
    group.heartbeat("a", 1, DesiredState::Draining).unwrap();
    group.advance(ms(1));
    group.heartbeat("a", 1, DesiredState::Draining).unwrap();
    assert!(group.active_members().is_empty());
}

/// The only gateway without a fault restarts: shards must not move to one with a fault, and back.
#[test]
fn a_gateway_with_a_fault_is_not_activated_while_another_one_restarts() {
    let mut group = Group::active_with_secrets(&["a", "b"]);
    let report_fault = |group: &mut Group| {
        let heartbeat = Heartbeat {
            unable: Some("a link is down".into()),
            ..group.secret_heartbeat("b", 1, None, DesiredState::Draining)
        };
        assert_eq!(group.apply(&heartbeat), Ok(HeartbeatOutcome::Accepted));
    };
    for _ in 0..4 {
        report_fault(&mut group);
        group.advance(ms(150));
        group.heartbeat_with_secret("a", 1, None, DesiredState::Ready).unwrap();
    }
    assert_eq!(group.active_members(), ["a"]);
    group.state.stream_closed("a", secret(1).incarnation());
    group.heartbeat_with_secret("a", 2, Some(1), DesiredState::Joining).unwrap();
    report_fault(&mut group);
    assert!(group.active_members().is_empty());
    group.heartbeat_with_secret("a", 2, None, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["a"]);
    // A gateway that keeps starting is waited for no longer than two TTLs.
    group.state.stream_closed("a", secret(2).incarnation());
    for round in 0..10 {
        group.heartbeat_with_secret("a", 3, Some(2), DesiredState::Joining).unwrap();
        report_fault(&mut group);
        assert_eq!(group.active_members().is_empty(), round < 8, "{round}");
        group.advance(ms(150));
    }
}

#[test]
fn the_only_gateway_without_a_fault_is_not_drained() {
    let mut group = Group::active(&["a", "b"]);
    group.heartbeat_unable("b");
    group.hold(&["b"], &["a"]);
    assert_eq!(group.active_members(), ["a"]);
    group.heartbeat("a", 1, DesiredState::Draining).unwrap();
    assert_eq!(group.active_members(), ["a"]);
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["b"]);
}
