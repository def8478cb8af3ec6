//! Membership state by example; `model` has the property tests.

mod drains;
mod faults;
mod removal;
mod terms;

use super::*;
use crate::{DesiredState, Secret};

const TTL: Duration = Duration::from_millis(600);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn secret(process: u8) -> Secret {
    Secret::from_slice(&[process; 32]).unwrap()
}

/// A group of gateways as the server sees it: membership state and a manual clock.
struct Group {
    state: MembershipState,
    now: Instant,
}

impl Group {
    fn new(names: &[&str]) -> Self {
        let mut state = MembershipState::new(TTL);
        state.set_policy(names.iter().map(|name| Arc::from(*name)));
        Self { state, now: Instant::now() }
    }

    /// A group in which all of these gateways are active.
    fn active(names: &[&str]) -> Self {
        let mut group = Self::new(names);
        for name in names {
            group.heartbeat(name, 1, DesiredState::Joining).unwrap();
        }
        for name in names {
            group.heartbeat(name, 1, DesiredState::Ready).unwrap();
        }
        assert_eq!(group.active_members(), names);
        group
    }

    /// A server that begins to decide by the record of another one.
    fn by_record(names: &[&str], record: &Record) -> Self {
        let mut group = Self::new(names);
        group.state.begin_term(&record.next_term());
        group
    }

    /// Heartbeat of a gateway that has applied this view.
    fn heartbeat_at(
        &mut self,
        name: &str,
        incarnation: u64,
        desired: DesiredState,
        seen_view: u64,
    ) -> Result<HeartbeatOutcome, Rejection> {
        self.apply(&Heartbeat::minimal(name, incarnation, desired, seen_view))
    }

    /// Heartbeat of a gateway that knows a higher view number than that of the current view, which it has applied.
    fn heartbeat_knowing(&mut self, name: &str, known_view: u64) -> Result<HeartbeatOutcome, Rejection> {
        let seen_view = self.state.view().number;
        self.apply(&Heartbeat { known_view, ..Heartbeat::minimal(name, 1, DesiredState::Ready, seen_view) })
    }

    /// A group in which all of these gateways are active, each with its own secret.
    fn active_with_secrets(names: &[&str]) -> Self {
        let mut group = Self::new(names);
        for desired in [DesiredState::Joining, DesiredState::Ready] {
            for name in names {
                group.heartbeat_with_secret(name, 1, None, desired).unwrap();
            }
        }
        assert_eq!(group.active_members(), names);
        group
    }

    /// A heartbeat of the process with this secret, which has applied the current view.
    fn secret_heartbeat(&self, name: &str, process: u8, predecessor: Option<u8>, desired: DesiredState) -> Heartbeat {
        Heartbeat {
            commitment: secret(process).commitment(),
            predecessor: predecessor.map(|process| Box::new(secret(process).commitment())),
            ..Heartbeat::minimal(name, secret(process).incarnation(), desired, self.state.view().number)
        }
    }

    fn heartbeat_with_secret(
        &mut self,
        name: &str,
        process: u8,
        predecessor: Option<u8>,
        desired: DesiredState,
    ) -> Result<HeartbeatOutcome, Rejection> {
        self.apply(&self.secret_heartbeat(name, process, predecessor, desired))
    }

    fn apply(&mut self, heartbeat: &Heartbeat) -> Result<HeartbeatOutcome, Rejection> {
        let outcome = self.state.heartbeat(self.now, heartbeat);
        self.state.decide(self.now);
        outcome
    }

    /// Heartbeat of a gateway that has applied the current view and reports a fault.
    fn heartbeat_unable(&mut self, name: &str) {
        let outcome = self.apply(&Heartbeat {
            unable: Some("interface gw-out has no carrier".into()),
            ..Heartbeat::minimal(name, 1, DesiredState::Draining, self.state.view().number)
        });
        assert_eq!(outcome, Ok(HeartbeatOutcome::Accepted));
    }

    /// Heartbeats of gateways with and without faults, for as long as it takes until faults are stable.
    fn hold(&mut self, faulty: &[&str], able: &[&str]) {
        for pause in [TTL / 4, TTL / 4, Duration::ZERO] {
            for name in faulty {
                self.heartbeat_unable(name);
            }
            for name in able {
                self.heartbeat(name, 1, DesiredState::Ready).unwrap();
            }
            self.advance(pause);
        }
    }

    /// Heartbeat of a gateway that has applied the current view.
    fn heartbeat(
        &mut self,
        name: &str,
        incarnation: u64,
        desired: DesiredState,
    ) -> Result<HeartbeatOutcome, Rejection> {
        self.heartbeat_at(name, incarnation, desired, self.state.view().number)
    }

    /// Heartbeats of gateways that have applied the current view.
    fn heartbeats(&mut self, names: &[&str], desired: DesiredState) {
        for name in names {
            self.heartbeat(name, 1, desired).unwrap();
        }
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.state.decide(self.now);
    }

