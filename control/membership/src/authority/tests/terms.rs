//! Terms, and records that were lost or are from a backup.

use super::*;

/// The first number of a term.
const fn first(term: u64) -> u64 {
    term * 1_000_000 + 1
}

/// A group in a term, in which a, b and c are active; its record as it is, and after c was drained.
fn records() -> (Record, Record) {
    let mut group = Group::by_record(&["a", "b", "c"], &Record::default());
    for desired in [DesiredState::Joining, DesiredState::Ready] {
        group.heartbeats(&["a", "b", "c"], desired);
    }
    assert_eq!(group.active_members(), ["a", "b", "c"]);
    let before = group.state.stored_record();
    group.heartbeat("c", 1, DesiredState::Draining).unwrap();
    assert_eq!(group.active_members(), ["a", "b"]);
    (before, group.state.stored_record())
}

#[test]
fn each_server_numbers_its_views_in_a_term_of_its_own() {
    let (_, last) = records();
    assert_eq!((last.term, last.view.number / 1_000_000), (1, 1));
    let mut group = Group::by_record(&["a", "b", "c"], &last);
    group.heartbeats(&["a", "b", "c"], DesiredState::Ready);
    assert_eq!(group.state.view().number, first(2), "c is active again");
    assert_eq!(group.state.stored_record().term, 2);
    // Also if a term has had all its numbers.
    let exhausted = MembershipView { number: 3_999_999, ..MembershipView::clone(&last.view) };
    let record = Record { term: 3, view: Arc::new(exhausted) };
    let mut group = Group::new(&["a", "b", "c"]);
    group.state.begin_term(&record);
    group.heartbeats(&["a", "b", "c"], DesiredState::Ready);
    assert_eq!(group.state.view().number, 4_000_000);
    assert_eq!((group.state.stored_record().term, group.state.stored_record().next_term().term), (4, 5));
}

#[test]
fn a_server_that_has_followed_the_record_grants_leases_at_once() {
    let (_, last) = records();
    for follows in [false, true] {
        let mut group = Group::new(&["a", "b", "c"]);
        if follows {
            group.state.follow(&last);
        }
        group.state.begin_term(&last.next_term());
        group.heartbeat("a", 1, DesiredState::Ready).unwrap();
        assert_eq!(group.has_lease("a", 1), follows);
        group.heartbeat("b", 1, DesiredState::Ready).unwrap();
        group.heartbeat("c", 1, DesiredState::Joining).unwrap();
        assert!(group.has_lease("a", 1) && group.has_lease("b", 1) && !group.has_lease("c", 1), "all have reported");
        assert_eq!(*group.state.view(), last.view);
    }
}

#[test]
fn recovery_lasts_two_ttls_while_gateways_are_missing() {
    let (before, _) = records();
    let mut group = Group::by_record(&["a", "b", "c"], &before);
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert!(!group.has_lease("a", 1));
    group.advance(TTL);
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert!(group.has_lease("a", 1), "leases of the previous server have expired");
    group.advance(ms(599));
    assert_eq!(*group.state.view(), before.view);
    assert_eq!(group.state.next_deadline(), Some(group.now + ms(1)));
    group.advance(ms(1));
    assert_eq!(group.active_members(), ["a"]);
}

#[test]
fn with_a_record_of_a_backup_nothing_is_decided_until_leases_have_expired() {
    let (backup, last) = records();
    let mut group = Group::by_record(&["a", "b", "c"], &backup);
    group.heartbeat("c", 1, DesiredState::Joining).unwrap();
    group.heartbeat_at("a", 1, DesiredState::Ready, last.view.number).unwrap();
    assert!(group.state.is_outdated());
    group.heartbeat_at("b", 1, DesiredState::Ready, last.view.number).unwrap();
    for _ in 0..4 {
        assert!(["a", "b", "c"].iter().all(|name| !group.has_lease(name, 1)));
        assert_eq!(*group.state.view(), backup.view);
        group.advance(TTL / 4);
        group.heartbeat_at("a", 1, DesiredState::Ready, last.view.number).unwrap();
        group.heartbeat_at("b", 1, DesiredState::Ready, last.view.number).unwrap();
    }
    assert!(!group.state.is_outdated());
    assert_eq!(group.active_members(), ["a", "b"], "as they were by the last view");
    let (number, changes) = (group.state.view().number, group.state.view().serving_changes);
    assert_eq!((number, changes), (first(2), first(2)), "above every other number and count");
    assert!(group.state.view().members.iter().all(|member| member.epoch == number && !member.lease_expired));
    assert!(group.has_lease("a", 1) && !group.has_lease("c", 1));
}

