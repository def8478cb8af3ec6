//! Address selection: an endpoint always uses one of its VIPs (RFC 4787 REQ-2 and REQ-11), or, if configured per
//! connection, any with free ports.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::{AddressSelection, Announce, EndpointSpec, VipSpec};
use vipgate_dataplane::ports::PortRange;
use vipgate_testkit::*;

fn pod(number: u8) -> IpAddr {
    IpAddr::from([10, 244, 1, number])
}

/// Pods with all of the VIPs from 192.0.2.64 on.
fn pool_policy(pods: u8, vips: u8, selection: AddressSelection) -> PolicySet {
    let mut set = policy();
    set.policies.truncate(1);
    set.policies[0].address_selection = selection;
    let addresses: Vec<IpAddr> = (64..64 + vips).map(|number| IpAddr::from([192, 0, 2, number])).collect();
    let vip = |&address: &IpAddr| VipSpec {
        address,
        name: "Service tenant/api".into(),
        announce: Announce::L2,
        reserved_ports: Vec::new(),
        shards: vec![],
        shard_map: None,
        private: vec![],
    };
    set.vips = addresses.iter().map(vip).collect();
    let endpoint = |number| EndpointSpec {
        address: pod(number),
        name: "".into(),
        policy: "a".into(),
        vips: addresses.clone(),
        gateway: None,
        slot: None,
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

/// The VIP of a pod's flow as sent; `None` if the packet is dropped.
fn selected_vip(gateway: &mut Gateway, number: u8, port: u16, remote: [u8; 4]) -> Option<IpAddr> {
    let sent = gateway.receive(0, INSIDE, &packet(Protocol::Udp, (pod(number), port).into(), (remote, 53).into()));
    sent.first().map(|(_, bytes)| ends(bytes).0.ip())
}

#[test]
fn an_endpoint_keeps_its_vip_when_its_ports_are_exhausted() {
    let range = PortRange::new(30_000, 30_063).unwrap();
    let mut gateway = gateway(range, &pool_policy(20, 4, AddressSelection::PerEndpoint));
    let first = selected_vip(&mut gateway, 1, 4000, [198, 51, 100, 1]).unwrap();
    for n in 0..250_u8 {
        assert_eq!(selected_vip(&mut gateway, 1, 5000 + u16::from(n), [198, 51, 100, n]), Some(first));
    }
    // The other pods exhaust the pool toward one remote.
    let remote = [198, 51, 100, 255];
    let flows = (2..=20).flat_map(|number| (0..40).map(move |port| (number, 6000 + port)));
    let opened = flows.filter(|&(number, port)| selected_vip(&mut gateway, number, port, remote).is_some()).count();
    assert_eq!(opened, 4 * 64, "every port of the pool");
    assert_eq!(selected_vip(&mut gateway, 1, 4000, remote), None, "rejected, and not sent with another VIP");
    assert_eq!(gateway.drops().keys().collect::<Vec<_>>(), [&DropReason::PortsExhausted]);
    assert_eq!(
        selected_vip(&mut gateway, 1, 4001, [198, 51, 100, 1]),
        Some(first),
        "toward other remotes it still uses its VIP"
    );
    gateway.assert_delta("egress 508, drop ports_exhausted 505, created 508");
}

#[test]
fn per_connection_selection_uses_every_vip() {
    let range = PortRange::new(30_000, 30_063).unwrap();
    let mut gateway = gateway(range, &pool_policy(1, 4, AddressSelection::PerConnection));
    let mut counts: HashMap<IpAddr, u32> = HashMap::new();
    for port in 0..4 * 64 {
        let vip = selected_vip(&mut gateway, 1, 4000 + port, [198, 51, 100, 1]).expect("some VIP has a free port");
        *counts.entry(vip).or_default() += 1;
        assert_eq!(selected_vip(&mut gateway, 1, 4000 + port, [198, 51, 100, 1]), Some(vip), "one flow, one VIP");
    }
    assert!(counts.values().all(|&count| count == 64), "{counts:?}");
    assert_eq!(selected_vip(&mut gateway, 1, 9000, [198, 51, 100, 1]), None);
    gateway.assert_delta("egress 512, drop ports_exhausted 1, created 256");
}

#[test]
fn endpoints_are_distributed_over_the_pool_and_keep_their_vip() {
    let set = pool_policy(200, 16, AddressSelection::PerEndpoint);
    let mut gateway = gateway(PortRange::default(), &set);
    let remote = [198, 51, 100, 1];
    let before: Vec<_> = (1..=200).map(|number| selected_vip(&mut gateway, number, 4000, remote).unwrap()).collect();
    let mut counts: HashMap<IpAddr, f64> = HashMap::new();
    for vip in &before {
        *counts.entry(*vip).or_default() += 1.0;
    }
    // As for a random distribution: the variance is about the mean.
    let mean = 200.0 / 16.0;
    let variance = counts.values().map(|count| (count - mean).powi(2)).sum::<f64>() / 16.0;
    assert!(counts.len() == 16 && variance < 2.0 * mean, "{variance}: {counts:?}");

    // A VIP is removed: only its endpoints move. (A restarted gateway selects the same.)
    let mut without_vip = set;
    let removed = without_vip.vips.remove(5).address;
    without_vip.endpoints.iter_mut().for_each(|endpoint| endpoint.vips.retain(|&vip| vip != removed));
    let mut other = Gateway::new(&Setup::default());
    other.set_policy(&without_vip);
    let moved: HashSet<_> =
        (1..=200).filter(|&n| selected_vip(&mut other, n, 4000, remote) != Some(before[usize::from(n) - 1])).collect();
    let had_removed: HashSet<_> = (1..=200).filter(|&n| before[usize::from(n) - 1] == removed).collect();
    assert_eq!(moved, had_removed);
    gateway.assert_delta("egress 200, created 200");
    other.assert_delta("egress 200, created 200");
}

#[test]
fn per_connection_selection_balances_the_vips() {
    let mut gateway = gateway(PortRange::default(), &pool_policy(1, 4, AddressSelection::PerConnection));
    let mut counts: HashMap<IpAddr, u32> = HashMap::new();
    for port in 0..400 {
        let vip = selected_vip(&mut gateway, 1, 4000 + port, [198, 51, 100, 1]).unwrap();
        *counts.entry(vip).or_default() += 1;
    }
    assert!(counts.len() == 4 && counts.values().all(|count| (60..140).contains(count)), "{counts:?}");
    gateway.assert_delta("egress 400, created 400");
}

#[test]
fn an_endpoint_without_vips_opens_no_session() {
    for selection in [AddressSelection::PerEndpoint, AddressSelection::PerConnection] {
        let mut set = pool_policy(1, 4, selection);
        set.endpoints[0].vips.clear();
        let mut gateway = gateway(PortRange::default(), &set);
        assert_eq!(selected_vip(&mut gateway, 1, 4000, [198, 51, 100, 1]), None);
        gateway.assert_delta("drop no_vip 1");
    }
}
