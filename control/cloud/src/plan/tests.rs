use std::net::Ipv4Addr;

use super::*;
use crate::provider::{Associate, Attachment, Capacity};

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, last).into()
}

fn private(gateway: u8, last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, gateway, last).into()
}

fn nic(gateway: &str) -> Nic {
    Nic {
        id: NicId(format!("nic-{gateway}")),
        gateway: gateway.to_owned(),
        zone: Some("z1".to_owned()),
        capacity: Capacity { v4: 10, v6: 10 },
        associate: Associate::Nic,
        is_busy: false,
        is_ready: true,
        missing: Vec::new(),
        version: String::new(),
    }
}

fn claim() -> Claim {
    Claim { cluster: "ours".to_owned(), owner: "default/web".to_owned() }
}

/// A free address.
fn free(last: u8) -> PublicAddress {
    PublicAddress {
        id: AddressId(format!("id-{last}")),
        address: ip(last),
        zone: None,
        has_tags: true,
        claim: None,
        is_allocated: false,
        attachment: None,
        private: BTreeMap::new(),
        version: String::new(),
    }
}

/// One that is attached to gateway `a` and prepared at `b`.
fn attached(last: u8) -> PublicAddress {
    let at = |gateway: &str, number| (NicId(format!("nic-{gateway}")), private(number, last));
    let (nic, address) = at("a", 1);
    PublicAddress {
        claim: Some(claim()),
        attachment: Some(Attachment { nic: Some(nic.clone()), private: Some(address), id: None }),
        private: [(nic, address), at("b", 2)].into(),
        ..free(last)
    }
}

fn vip_at(gateway: &str, standby: &str) -> DesiredVip {
    DesiredVip {
        owner: "default/web".to_owned(),
        gateway: Some(gateway.to_owned()),
        standbys: vec![standby.to_owned()],
    }
}

/// These VIPs at gateway `a`, with `b` as standby.
fn desired(vips: &[u8]) -> Desired {
    let gateways = ["a", "b"].map(|name| (name.to_owned(), GatewayState::Active)).into();
    let vips = vips.iter().map(|last| (ip(*last), vip_at("a", "b"))).collect();
    Desired { cluster: "ours".to_owned(), vips, gateways, ..Desired::default() }
}

fn observed(addresses: Vec<PublicAddress>) -> Observation {
    Observation { addresses, nics: vec![nic("a"), nic("b")] }
}

#[test]
fn a_free_address_is_claimed_first() {
    let plan = plan(&desired(&[1]), &observed(vec![free(1), free(2)]));
    assert_eq!(plan.actions, [Action::Claim(free(1), claim())]);
    assert!(plan.is_waiting && plan.problems.is_empty());
}

#[test]
fn a_claimed_address_gets_a_private_one_and_then_is_attached() {
    let claimed = PublicAddress { claim: Some(claim()), ..free(1) };
    let plan_of = |address: &PublicAddress| plan(&desired(&[1]), &observed(vec![address.clone()])).actions;
    assert_eq!(plan_of(&claimed), [Action::Prepare(nic("a"), vec![claimed.clone()])]);
    let prepared = PublicAddress { private: [(nic("a").id, private(1, 1))].into(), ..claimed };
    let binding = Binding { address: prepared.clone(), private: private(1, 1) };
    assert_eq!(plan_of(&prepared), [Action::Attach(nic("a"), vec![binding])]);
}

#[test]
fn all_vips_of_a_dead_gateway_move_in_one_action() {
    let mut desired = desired(&[1, 2, 3]);
    desired.gateways.insert("a".to_owned(), GatewayState::Dead);
    desired.vips.values_mut().for_each(|vip| *vip = vip_at("b", "a"));
    let plan = plan(&desired, &observed([1, 2, 3].map(attached).to_vec()));
    let binding = |last| Binding { address: attached(last), private: private(2, last) };
    assert_eq!(plan.actions, [Action::Move(nic("a").id, nic("b"), [1, 2, 3].map(binding).to_vec())]);
}

