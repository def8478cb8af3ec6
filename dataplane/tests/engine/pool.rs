//! Which of its VIPs an endpoint leaves with: always the same one (RFC 4787 REQ-2 and REQ-11), or, where policy says so,
//! any that has room.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::snapshot::spec::{AddressSelection, Announce, EndpointSpec, PolicySet, VipSpec};

fn pod(number: u8) -> IpAddr {
    IpAddr::from([10, 244, 1, number])
}

/// Pods behind all of the VIPs from 192.0.2.64 on.
fn pooled(pods: u8, vips: u8, selection: AddressSelection) -> PolicySet {
    let mut set = policy();
    set.policies.truncate(1);
    set.policies[0].address_selection = selection;
    let addresses: Vec<IpAddr> = (64..64 + vips).map(|number| IpAddr::from([192, 0, 2, number])).collect();
    let vip = |&address: &IpAddr| VipSpec {
        address,
        name: "Service tenant/api".into(),
        announce: Announce::L2,
        reserved_ports: Vec::new(),
        shares: vec![],
    };
    set.vips = addresses.iter().map(vip).collect();
    let endpoint = |number| EndpointSpec {
        address: pod(number),
        name: "".into(),
        policy: "a".into(),
        vips: addresses.clone(),
        gateway: None,
        remarks: vec![],
    };
    set.endpoints = (1..=pods).map(endpoint).collect();
    set
}

fn gateway(range: PortRange, set: &PolicySet) -> Gateway {
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    gateway.set_policy(set);
    gateway
}

/// The VIP that a flow of a pod leaves with, if it does.
fn leaves_with(gateway: &mut Gateway, number: u8, port: u16, far: [u8; 4]) -> Option<IpAddr> {
    let sent = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, (pod(number), port).into(), (far, 53).into()));
    sent.first().map(|(_, bytes)| ends(bytes).0.ip())
}

#[test]
fn an_endpoint_has_one_vip_even_when_that_is_full() {
    let range = PortRange::new(30_000, 30_063).unwrap();
    let mut gateway = gateway(range, &pooled(20, 4, AddressSelection::PerEndpoint));
    let first = leaves_with(&mut gateway, 1, 4000, [198, 51, 100, 1]).unwrap();
    for n in 0..250_u8 {
        assert_eq!(leaves_with(&mut gateway, 1, 5000 + u16::from(n), [198, 51, 100, n]), Some(first));
    }
    // The others fill the pool toward one far side.
    let far = [198, 51, 100, 255];
    let taken = (2..=20).flat_map(|number| (0..40).map(move |port| (number, 6000 + port)));
    let opened = taken.filter(|&(number, port)| leaves_with(&mut gateway, number, port, far).is_some()).count();
    assert_eq!(opened, 4 * 64, "every port of the pool");
    assert_eq!(leaves_with(&mut gateway, 1, 4000, far), None, "refused, and not sent with another VIP");
    assert_eq!(gateway.drops().keys().collect::<Vec<_>>(), [&DropReason::PortsExhausted]);
    assert_eq!(leaves_with(&mut gateway, 1, 4001, [198, 51, 100, 1]), Some(first), "elsewhere it has its own");
    gateway.assert_delta("egress 508, drop ports_exhausted 505, created 508");
}

#[test]
fn each_connection_may_have_its_own_vip_where_policy_says_so() {
    let range = PortRange::new(30_000, 30_063).unwrap();
    let mut gateway = gateway(range, &pooled(1, 4, AddressSelection::PerConnection));
    let mut counts: HashMap<IpAddr, u32> = HashMap::new();
    for port in 0..4 * 64 {
        let vip = leaves_with(&mut gateway, 1, 4000 + port, [198, 51, 100, 1]).expect("there is room somewhere");
        *counts.entry(vip).or_default() += 1;
        assert_eq!(leaves_with(&mut gateway, 1, 4000 + port, [198, 51, 100, 1]), Some(vip), "one flow, one VIP");
    }
    assert!(counts.values().all(|&count| count == 64), "{counts:?}");
    assert_eq!(leaves_with(&mut gateway, 1, 9000, [198, 51, 100, 1]), None);
    gateway.assert_delta("egress 512, drop ports_exhausted 1, created 256");
}

#[test]
fn endpoints_are_spread_over_the_pool_and_stay_where_they_are() {
    let set = pooled(200, 16, AddressSelection::PerEndpoint);
    let mut gateway = gateway(PortRange::default(), &set);
    let far = [198, 51, 100, 1];
    let before: Vec<_> = (1..=200).map(|number| leaves_with(&mut gateway, number, 4000, far).unwrap()).collect();
    let mut counts: HashMap<IpAddr, f64> = HashMap::new();
    for vip in &before {
        *counts.entry(*vip).or_default() += 1.0;
    }
    // As if thrown by dice: the variance is about the mean.
    let mean = 200.0 / 16.0;
    let variance = counts.values().map(|count| (count - mean).powi(2)).sum::<f64>() / 16.0;
    assert!(counts.len() == 16 && variance < 2.0 * mean, "{variance}: {counts:?}");

    // A VIP goes: only those who had it move. (A gateway that starts anew comes to the same choice.)
    let mut smaller = set;
    let gone = smaller.vips.remove(5).address;
    smaller.endpoints.iter_mut().for_each(|endpoint| endpoint.vips.retain(|&vip| vip != gone));
    let mut other = Gateway::new(&Setup::default());
    other.set_policy(&smaller);
    let moved: HashSet<_> =
        (1..=200).filter(|&n| leaves_with(&mut other, n, 4000, far) != Some(before[usize::from(n) - 1])).collect();
    let had_it: HashSet<_> = (1..=200).filter(|&n| before[usize::from(n) - 1] == gone).collect();
    assert_eq!(moved, had_it);
    gateway.assert_delta("egress 200, created 200");
    other.assert_delta("egress 200, created 200");
}

#[test]
fn connections_are_spread_before_any_vip_is_full() {
    let mut gateway = gateway(PortRange::default(), &pooled(1, 4, AddressSelection::PerConnection));
    let mut counts: HashMap<IpAddr, u32> = HashMap::new();
    for port in 0..400 {
        let vip = leaves_with(&mut gateway, 1, 4000 + port, [198, 51, 100, 1]).unwrap();
        *counts.entry(vip).or_default() += 1;
    }
    assert!(counts.len() == 4 && counts.values().all(|count| (60..140).contains(count)), "{counts:?}");
    gateway.assert_delta("egress 400, created 400");
}

#[test]
fn who_has_no_vip_opens_nothing_however_it_is_chosen() {
    for selection in [AddressSelection::PerEndpoint, AddressSelection::PerConnection] {
        let mut set = pooled(1, 4, selection);
        set.endpoints[0].vips.clear();
        let mut gateway = gateway(PortRange::default(), &set);
        assert_eq!(leaves_with(&mut gateway, 1, 4000, [198, 51, 100, 1]), None);
        gateway.assert_delta("drop no_vip 1");
    }
}
