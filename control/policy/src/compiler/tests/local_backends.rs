//! Owners of L2 VIPs whose clients reach only backends on the gateway's node.

use std::collections::BTreeSet;

use vipgate_dataplane::policy::spec::BackendSpec;

use super::inbound::{PORTS, endpoint_slice, web};
use super::*;
use crate::manifest::{Body, CloudAddress, CloudNic, CloudPool};

/// Gateways on the nodes n1, n2 and n3.
fn on_three_nodes() -> Vec<String> {
    let gateway = |(name, node): (&str, &str)| gateway_with(name, &format!("node: {node}"));
    [("gw-a", "n1"), ("gw-b", "n2"), ("gw-c", "n3")].map(gateway).into()
}

/// The home of a VIP that one gateway owns.
fn home(got: &Outcome, vip: &str) -> String {
    got.placement.vips.get(&ip(vip)).unwrap().shards[0].gateway.to_string()
}

/// Home of `203.0.113.1`, the VIP of a Service with these fields, by the endpoints of its IPv4 slice.
fn home_of_web(spec: &str, endpoints: &str) -> String {
    let slice = endpoint_slice("s-4", "IPv4", PORTS, endpoints);
    home(&compiled(&[on_three_nodes(), vec![web("", spec), slice]].concat()), "203.0.113.1")
}

const LOCAL: &str = ", externalTrafficPolicy: Local";

#[test]
fn the_owner_of_an_l2_vip_has_local_backends_if_clients_reach_only_those() {
    let ready = |last: u8, node: &str| format!("{{addresses: [10.0.0.{last}], nodeName: {node}}}");
    let ending = |last: u8, node: &str| {
        let conditions = "conditions: {ready: false, serving: true, terminating: true}";
        format!("{{addresses: [10.0.0.{last}], nodeName: {node}, {conditions}}}")
    };
    let failing = |last: u8, node: &str| ready(last, node).replace('}', ", conditions: {ready: false}}");
    let without = home_of_web(LOCAL, "");
    for (at, (own, other)) in [("n1", "n2"), ("n2", "n3"), ("n3", "n1")].into_iter().enumerate() {
        let gateway = ["gw-a", "gw-b", "gw-c"][at];
        for (endpoints, what) in [
            (vec![ready(1, own)], "a ready one"),
            (vec![ready(1, own), ending(2, other), failing(3, other)], "the only ready one"),
            (vec![ending(1, own), failing(2, other)], "the only one that serves"),
            (vec![failing(1, own)], "one that will be ready again"),
            (vec![ready(1, own), ready(2, "n9")], "the only one at a gateway"),
        ] {
            let endpoints = endpoints.join(", ");
            assert_eq!(home_of_web(LOCAL, &endpoints), gateway, "{what}");
            assert_eq!(home_of_web("", &endpoints), without, "all backends are as good");
        }
    }
    assert_eq!(home_of_web(LOCAL, &ready(1, "n9")), without, "no gateway is there");
}

/// Of no port of the Service.
const OTHER_PORT: &str = "ports: [{name: other, port: 1}]\n";

#[test]
fn backends_count_for_the_owner_as_they_count_for_its_clients() {
    let documents = |weight: &str| {
        let v4 = "{addresses: [10.0.0.1], nodeName: n1, targetRef: {kind: Pod, name: p1}}, \
                  {addresses: [10.0.0.2], nodeName: n2}";
        let pod = pod("a", "p1", "", "10.0.0.1");
        let own = vec![
            web("", LOCAL),
            endpoint_slice("s-4", "IPv4", PORTS, v4),
            endpoint_slice("s-5", "IPv4", OTHER_PORT, "{addresses: [10.0.0.3], nodeName: n3}"),
            endpoint_slice("s-6", "IPv6", PORTS, "{addresses: [\"fd00::3\"], nodeName: n3}"),
            pod.replace("labels", &format!("annotations: {{vipgate.io/weight: \"{weight}\"}}, labels")),
        ];
        [on_three_nodes(), own].concat()
    };
    let got = compiled(&documents("0"));
    assert_eq!((home(&got, "203.0.113.1"), home(&got, "2001:db8::1")), ("gw-b".to_owned(), "gw-c".to_owned()));
    // Both are ready: the home is one of them, whichever.
    let both = compiled(&documents("1"));
    assert!(["gw-a", "gw-b"].contains(&home(&both, "203.0.113.1").as_str()));
    // The gateway that is chosen has a backend for external clients.
    for (got, vip) in [(&got, "203.0.113.1"), (&got, "2001:db8::1"), (&both, "203.0.113.1")] {
        let peer = got.placement.peer(&home(got, vip)).unwrap();
        let gateway = GatewayLocality { node: peer.node.clone(), ..GatewayLocality::named(&peer.name) };
        let set = policy_for(&got.placement, Some(&gateway), "");
        let is_for = |backend: &BackendSpec| backend.external && backend.address.is_ipv4() == ip(vip).is_ipv4();
        assert!(set.services[0].backends.iter().any(is_for), "{vip}");
    }
}