#[test]
fn after_a_loss_the_term_is_above_those_that_gateways_know() {
    let (_, mut last) = records();
    (last.term, Arc::make_mut(&mut last.view).number) = (7, first(7) + 3);
    let mut group = Group::by_record(&["a", "b"], &Record::default());
    group.heartbeat_at("a", 1, DesiredState::Ready, last.view.number).unwrap();
    group.heartbeat("b", 1, DesiredState::Joining).unwrap();
    assert!(group.state.is_outdated() && group.state.view().number == 0);
    // Longer than the lease that nobody else may have: until the last one that reports.
    group.advance(TTL.saturating_sub(ms(1)));
    assert_eq!(group.state.next_deadline(), Some(group.now + ms(1)));
    group.heartbeat_at("a", 1, DesiredState::Ready, last.view.number).unwrap();
    assert_eq!(group.state.view().number, 0);
    group.advance(ms(1));
    assert_eq!((group.state.view().number, group.state.stored_record().term), (first(8), 8));
    assert_eq!(group.active_members(), ["a"]);
    group.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!((group.active_members(), group.state.view().number), (vec!["a", "b"], first(8) + 1));
}

#[test]
fn after_a_late_report_leases_wait_for_those_under_the_record() {
    let (backup, last) = records();
    let mut group = Group::by_record(&["a", "b", "c"], &backup);
    group.heartbeat("c", 1, DesiredState::Ready).unwrap();
    group.advance(TTL);
    group.heartbeat("c", 1, DesiredState::Ready).unwrap();
    assert!(group.has_lease("c", 1));
    group.heartbeat_at("a", 1, DesiredState::Ready, last.view.number).unwrap();
    assert!(!group.has_lease("a", 1), "c may have a lease");
    group.advance(TTL);
    group.heartbeat_at("a", 1, DesiredState::Ready, last.view.number).unwrap();
    assert_eq!(group.active_members(), ["a"]);
    assert!(group.has_lease("a", 1) && !group.has_lease("c", 1));
}

#[test]
fn reported_view_numbers_are_not_reused() {
    let mut group = Group::active(&["a", "b"]);
    group.heartbeat_knowing("b", 40).unwrap();
    let number = group.state.view().number;
    assert_eq!(number, first(1));
    assert_eq!(group.active_members(), ["a", "b"], "too late for a lease under it");
    assert_eq!((group.member("b").epoch, group.state.view().serving_changes), (number, number));
    // It has another view of that number.
    group.heartbeat_knowing("b", number + 1).unwrap();
    assert_eq!(group.state.view().number, first(2));
}

#[test]
fn a_record_that_has_lost_its_view_gets_one_with_a_higher_number() {
    let mut group = Group::active(&["a"]);
    let number = group.state.view().number;
    let older = Record { term: 1, view: Arc::new(MembershipView { number: 1, ..MembershipView::default() }) };
    group.state.begin_term(&older.next_term());
    group.heartbeat("a", 1, DesiredState::Ready).unwrap();
    assert!(group.state.view().number > number);
    assert_eq!(group.active_members(), ["a"]);
}

#[test]
fn a_report_of_the_highest_number_does_not_exhaust_view_numbers() {
    for is_recovered in [false, true] {
        for known in [(1 << 62) - 1, MAX_REPORTED_NUMBER - 1] {
            let mut group = if is_recovered { Group::active(&["a", "b"]) } else { Group::new(&["a", "b"]) };
            group.heartbeat_knowing("a", known).unwrap();
            group.advance(TTL * 3);
            group.heartbeat("b", 1, DesiredState::Joining).unwrap();
            assert!(group.state.view().number < crate::view::MAX_NUMBER, "gateways accept the next view");
        }
    }
}

#[test]
fn reports_of_gateways_outside_the_policy_are_ignored() {
    let mut group = Group::active(&["a", "b"]);
    let before = group.state.view().clone();
    assert_eq!(group.heartbeat_knowing("x", before.number + 7), Ok(HeartbeatOutcome::UnknownGateway));
    assert_eq!(*group.state.view(), before);
    // Nor during recovery.
    let mut next = Group::by_record(&["a", "b"], &group.state.stored_record());
    next.heartbeat_knowing("x", before.number + 7).unwrap();
    assert!(!next.state.is_outdated());
    next.heartbeat("a", 1, DesiredState::Ready).unwrap();
    next.heartbeat("b", 1, DesiredState::Ready).unwrap();
    assert_eq!(*next.state.view(), before);
}