    fn active_members(&self) -> Vec<&str> {
        self.state.view().active_members().map(|member| &*member.name).collect()
    }

    fn member(&self, name: &str) -> Member {
        self.state.view().member(name).unwrap().clone()
    }

    fn has_lease(&mut self, name: &str, incarnation: u64) -> bool {
        self.state.grant(self.now, name, incarnation).is_some()
    }
}

#[test]
fn a_gateway_that_is_ready_under_the_current_view_becomes_active_and_gets_leases() {
    let mut group = Group::new(&["a", "b"]);
    assert_eq!(group.heartbeat("a", 1, DesiredState::Joining), Ok(HeartbeatOutcome::Accepted));
    assert_eq!(group.state.view().number, 0, "b may report a later view");
    group.heartbeat("b", 1, DesiredState::Joining).unwrap();
    let number = group.state.view().number;
    assert_eq!(number, 1);
    group.heartbeat_at("a", 1, DesiredState::Ready, number - 1).unwrap();
    assert!(group.active_members().is_empty(), "it is ready under an earlier view");
    assert!(!group.has_lease("a", 1));
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["a"]);
    assert!(group.has_lease("a", 1) && !group.has_lease("b", 1) && !group.has_lease("a", 2));
    group.heartbeat_at("b", 1, DesiredState::Ready, number).unwrap();
    assert_eq!(group.active_members(), ["a"], "b hasn't applied the view in which a is active");
}

#[test]
fn a_gateway_is_deactivated_after_a_ttl_without_heartbeats_and_not_before() {
    let mut group = Group::active(&["a", "b"]);
    let before = group.member("b");
    group.advance(TTL);
    assert_eq!(group.active_members(), ["a", "b"]);
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.state.next_deadline(), Some(group.now + ms(1)));
    group.advance(ms(1));
    assert_eq!(group.active_members(), ["a"]);
    assert_eq!(group.member("b").epoch, group.state.view().number);
    assert!(group.member("b").epoch > before.epoch);
    assert!(lease_duration(TTL) < TTL);
}

#[test]
fn only_changes_of_active_members_are_counted() {
    let mut group = Group::active_with_secrets(&["a", "b"]);
    let counters = |group: &Group| (group.state.view().number, group.state.view().serving_changes);
    let (mut number, mut changes) = counters(&group);
    assert!(0 < changes && changes <= number);
    for process in 2..5 {
        // The process is replaced and deactivated, updated, and ready again.
        group.state.stream_closed("b", secret(process - 1).incarnation());
        group.heartbeat_with_secret("b", process, Some(process - 1), DesiredState::Joining).unwrap();
        (number, changes) = (number + 1, changes + 1);
        assert_eq!((counters(&group), group.active_members()), ((number, changes), vec!["a"]));
        group.state.set_policy(["a", "b", "c"].map(Arc::from));
        group.state.decide(group.now);
        number += u64::from(process == 2);
        assert_eq!(counters(&group), (number, changes), "c is new and inactive");
        group.heartbeat_with_secret("b", process, None, DesiredState::Ready).unwrap();
        (number, changes) = (number + 1, changes + 1);
        assert_eq!((counters(&group), group.active_members()), ((number, changes), vec!["a", "b"]));
        group.heartbeat_with_secret("a", 1, None, DesiredState::Ready).unwrap();
    }
}

#[test]
fn a_view_has_the_tunnel_endpoint_of_the_last_heartbeat() {
    let mut group = Group::active(&["a", "b"]);
    for overlay in
        ["192.0.2.11:8472", "[2001:db8::11]:4789"].map(|it| Some(it.parse().unwrap())).into_iter().chain([None])
    {
        let before = group.state.view().clone();
        let minimal = Heartbeat::minimal("b", 1, DesiredState::Ready, before.number);
        group.apply(&Heartbeat { overlay, ..minimal }).unwrap();
        assert_eq!((group.member("b").overlay, group.member("a").overlay), (overlay, None));
        assert_eq!(group.state.view().number, before.number + 1);
        assert_eq!(group.state.view().serving_changes, before.serving_changes);
        group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    }
}

#[test]
fn timeouts_restart_after_the_server_was_unable_to_receive() {
    let mut group = Group::active(&["a"]);
    group.now += TTL * 5;
    group.state.reset_timeouts(group.now);
    group.advance(TTL);
    assert_eq!(group.active_members(), ["a"]);
    group.advance(ms(1));
    assert!(group.active_members().is_empty());
}