/// Who shares a VIP later doesn't move it, whatever it has where.
#[test]
fn the_oldest_service_of_a_vip_decides_about_local_backends() {
    let shared = |name: &str, year: u16, port: u16, local: bool| {
        let created = format!(", creationTimestamp: \"{year}-01-01T00:00:00Z\"");
        let service = service(name, &created, port, &["203.0.113.1"]);
        if local { service.replace("LoadBalancer,", &format!("LoadBalancer{LOCAL},")) } else { service }
    };
    let at = |name: &str, address: &str, node: &str| {
        slice(name, &[address]).replace("], targetRef", &format!("], nodeName: {node}, targetRef"))
    };
    let homes = |older: bool, younger: bool, namespace: &str| {
        ["n1", "n2", "n3"].map(|node| {
            let of_other = |text: String| text.replace("namespace: a", &format!("namespace: {namespace}"));
            let own = vec![
                shared("s", 2020, 80, older),
                at("s", "10.0.0.1", node),
                of_other(shared("t", 2021, 81, younger)),
                of_other(at("t", "10.0.0.2", "n1")),
            ];
            home(&compiled(&[on_three_nodes(), own].concat()), "203.0.113.1")
        })
    };
    let without = homes(false, false, "a");
    assert_eq!(without.iter().collect::<BTreeSet<_>>().len(), 1, "backends don't matter");
    for namespace in ["a", "b"] {
        for younger in [false, true] {
            assert_eq!(homes(true, younger, namespace), ["gw-a", "gw-b", "gw-c"], "{namespace} {younger}");
            assert_eq!(homes(false, younger, namespace), without, "{namespace} {younger}");
        }
    }
}

#[test]
fn local_backends_are_nothing_to_a_vip_that_all_gateways_announce() {
    let maps = ["n1", "n2"].map(|node| {
        let slice = endpoint_slice("s-4", "IPv4", PORTS, &format!("{{addresses: [10.0.0.1], nodeName: {node}}}"));
        let got = compiled(&[on_three_nodes(), vec![web("vipgate.io/announce: BGP", LOCAL), slice]].concat());
        got.placement.vips[0].shard_map.clone().unwrap()
    });
    assert_eq!(maps[0], maps[1]);
}

/// Each move would be a call of the provider's API.
#[test]
fn local_backends_are_nothing_to_a_vip_of_a_provider() {
    let nic = CloudNic { capacity: 9, ipv6_capacity: 9, zone: None };
    let cloud = CloudPool {
        addresses: [(ip("203.0.113.1"), CloudAddress::default())].into(),
        nics: ["gw-a", "gw-b", "gw-c"].map(|name| (name.to_owned(), nic.clone())).into(),
    };
    let homes = ["n1", "n2", "n3"].map(|node| {
        let slice = endpoint_slice("s-4", "IPv4", PORTS, &format!("{{addresses: [10.0.0.1], nodeName: {node}}}"));
        let own = vec![web("", LOCAL), slice, pool("p", "{ranges: [203.0.113.0/28]}")];
        let mut objects = objects(&[on_three_nodes(), own].concat().join("---\n"));
        for object in &mut objects {
            if let Body::AddressPool(pool) = &mut object.body {
                pool.cloud = Some(Arc::new(cloud.clone()));
            }
        }
        home(&compiled_objects(&objects, None), "203.0.113.1")
    });
    assert!(homes.iter().all(|home| *home == homes[0]), "{homes:?}");
}