#[test]
fn from_a_gateway_that_lives_a_vip_is_detached_and_then_attached() {
    let mut desired = desired(&[1]);
    desired.vips.insert(ip(1), vip_at("b", "a"));
    let plan_of = |address: &PublicAddress| plan(&desired, &observed(vec![address.clone()])).actions;
    assert_eq!(plan_of(&attached(1)), [Action::Detach(nic("a").id, vec![attached(1)])]);
    let detached = PublicAddress { attachment: None, ..attached(1) };
    let binding = Binding { address: detached.clone(), private: private(2, 1) };
    assert_eq!(plan_of(&detached), [Action::Attach(nic("b"), vec![binding])]);
}

#[test]
fn what_somebody_detached_by_hand_is_attached_again() {
    let detached = PublicAddress { attachment: None, ..attached(1) };
    let plan = plan(&desired(&[1]), &observed(vec![detached.clone()]));
    assert_eq!(plan.actions, [Action::Attach(nic("a"), vec![Binding { address: detached, private: private(1, 1) }])]);
}

#[test]
fn what_others_use_is_a_problem_and_no_action() {
    let theirs = Claim { cluster: "theirs".to_owned(), owner: "x/y".to_owned() };
    let at_nat = Attachment { nic: None, private: None, id: Some("nat-1".to_owned()) };
    let by_hand = Attachment { nic: Some(nic("a").id), private: Some(private(9, 9)), id: None };
    for (address, problem) in [
        (PublicAddress { claim: Some(theirs.clone()), ..free(1) }, Problem::OtherCluster("theirs".to_owned())),
        (PublicAddress { claim: Some(theirs), ..attached(1) }, Problem::OtherCluster("theirs".to_owned())),
        (PublicAddress { attachment: Some(at_nat.clone()), ..free(1) }, Problem::Attached("nat-1".to_owned())),
        (PublicAddress { attachment: Some(at_nat), ..attached(1) }, Problem::Attached("nat-1".to_owned())),
        (
            PublicAddress { attachment: Some(by_hand.clone()), ..attached(1) },
            Problem::Attached("10.0.9.9 of nic-a".to_owned()),
        ),
        (PublicAddress { attachment: Some(by_hand), ..free(1) }, Problem::Attached("10.0.9.9 of nic-a".to_owned())),
    ] {
        let plan = plan(&desired(&[1]), &observed(vec![address.clone()]));
        assert_eq!((plan.actions, plan.problems), (vec![], [(ip(1), problem)].into()), "{address:?}");
    }
}

#[test]
fn a_vip_that_is_none_any_more_is_given_up_in_order() {
    let plan_of = |address: &PublicAddress| plan(&desired(&[]), &observed(vec![address.clone()])).actions;
    let mut address = attached(1);
    assert_eq!(plan_of(&address), [Action::Detach(nic("a").id, vec![address.clone()])]);
    address.attachment = None;
    let binding = |gateway| Binding { address: address.clone(), private: private(gateway, 1) };
    // One after the other: both change the tags of the address.
    assert_eq!(plan_of(&address), [Action::Unprepare(nic("a"), vec![binding(1)])]);
    let half = PublicAddress { private: [(nic("b").id, private(2, 1))].into(), ..address.clone() };
    let binding = Binding { address: half.clone(), private: private(2, 1) };
    assert_eq!(plan_of(&half), [Action::Unprepare(nic("b"), vec![binding])]);
    address.private.clear();
    assert_eq!(plan_of(&address), [Action::Unclaim(address.clone())]);
    address.claim = None;
    assert_eq!(plan_of(&address), []);
}