#[test]
fn the_last_active_gateway_is_not_drained() {
    let mut group = Group::active(&["a", "b"]);
    group.heartbeat("a", 1, DesiredState::Draining).unwrap();
    assert_eq!(group.active_members(), ["b"]);
    group.heartbeat("b", 1, DesiredState::Draining).unwrap();
    assert_eq!(group.active_members(), ["b"]);
    assert!(group.has_lease("b", 1));
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.active_members(), ["a"], "a is activated and b is drained");
}

#[test]
fn a_new_process_gets_the_name_when_the_old_stream_has_ended_and_the_lease_has_expired() {
    let mut group = Group::active(&["a", "b"]);
    let before = group.member("a");
    group.state.stream_closed("a", 1);
    group.advance(ms(1));
    assert_eq!(group.active_members(), ["a", "b"], "a process may reconnect");
    assert_eq!(
        group.heartbeat("a", 2, DesiredState::Ready),
        Ok(HeartbeatOutcome::Deferred),
        "the old process may have a lease"
    );
    group.advance(ms(538));
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!(group.heartbeat("a", 2, DesiredState::Ready), Ok(HeartbeatOutcome::Deferred));
    group.advance(ms(1));
    assert_eq!(group.heartbeat("a", 2, DesiredState::Ready), Ok(HeartbeatOutcome::Accepted));
    assert_eq!(group.active_members(), ["b"]);
    let after = group.member("a");
    assert_eq!((after.incarnation, after.epoch > before.epoch), (2, true));
    // An inactive process has no lease.
    group.state.stream_closed("a", 2);
    assert_eq!(group.heartbeat("a", 3, DesiredState::Joining), Ok(HeartbeatOutcome::Accepted));
}

#[test]
fn without_the_end_of_the_old_stream_a_new_process_waits_for_a_ttl() {
    let mut group = Group::active(&["a", "b"]);
    for _ in 0..5 {
        assert_eq!(group.heartbeat("a", 2, DesiredState::Joining), Ok(HeartbeatOutcome::Deferred));
        group.heartbeat("b", 1, DesiredState::Ready).unwrap();
        group.advance(TTL / 5);
    }
    group.advance(ms(1));
    assert_eq!(group.heartbeat("a", 2, DesiredState::Joining), Ok(HeartbeatOutcome::Accepted));
    assert_eq!(group.active_members(), ["b"]);
}

#[test]
fn a_successor_with_its_predecessors_secret_does_not_wait_for_the_lease() {
    for (has_stream_ended, wait) in [(true, ms(0)), (false, TTL / 2)] {
        let mut group = Group::active_with_secrets(&["a", "b"]);
        if has_stream_ended {
            group.state.stream_closed("a", secret(1).incarnation());
        } else {
            assert_eq!(
                group.heartbeat_with_secret("a", 2, Some(1), DesiredState::Joining),
                Ok(HeartbeatOutcome::Deferred)
            );
        }
        assert_eq!(group.heartbeat_with_secret("a", 3, None, DesiredState::Joining), Ok(HeartbeatOutcome::Deferred));
        assert_eq!(
            group.heartbeat_with_secret("a", 3, Some(9), DesiredState::Joining),
            Ok(HeartbeatOutcome::Deferred),
            "not the secret of a"
        );
        assert!(group.heartbeat_with_secret("a", 2, Some(1), DesiredState::Joining).is_ok());
        group.advance(wait);
        assert_eq!(
            group.heartbeat_with_secret("a", 2, Some(1), DesiredState::Joining),
            Ok(HeartbeatOutcome::Accepted),
            "{has_stream_ended}"
        );
        assert_eq!(group.active_members(), ["b"]);
    }
    // While the predecessor is alive, its successor is rejected.
    let mut group = Group::active_with_secrets(&["a", "b"]);
    group.heartbeat_with_secret("a", 2, Some(1), DesiredState::Joining).unwrap();
    group.advance(ms(150));
    group.heartbeat_with_secret("a", 1, None, DesiredState::Ready).unwrap();
    assert!(group.heartbeat_with_secret("a", 2, Some(1), DesiredState::Joining).is_err());
}

#[test]
fn a_heartbeat_with_an_incarnation_but_without_its_secret_is_rejected() {
    let mut group = Group::active_with_secrets(&["a", "b"]);
    let before = group.state.view().clone();
    let incarnation = secret(1).incarnation();
    let rejected = Err(Rejection::InvalidSecret { gateway: "a".into(), incarnation });
    for has_stream_ended in [false, true] {
        assert_eq!(group.heartbeat("a", incarnation, DesiredState::Ready), rejected);
        let heartbeat = Heartbeat { incarnation, ..group.secret_heartbeat("a", 2, None, DesiredState::Ready) };
        assert_eq!(group.state.heartbeat(group.now, &heartbeat), rejected, "another secret's commitment");
        assert_eq!(*group.state.view(), before);
        if !has_stream_ended {
            group.state.stream_closed("a", incarnation);
        }
    }
}

