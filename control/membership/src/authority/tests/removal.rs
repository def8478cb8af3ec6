//! Gateways that the policy doesn't name any more.

use super::*;

/// Heartbeats of all these gateways, every 100 ms, for a time.
fn heartbeats(group: &mut Group, gateways: &[(&str, DesiredState)], time: Duration) {
    for _ in 0..time.as_millis() / 100 {
        for (name, desired) in gateways {
            let _ = group.heartbeat(name, 1, *desired);
        }
        group.advance(ms(100));
    }
}

#[test]
fn a_removed_gateway_keeps_its_lease_until_it_has_handed_over_and_stays_until_routers_have_converged() {
    let mut group = Group::active(&["a", "b"]);
    let epoch = group.member("b").epoch;
    group.state.set_policy([Arc::from("a")]);
    heartbeats(&mut group, &[("a", DesiredState::Ready), ("b", DesiredState::Ready)], ms(1_000));
    assert!(group.member("b").serving && group.has_lease("b", 1));
    assert_eq!(group.heartbeat("b", 2, DesiredState::Ready), Ok(HeartbeatOutcome::UnknownGateway), "another process");
    // It has handed over.
    heartbeats(&mut group, &[("a", DesiredState::Ready), ("b", DesiredState::Draining)], ms(1_000));
    assert!(!group.member("b").serving && !group.has_lease("b", 1));
    heartbeats(&mut group, &[("a", DesiredState::Ready), ("b", DesiredState::Draining)], ms(500));
    assert_eq!(group.state.view().member("b"), None, "2.4 s after its removal");
    assert_eq!(group.heartbeat("b", 1, DesiredState::Ready), Ok(HeartbeatOutcome::UnknownGateway));
    group.state.set_policy(["a", "b"].map(Arc::from));
    group.advance(ms(1));
    assert!(group.member("b").epoch > epoch, "it has a new epoch");
}

#[test]
fn a_removed_gateway_that_never_hands_over_leaves_when_its_last_lease_has_expired() {
    let mut group = Group::active(&["a", "b"]);
    group.state.set_policy([Arc::from("a")]);
    let all = [("a", DesiredState::Ready), ("b", DesiredState::Ready)];
    heartbeats(&mut group, &all, ms(2_300));
    assert!(group.has_lease("b", 1));
    heartbeats(&mut group, &all, ms(600));
    assert!(group.member("b").serving && !group.has_lease("b", 1), "its last lease may still be valid");
    heartbeats(&mut group, &all, ms(200));
    assert_eq!(group.state.view().member("b"), None, "before the others stop waiting for it, after 3 s");
}

#[test]
fn a_removed_gateway_without_heartbeats_leaves_after_the_timeout() {
    let mut group = Group::active(&["a", "b"]);
    group.state.set_policy([Arc::from("a")]);
    heartbeats(&mut group, &[("a", DesiredState::Ready)], ms(600));
    assert!(group.member("b").serving);
    heartbeats(&mut group, &[("a", DesiredState::Ready)], ms(100));
    assert_eq!(group.state.view().member("b"), None);
}

#[test]
fn a_gateway_that_the_policy_names_again_in_time_stays_active() {
    let mut group = Group::active(&["a", "b"]);
    let epoch = group.member("b").epoch;
    let all = [("a", DesiredState::Ready), ("b", DesiredState::Ready)];
    for _ in 0..3 {
        group.state.set_policy([Arc::from("a")]);
        heartbeats(&mut group, &all, ms(2_000));
        group.state.set_policy(["a", "b"].map(Arc::from));
        heartbeats(&mut group, &all, ms(200));
    }
    assert!(group.member("b").serving && group.has_lease("b", 1) && group.member("b").epoch == epoch);
}

#[test]
fn a_restarted_server_goes_on_with_a_removed_gateway_that_hands_over() {
    let mut group = Group::active(&["a", "b"]);
    group.state.set_policy([Arc::from("a")]);
    let all = [("a", DesiredState::Ready), ("b", DesiredState::Ready)];
    heartbeats(&mut group, &all, ms(300));
    let record = group.state.stored_record();
    group.state = MembershipState::new(TTL);
    group.state.begin_term(&record.next_term());
    group.state.set_policy([Arc::from("a")]);
    heartbeats(&mut group, &all, ms(1_000));
    assert!(group.member("b").serving && group.has_lease("b", 1));
    assert_eq!(group.heartbeat("b", 2, DesiredState::Ready), Ok(HeartbeatOutcome::UnknownGateway), "another process");
}