#[test]
fn only_what_was_allocated_and_long_unused_is_released() {
    let allocated = PublicAddress { is_allocated: true, ..free(1) };
    let mut desired = desired(&[]);
    assert_eq!(plan(&desired, &observed(vec![allocated.clone()])).actions, []);
    desired.releasable = [free(1).id, free(2).id].into();
    let observed = observed(vec![allocated.clone(), free(2)]);
    assert_eq!(plan(&desired, &observed).actions, [Action::Release(allocated)]);
}

#[test]
fn a_busy_nic_waits_and_others_go_on() {
    let mut desired = desired(&[1, 2]);
    desired.vips.insert(ip(2), vip_at("b", "a"));
    let prepared = |last| PublicAddress { attachment: None, ..attached(last) };
    let mut observed = observed(vec![prepared(1), prepared(2)]);
    observed.nics[0].is_busy = true;
    let plan = plan(&desired, &observed);
    let binding = Binding { address: prepared(2), private: private(2, 2) };
    assert_eq!(plan.actions, [Action::Attach(nic("b"), vec![binding])]);
    assert!(plan.is_waiting);
}

#[test]
fn a_zonal_address_stays_in_its_zone() {
    let zonal = PublicAddress { zone: Some("z2".to_owned()), claim: Some(claim()), ..free(1) };
    let plan = plan(&desired(&[1]), &observed(vec![zonal]));
    assert_eq!((plan.actions, plan.problems), (vec![], [(ip(1), Problem::OtherZone("a".to_owned()))].into()));
}

#[test]
fn standbys_give_way_to_owners_at_a_full_nic() {
    let mut desired = desired(&[1, 2]);
    desired.vips.insert(ip(2), vip_at("b", "a"));
    let claimed = PublicAddress { claim: Some(claim()), ..free(2) };
    let mut observed = observed(vec![attached(1), claimed]);
    observed.nics[1].capacity.v4 = 1;
    let plan = plan(&desired, &observed);
    let binding = Binding { address: attached(1), private: private(2, 1) };
    assert_eq!(plan.actions, [Action::Unprepare(observed.nics[1].clone(), vec![binding])]);
}

/// An IPv6 address that is its own private address at both gateways.
fn untagged(last: u8) -> PublicAddress {
    let address = Ipv4Addr::new(203, 0, 113, last).to_ipv6_mapped().into();
    let private = ["nic-a", "nic-b"].map(|nic| (NicId(nic.to_owned()), address)).into();
    PublicAddress { address, has_tags: false, private, ..free(last) }
}

#[test]
fn the_capacity_of_one_family_is_nothing_to_the_other() {
    let six = PublicAddress { address: untagged(2).address, claim: Some(claim()), ..free(2) };
    let four = PublicAddress { claim: Some(claim()), ..free(1) };
    let mut desired = desired(&[1]);
    desired.vips.insert(six.address, vip_at("a", "b"));
    let mut observed = observed(vec![four.clone(), six.clone()]);
    observed.nics[0].capacity = Capacity::ipv4(1);
    let full = plan(&desired, &observed);
    let problem = Problem::NoCapacity("a".to_owned());
    assert_eq!(full.actions, [Action::Prepare(observed.nics[0].clone(), vec![four.clone()])]);
    assert_eq!(full.problems, [(six.address, problem.clone())].into());
    observed.nics[0].capacity = Capacity { v4: 0, v6: 1 };
    let full = plan(&desired, &observed);
    assert_eq!(full.actions, [Action::Prepare(observed.nics[0].clone(), vec![six])]);
    assert_eq!(full.problems, [(four.address, problem)].into());
}