#[test]
fn during_recovery_the_first_process_to_report_takes_no_name_from_an_active_one() {
    let record = Group::active_with_secrets(&["a", "b"]).state.stored_record();
    let before = record.view.clone();
    let mut next = Group::by_record(&["a", "b"], &record);
    next.heartbeat_with_secret("a", 9, None, DesiredState::Ready).unwrap();
    next.heartbeat_with_secret("b", 1, None, DesiredState::Ready).unwrap();
    assert_eq!(*next.state.view(), before, "the active process of a hasn't reported");
    next.advance(ms(100));
    assert_eq!(next.heartbeat_with_secret("a", 1, None, DesiredState::Ready), Ok(HeartbeatOutcome::Accepted));
    assert!(next.has_lease("a", secret(1).incarnation()) && !next.has_lease("a", secret(9).incarnation()));
    assert_eq!(next.heartbeat_with_secret("a", 9, None, DesiredState::Ready), Ok(HeartbeatOutcome::Deferred));
    next.advance(ms(100));
    next.heartbeat_with_secret("a", 1, None, DesiredState::Ready).unwrap();
    assert!(next.heartbeat_with_secret("a", 9, None, DesiredState::Ready).is_err());
    assert_eq!(*next.state.view(), before);
}

#[test]
fn of_two_live_processes_with_one_name_the_newer_is_rejected() {
    let mut group = Group::active(&["a"]);
    assert_eq!(group.heartbeat("a", 2, DesiredState::Ready), Ok(HeartbeatOutcome::Deferred));
    for _ in 0..20 {
        group.advance(ms(150));
        assert_eq!(group.heartbeat("a", 1, DesiredState::Ready), Ok(HeartbeatOutcome::Accepted));
        let rejection = group.heartbeat("a", 2, DesiredState::Ready).unwrap_err();
        assert_eq!(rejection, Rejection::NameInUse { gateway: "a".into(), incarnation: 1 });
        assert!(group.has_lease("a", 1) && !group.has_lease("a", 2));
    }
    group.advance(TTL + ms(1));
    assert_eq!(
        group.heartbeat("a", 2, DesiredState::Joining),
        Ok(HeartbeatOutcome::Accepted),
        "the older one has timed out"
    );
}

#[test]
fn no_process_takes_a_name_because_the_server_was_unable_to_receive() {
    let mut group = Group::active_with_secrets(&["a"]);
    group.now += TTL * 5;
    group.state.reset_timeouts(group.now);
    assert_eq!(group.heartbeat_with_secret("a", 9, None, DesiredState::Ready), Ok(HeartbeatOutcome::Deferred));
    group.now += ms(1);
    assert_eq!(group.heartbeat_with_secret("a", 1, None, DesiredState::Ready), Ok(HeartbeatOutcome::Accepted));
    assert!(group.heartbeat_with_secret("a", 9, None, DesiredState::Ready).is_err());
}

#[test]
fn a_gateway_outside_the_policy_gets_no_lease() {
    let mut group = Group::active(&["a"]);
    assert_eq!(group.heartbeat("x", 1, DesiredState::Ready), Ok(HeartbeatOutcome::UnknownGateway));
    assert!(!group.has_lease("x", 1));
    assert_eq!(group.state.view().member("x"), None);
}

#[test]
fn without_a_policy_the_members_of_the_view_stay_active() {
    let record = Group::active(&["a"]).state.stored_record();
    let (mut group, state) = (Group::new(&[]), MembershipState::new(TTL));
    group.state = state;
    group.state.begin_term(&record.next_term());
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    group.advance(TTL);
    assert_eq!(group.heartbeat("a", 1, DesiredState::Ready), Ok(HeartbeatOutcome::Accepted));
    assert!(group.has_lease("a", 1));
    assert_eq!(group.heartbeat("x", 1, DesiredState::Ready), Ok(HeartbeatOutcome::UnknownGateway));
}

/// Somebody has changed the record: the commitment of a process is wrong there.
#[test]
fn a_record_with_a_wrong_commitment_locks_no_process_out() {
    let record = Group::active_with_secrets(&["a", "b"]).state.stored_record();
    let mut forged = MembershipView::clone(&record.view);
    let commitment = forged.members[0].commitment.as_mut().unwrap();
    commitment[31] ^= 1;
    let mut next = Group::by_record(&["a", "b"], &Record { view: Arc::new(forged), ..record.clone() });
    next.heartbeat_with_secret("b", 1, None, DesiredState::Ready).unwrap();
    assert_eq!(next.heartbeat_with_secret("a", 1, None, DesiredState::Ready), Ok(HeartbeatOutcome::Accepted));
    assert_eq!(next.member("a").commitment, record.view.member("a").unwrap().commitment);
    assert!(
        next.heartbeat("a", secret(1).incarnation(), DesiredState::Ready).is_err(),
        "without the secret it is rejected all the same"
    );
}
