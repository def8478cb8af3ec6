//! The policy and the network that tests start with.

use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, HopSpec, InterfaceSpec, Limits, NeighborSpec, NetworkSpec,
    OnExhaustion, Role, RouteSpec, RouteTarget, VipSpec,
};

use crate::{INSIDE, INSIDE_MAC, OUTSIDE, OUTSIDE_MAC, POD_MAC, PolicySet, ROUTER_MAC, ip};

/// Pods 10.244.1.5 and .6 (fd00:244:1::5, ::6) behind VIP 192.0.2.10 (2001:db8::10); .21 behind 192.0.2.11, with
/// 198.51.100.128/25 excluded.
pub fn policy() -> PolicySet {
    let egress = |name: &str, excluded: &[&str]| EgressSpec {
        name: name.into(),
        destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
        excluded: excluded.iter().map(|net| net.parse().unwrap()).collect(),
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::Drop,
    };
    let vip = |address: &str, reserved: &[u16]| VipSpec {
        address: ip(address),
        name: "Service tenant/api".into(),
        announce: Announce::L2,
        reserved_ports: reserved.into(),
        shards: vec![],
        shard_map: None,
        private: vec![],
    };
    let endpoint = |address: &str, policy: &str, vip: &str| EndpointSpec {
        address: ip(address),
        name: "".into(),
        policy: policy.into(),
        vips: vec![ip(vip)],
        gateway: None,
        slot: None,
        remarks: vec![],
    };
    PolicySet {
        version: "test".into(),
        policies: vec![egress("a", &[]), egress("b", &["198.51.100.128/25"])],
        vips: vec![vip("192.0.2.10", &[80, 30000]), vip("192.0.2.11", &[]), vip("2001:db8::10", &[])],
        endpoints: vec![
            endpoint("10.244.1.5", "a", "192.0.2.10"),
            endpoint("10.244.1.6", "a", "192.0.2.10"),
            endpoint("10.244.1.21", "b", "192.0.2.11"),
            endpoint("fd00:244:1::5", "a", "2001:db8::10"),
            endpoint("fd00:244:1::6", "a", "2001:db8::10"),
        ],
        ..PolicySet::default()
    }
}

/// Two interfaces, with routes to the pods' networks inside and to a router outside, and their neighbors.
pub fn network() -> NetworkSpec {
    let interface = |id, name: &str, role, mac| InterfaceSpec {
        id,
        name: name.into(),
        ifindex: u32::from(id.0) + 1,
        role,
        mac,
        mtu: 1500,
        up: true,
        addresses: vec![],
        frames: FrameLayout::default(),
        partial_checksums: false,
    };
    let route = |prefix: &str, interface, gateway: Option<&str>| RouteSpec {
        prefix: prefix.parse().unwrap(),
        target: RouteTarget::Via(vec![HopSpec { interface, gateway: gateway.map(ip) }]),
    };
    let neighbor = |interface, address: &str, mac| NeighborSpec { interface, address: ip(address), mac };
    NetworkSpec {
        interfaces: vec![
            interface(INSIDE, "in", Role::Inside, INSIDE_MAC),
            interface(OUTSIDE, "out", Role::Outside, OUTSIDE_MAC),
        ],
        routes: vec![
            route("10.244.1.0/24", INSIDE, None),
            route("fd00:244:1::/64", INSIDE, None),
            route("0.0.0.0/0", OUTSIDE, Some("192.0.2.254")),
            route("::/0", OUTSIDE, Some("2001:db8::fe")),
            route("192.0.2.0/24", OUTSIDE, None),
        ],
        neighbors: vec![
            neighbor(INSIDE, "10.244.1.5", POD_MAC),
            neighbor(INSIDE, "10.244.1.6", POD_MAC),
            neighbor(INSIDE, "10.244.1.7", POD_MAC),
            neighbor(INSIDE, "10.244.1.21", POD_MAC),
            neighbor(INSIDE, "fd00:244:1::5", POD_MAC),
            neighbor(INSIDE, "fd00:244:1::6", POD_MAC),
            neighbor(OUTSIDE, "192.0.2.254", ROUTER_MAC),
            neighbor(OUTSIDE, "2001:db8::fe", ROUTER_MAC),
        ],
        locals: vec![],
    }
}