#[test]
fn an_address_that_is_its_own_private_one_takes_room_where_it_is_attached() {
    let attached = |last| {
        let attachment = Attachment { nic: Some(nic("a").id), private: Some(untagged(last).address), id: None };
        PublicAddress { attachment: Some(attachment), ..untagged(last) }
    };
    let mut desired = desired(&[]);
    desired.vips = [1, 2].map(|last| (untagged(last).address, vip_at("a", "b"))).into();
    let mut observed = observed(vec![attached(1), untagged(2)]);
    observed.nics[0].capacity.v6 = 1;
    let full = plan(&desired, &observed);
    assert_eq!((full.actions, full.problems.len()), (vec![], 1));
    desired.vips.insert(untagged(1).address, vip_at("b", "a"));
    let leaving = plan(&desired, &observed);
    assert_eq!(leaving.actions, [Action::Detach(nic("a").id, vec![attached(1)])], "one that goes makes room");
}

#[test]
fn a_nic_that_is_not_ready_is_prepared_at_the_home_and_at_the_standby() {
    let mut desired = desired(&[]);
    let address = untagged(1);
    desired.vips.insert(address.address, vip_at("a", "b"));
    let mut observed = observed(vec![address.clone()]);
    observed.nics.iter_mut().for_each(|nic| nic.is_ready = false);
    let binding = Binding { address: address.clone(), private: address.address };
    let attach = plan(&desired, &observed).actions;
    assert_eq!(attach, [Action::Attach(observed.nics[0].clone(), vec![binding])], "what serves traffic is first");
    let attachment = Attachment { nic: Some(nic("a").id), private: Some(address.address), id: None };
    observed.addresses[0].attachment = Some(attachment);
    let address = observed.addresses[0].clone();
    let prepare = |at: usize| Action::Prepare(observed.nics[at].clone(), vec![address.clone()]);
    // One after the other: both are of the same address.
    assert_eq!(plan(&desired, &observed).actions, [prepare(0)]);
    let mut half = observed.clone();
    half.nics[0].is_ready = true;
    assert_eq!(plan(&desired, &half).actions, [prepare(1)]);
}

#[test]
fn of_two_addresses_with_one_private_address_the_one_that_is_attached_keeps_it() {
    let mut double = PublicAddress { attachment: None, ..attached(2) };
    double.private.insert(nic("a").id, private(1, 1));
    let plan_of = |addresses| plan(&desired(&[1, 2]), &observed(addresses));
    let unbind = plan_of(vec![attached(1), double.clone()]);
    let binding = Binding { address: double.clone(), private: private(1, 1) };
    assert_eq!((unbind.actions, unbind.problems), (vec![Action::Unprepare(nic("a"), vec![binding])], [].into()));
    // Attached nowhere, one is attached, and then the other is unbound.
    let free = PublicAddress { attachment: None, ..attached(1) };
    let first = plan_of(vec![free.clone(), double]);
    assert_eq!(first.actions, [Action::Attach(nic("a"), vec![Binding { address: free, private: private(1, 1) }])]);
    // At a standby, too.
    let mut double = attached(2);
    double.private.insert(nic("b").id, private(2, 1));
    let binding = Binding { address: double.clone(), private: private(2, 1) };
    assert_eq!(plan_of(vec![attached(1), double]).actions, [Action::Unprepare(nic("b"), vec![binding])]);
}

#[test]
fn an_address_of_ours_at_a_primary_address_elsewhere_stays_and_a_person_can_read_what_to_do() {
    let gone = Attachment { nic: Some(NicId("nic-gone".to_owned())), private: Some(private(9, 9)), id: None };
    let claimed = PublicAddress { attachment: Some(gone), ..attached(1) };
    let mut observed = observed(vec![claimed]);
    observed.nics.iter_mut().for_each(|nic| nic.associate = Associate::Instance);
    let plan = plan(&desired(&[1]), &observed);
    let problem = Problem::AttachedWithClaim("10.0.9.9 of nic-gone".to_owned());
    assert_eq!((plan.actions, &plan.problems), (vec![], &[(ip(1), problem.clone())].into()));
    assert_eq!(problem.reason(), "AttachedElsewhere");
    assert!(problem.to_string().ends_with("if that was a gateway of this cluster, detach it there"), "{problem}");
}
