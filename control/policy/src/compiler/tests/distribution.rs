//! Distribution of VIPs and endpoints over gateways: owners, round robin, zone affinity, `maxAddresses` and backups.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

const OLDER: &str = ", creationTimestamp: \"2020-01-01T00:00:00Z\"";
const NEWER: &str = ", creationTimestamp: \"2021-01-01T00:00:00Z\"";

fn node(name: &str, zone: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{topology.kubernetes.io/zone: {zone}}}}}\n")
}

/// The endpoint slice of Service `a/{service}`: addresses and further fields of their endpoints.
fn slice_with(service: &str, endpoints: &[(String, &str)]) -> String {
    let endpoints = endpoints.iter().map(|(address, fields)| format!("{{addresses: [\"{address}\"]{fields}}}"));
    let endpoints: Vec<String> = endpoints.collect();
    let template = slice(service, &["10.0.0.0"]);
    let (head, _) = template.split_once("endpoints: ").unwrap();
    format!("{head}endpoints: [{}]\n", endpoints.join(", "))
}

/// The pool of VIPs announced by BGP: 198.51.100.0/24 and 2001:db8:100::/64.
fn bgp_pool() -> String {
    pool("bgp", "{ranges: [198.51.100.0/24, \"2001:db8:100::/64\"], announce: BGP}")
}

/// The placement and its warnings.
fn placement(documents: &[String]) -> (Placement, Vec<String>) {
    let got = compiled(documents);
    let warnings = messages(&got);
    (got.accept().unwrap().0, warnings)
}

/// The gateway of each endpoint; empty where there is none.
fn gateways_of(placement: &Placement) -> BTreeMap<IpAddr, String> {
    let name = |it: &EndpointSpec| placement.gateway_of(it).map(ToString::to_string).unwrap_or_default();
    placement.endpoints.iter().map(|it| (it.address, name(it))).collect()
}

/// The owners of each VIP, sorted.
fn owners(placement: &Placement) -> BTreeMap<IpAddr, Vec<String>> {
    let homes = |vip: &VipSpec| -> BTreeSet<_> {
        block_orders(placement, vip).iter().map(|order| order[0].to_string()).collect()
    };
    placement.vips.iter().map(|vip| (vip.address, homes(vip).into_iter().collect())).collect()
}

#[test]
fn round_robin_is_sorted_endpoints_over_sorted_gateways() {
    let v4: Vec<String> = (1..=7).map(|n| format!("10.0.0.{}", n * 3)).collect();
    let v6: Vec<String> = (1..=4).map(|n| format!("fd00::{n}")).collect();
    let mut reversed: Vec<&str> = v4.iter().map(String::as_str).collect();
    reversed.reverse();
    let (placement, warnings) = placement(&[
        bgp_pool(),
        gateway("gw-c", ""),
        gateway("gw-a", ""),
        gateway("gw-b", ""),
        service("s", "", 80, &["198.51.100.1", "2001:db8:100::1"]),
        slice("s", &reversed),
        slice("s", &v6.iter().map(String::as_str).collect::<Vec<_>>()),
        policy("p", "", "{serviceRef: {name: s}, distribution: RoundRobin}"),
    ]);
    assert_eq!(warnings, [""; 0]);
    let names = ["gw-a", "gw-b", "gw-c"];
    let expected = |addresses: &[String]| -> Vec<_> {
        addresses.iter().zip(names.iter().cycle()).map(|(address, name)| (ip(address), (*name).to_owned())).collect()
    };
    assert_eq!(gateways_of(&placement), expected(&v4).into_iter().chain(expected(&v6)).collect());
}

#[test]
fn round_robin_counts_each_zone_separately() {
    // Every second endpoint is in the other zone: a shared counter would skip every second gateway.
    let zone = |n: u8| if n.is_multiple_of(2) { ", zone: z2" } else { ", zone: z1" };
    let endpoints: Vec<_> = (1..=8).map(|n| (format!("10.0.0.{n}"), zone(n))).collect();
    let zones = [("gw-a", "zone: z1"), ("gw-b", "zone: z1"), ("gw-c", "zone: z2"), ("gw-d", "zone: z2")];
    let mut documents: Vec<String> = zones.iter().map(|(name, spec)| gateway_with(name, spec)).collect();
    documents.extend([
        bgp_pool(),
        service("s", "", 80, &["198.51.100.1"]),
        slice_with("s", &endpoints),
        policy("p", "", "{serviceRef: {name: s}, distribution: RoundRobin, zoneAffinity: Prefer}"),
    ]);
    let (placement, warnings) = placement(&documents);
    assert_eq!(warnings, [""; 0]);
    let got: Vec<String> = gateways_of(&placement).into_values().collect();
    assert_eq!(got, ["gw-a", "gw-c", "gw-b", "gw-d", "gw-a", "gw-c", "gw-b", "gw-d"]);
}

#[test]
fn zone_affinity_selects_a_gateway_on_the_node_then_in_the_zone() {
    let all = ["gw-1", "gw-2", "gw-3"];
    // Fields of an endpoint, and its eligible gateways with `Prefer` and with `Require`.
    let cases: [(&str, &[&str], &[&str]); 8] = [
        (", nodeName: n1", &["gw-1"], &["gw-1"]),
        (", nodeName: n1, zone: z1", &["gw-1"], &["gw-1"]),
        (", nodeName: n4", &["gw-3"], &["gw-3"]),
        (", zone: z1", &["gw-1", "gw-2"], &["gw-1", "gw-2"]),
        // The zone in the slice takes precedence over that of the node.
        (", nodeName: n4, zone: z1", &["gw-1", "gw-2"], &["gw-1", "gw-2"]),
        (", nodeName: n5", &all, &[""]),
        ("", &all, &[""]),
        // No locality in the slice: that of the pod.
        ("", &["gw-3"], &["gw-3"]),
    ];
    let endpoints: Vec<_> =
        cases.iter().enumerate().map(|(n, (fields, ..))| (format!("10.0.0.{n}"), *fields)).collect();
    for (affinity, required) in [("Prefer", false), ("Require", true)] {
        let (placement, warnings) = placement(&[
            bgp_pool(),
            gateway_with("gw-1", "zone: z1, node: n1"),
            // Its zone is its node's.
            gateway_with("gw-2", "node: n2"),
            gateway_with("gw-3", "zone: z2, node: n3"),
            node("n1", "z1"),
            node("n2", "z1"),
            node("n4", "z2"),
            node("n5", "z3"),
            pod("a", "x", "", "10.0.0.7").replace("containers", "nodeName: n4, containers"),
            pod("a", "y", "app: y", "10.0.1.1").replace("containers", "nodeName: n1, containers"),
            service("s", "", 80, &["198.51.100.1"]),
            slice_with("s", &endpoints),
            policy("p", "", &format!("{{serviceRef: {{name: s}}, zoneAffinity: {affinity}}}")),
            policy(
                "q",
                "",
                &format!(
                    "{{selectors: [{{podSelector: {{matchLabels: {{app: y}}}}}}], addresses: [198.51.100.2], \
                     zoneAffinity: {affinity}}}"
                ),
            ),
        ]);
        let got = gateways_of(&placement);
        for ((address, fields), (_, with_prefer, with_require)) in endpoints.iter().zip(cases) {
            let eligible = if required { with_require } else { with_prefer };
            assert!(eligible.contains(&got[&ip(address)].as_str()), "{affinity}: {address}{fields} has {got:?}");
        }
        assert_eq!(got[&ip("10.0.1.1")], "gw-1", "a pod that matches a selector");
        let unassigned: Vec<_> = placement.endpoints.iter().filter(|it| it.vips.is_empty()).collect();
        let expected = "spec.zoneAffinity: warning: EgressPolicy a/p requires a gateway in the zone of each endpoint: \
                        the traffic of 2 endpoints (the first is 10.0.0.5) is dropped";
        assert_eq!((unassigned.len(), warnings.len()), if required { (2, 1) } else { (0, 0) }, "{warnings:?}");
        assert!(!required || warnings[0].ends_with(expected), "{warnings:?}");
    }
}

#[test]
fn a_bgp_vip_is_distributed_over_all_candidates_and_an_l2_vip_has_one_owner() {
    let mut documents: Vec<String> = ["gw-a", "gw-b", "gw-c", "gw-d"].iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        bgp_pool(),
        service("s", EGRESS, 80, &["198.51.100.1", "203.0.113.1"]),
        slice("s", &["10.0.0.1"]),
        pod("a", "x", "", "10.0.0.2"),
        policy(
            "p",
            "",
            "{selectors: [{podSelector: {}}], addresses: [198.51.100.2, 198.51.100.3], \
             gateways: {names: [gw-b, gw-d]}}",
        ),
    ]);
    let (placement, warnings) = placement(&documents);
    assert_eq!(warnings, [""; 0]);
    for (vip, names) in owners(&placement) {
        let spec = placement.vips.iter().find(|spec| spec.address == vip).unwrap();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        match vip.to_string().as_str() {
            "198.51.100.1" => assert_eq!(names, ["gw-a", "gw-b", "gw-c", "gw-d"]),
            "198.51.100.2" | "198.51.100.3" => assert_eq!(names, ["gw-b", "gw-d"]),
            _ => {
                assert!(names.len() == 1 && spec.shards[0].blocks.is_none(), "{vip}: {names:?}");
                assert_eq!(spec.shard_map, None, "{vip}");
                continue;
            }
        }
        assert_eq!(spec.shards, [], "{vip}");
        let mut counts: BTreeMap<Arc<str>, usize> = BTreeMap::new();
        for order in block_orders(&placement, spec) {
            *counts.entry(order[0].clone()).or_default() += 1;
        }
        let mean = SLOTS / names.len();
        assert!(counts.values().all(|count| (mean / 2..mean * 2).contains(count)), "{vip}: {counts:?}");
    }
    // VIPs of one policy share a map, at different rotations; and its endpoints have slots of it.
    let of = |vip: &str| placement.vips.iter().find(|spec| spec.address == ip(vip)).unwrap().shard_map.clone().unwrap();
    let (one, other) = (of("198.51.100.2"), of("198.51.100.3"));
    assert!(one.map == other.map && one.rotation != other.rotation);
    assert!(placement.endpoints.iter().all(|it| it.gateway.is_none() && it.slot.as_ref().unwrap().map.is_none()));
}

#[test]
fn all_slots_of_a_bgp_vip_with_one_candidate_are_at_that_gateway() {
    let names_one = policy("p", "", "{serviceRef: {name: s}, gateways: {names: [gw-a]}}");
    let vip = service("s", "", 80, &["198.51.100.1"]);
    let (placement, _) = placement(&[bgp_pool(), gateway("gw-a", ""), gateway("gw-b", ""), vip, names_one]);
    let map = shard_map(&placement, &placement.vips[0].shard_map.as_ref().unwrap().map);
    assert_eq!((&map.orders, &map.slots), (&vec![vec!["gw-a".into()]], &vec![0; SLOTS]));
}

#[test]
fn a_gateway_without_shards_gets_the_complete_policy() {
    let documents = [
        bgp_pool(),
        gateway("gw-a", "tier: gold"),
        gateway("gw-b", ""),
        gateway("gw-c", ""),
        service("s", "", 80, &["203.0.113.1", "198.51.100.1"]),
        slice("s", &["10.0.0.1", "10.0.0.2"]),
        pod("a", "x", "", "10.0.0.3"),
        policy("p", "", "{serviceRef: {name: s}, gateways: {selector: {matchLabels: {tier: gold}}}}"),
        policy("q", "", "{selectors: [{podSelector: {}}], addresses: [198.51.100.2], gateways: {names: [gw-a, gw-b]}}"),
    ];
    let idle = compiled_for("gw-c", &documents);
    assert_eq!(idle.set.vips, idle.placement.vips.to_vec());
    assert_eq!(idle.set.endpoints, idle.placement.endpoints.to_vec());
    assert_eq!((idle.set.vips.len(), idle.set.endpoints.len(), messages(&idle)), (3, 3, vec![]));
    assert!(gateways_of(&idle.placement).values().all(|name| name == "gw-a" || name == "gw-b"));
    let gateways = |placement: &Placement, vip: &VipSpec| block_orders(placement, vip).concat();
    assert!(idle.set.vips.iter().all(|vip| !gateways(&idle.placement, vip).contains(&"gw-c".into())));
    // For a VIP without a policy every gateway is eligible.
    let mut documents = documents.to_vec();
    documents.push(service("t", "", 80, &["198.51.100.3"]));
    let all = compiled_for("gw-c", &documents).placement;
    let vip = all.vips.iter().find(|vip| vip.address == ip("198.51.100.3")).unwrap();
    assert!(gateways(&all, vip).contains(&"gw-c".into()));
}

#[test]
fn endpoints_are_assigned_only_to_eligible_gateways_of_their_own_policy() {
    let pods: Vec<String> = (1..=20).map(|n| pod("a", &format!("x{n}"), "", &format!("10.0.0.{n}"))).collect();
    let documents = |names: &str| {
        let spec = format!(
            "{{selectors: [{{podSelector: {{}}}}], addresses: [198.51.100.1], gateways: {{names: [{names}]}}}}"
        );
        let mut documents = vec![
            bgp_pool(),
            service("s", "", 80, &["198.51.100.1"]),
            policy("p", "", "{serviceRef: {name: s}, gateways: {names: [gw-a, gw-b]}}"),
            policy("q", "", &spec),
        ];
        documents.extend(["gw-a", "gw-b", "gw-c"].map(|name| gateway(name, "")));
        [documents, pods.clone()].concat()
    };
    // The policy with the higher precedence defines the owners of the VIP.
    for (names, assigned, count) in [("gw-b", "gw-b", 0), ("gw-b, gw-c", "gw-b", 0), ("gw-c", "", 1)] {
        let (placement, warnings) = placement(&documents(names));
        assert_eq!(owners(&placement)[&ip("198.51.100.1")], ["gw-a", "gw-b"]);
        assert!(
            gateways_of(&placement).values().all(|name| name == assigned),
            "{names}: {:?}",
            gateways_of(&placement)
        );
        assert_eq!(warnings.len(), count, "{warnings:?}");
    }
}

#[test]
fn vips_of_a_policy_are_spread_over_gateways_up_to_max_addresses() {
    let v4 = ["203.0.113.1", "203.0.113.2", "203.0.113.3"];
    let spec = "{selectors: [{podSelector: {}}], addresses: [203.0.113.1, 203.0.113.2, 203.0.113.3, \"2001:db8::1\", \
                \"2001:db8::2\", \"2001:db8::3\"]}";
    let documents = |limit: &str| {
        let gateways = ["gw-a", "gw-b", "gw-c"].map(|name| gateway_with(name, limit));
        let mut documents = gateways.to_vec();
        documents.extend([policy("p", "", spec), pod("a", "x", "", "10.0.0.1"), pod("a", "y", "", "fd00::1")]);
        documents
    };
    for limit in ["zone: z1", "maxAddresses: 2"] {
        let (placement, warnings) = placement(&documents(limit));
        assert_eq!(warnings, [""; 0]);
        let owners = owners(&placement);
        for family in [true, false] {
            let of: BTreeSet<_> = owners.iter().filter(|(vip, _)| vip.is_ipv4() == family).map(|(_, it)| it).collect();
            assert_eq!(of.len(), 3, "each gateway has one of each family: {owners:?}");
        }
    }
    // With a capacity of three VIPs in total, the first three of the list have owners; and a gateway without a VIP of a
    // family has no endpoints of that family.
    let (placement, _) = placement(&documents("maxAddresses: 1"));
    let owners = owners(&placement);
    assert_eq!(owners.len(), 3, "VIPs without an owner are left out: {owners:?}");
    assert_eq!(owners.values().flatten().collect::<BTreeSet<_>>().len(), 3, "each gateway has one");
    for endpoint in &placement.endpoints {
        let of_family: Vec<_> = owners.iter().filter(|(vip, _)| vip.is_ipv4() == endpoint.address.is_ipv4()).collect();
        let name = endpoint.gateway.as_deref().unwrap_or_default();
        assert_eq!(endpoint.vips.len(), of_family.len());
        assert!(of_family.is_empty() || of_family.iter().any(|(_, owners)| owners[0] == name));
    }
    // An endpoint without a gateway with capacity gets a warning.
    let one = |n: usize| service(["s", "t", "u"][n], EGRESS, 80, &[v4[n]]);
    let mut full = vec![gateway_with("gw-a", "maxAddresses: 2"), one(0), one(1), one(2)];
    full.extend(
        ["s", "t", "u"].iter().enumerate().map(|(n, name)| slice(name, &[["10.0.0.1", "10.0.0.2", "10.0.0.3"][n]])),
    );
    let got = compiled(&full);
    assert_eq!(got.set.vips.len(), 2);
    assert_eq!(got.set.endpoints.iter().filter(|endpoint| endpoint.vips.is_empty()).count(), 1);
    let expected = "has no eligible gateway with capacity for its IPv4 VIPs: the traffic of endpoint 10.0.0.";
    assert!(messages(&got)[0].contains(expected));
}

#[test]
fn backups_are_the_other_owners_or_the_other_candidates() {
    let mut documents: Vec<String> =
        ["gw-a", "gw-b", "gw-c", "gw-d", "gw-e"].iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        bgp_pool(),
        service("s", EGRESS, 80, &["198.51.100.1", "203.0.113.1"]),
        pod("a", "x", "", "10.0.0.2"),
        policy(
            "p",
            "",
            "{selectors: [{podSelector: {}}], addresses: [198.51.100.3, 203.0.113.3], gateways: {names: [gw-b, gw-d]}}",
        ),
        policy("q", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.4], gateways: {names: [gw-c]}}"),
    ]);
    let (placement, _) = placement(&documents);
    let orders = |vip: &str| -> Vec<Vec<Arc<str>>> {
        block_orders(&placement, placement.vips.iter().find(|it| it.address == ip(vip)).unwrap())
    };
    let distinct = |orders: Vec<Vec<Arc<str>>>| orders.into_iter().collect::<BTreeSet<_>>();
    for vip in ["198.51.100.1", "203.0.113.1"] {
        for order in orders(vip) {
            assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 1 + MAX_BACKUPS, "{vip}: {order:?}");
        }
    }
    assert_eq!(distinct(orders("198.51.100.1")).len(), 5 * 4 * 3 * 2, "slots of a gateway have different backups");
    let both = [vec!["gw-b".into(), "gw-d".into()], vec!["gw-d".into(), "gw-b".into()]];
    assert_eq!(distinct(orders("198.51.100.3")), both.clone().into());
    assert!(orders("203.0.113.3").len() == 1 && both.contains(&orders("203.0.113.3")[0]));
    // Its policy allows one gateway, so there is no backup.
    assert_eq!(orders("203.0.113.4"), [["gw-c".into()]]);
}

/// Endpoints of both kinds of VIPs are placed by slot, unless no gateway near enough has a distributed VIP.
#[test]
fn endpoints_of_a_policy_with_both_kinds_of_vips_are_placed_by_slots() {
    let documents = |affinity: &str, limit: &str| {
        vec![
            bgp_pool(),
            gateway_with("gw-1", "zone: z1"),
            // At capacity after the first VIP: it has no part of the second one.
            gateway_with("gw-2", &format!("zone: z2{limit}")),
            service("r", OLDER, 80, &["203.0.113.1"]),
            service("s", NEWER, 80, &["198.51.100.1"]),
            policy("o", OLDER, "{serviceRef: {name: r}, gateways: {names: [gw-2]}}"),
            pod("a", "x", "app: x", "10.0.0.1").replace("containers", "nodeName: n2, containers"),
            node("n2", "z2"),
            policy(
                "p",
                NEWER,
                &format!(
                    "{{selectors: [{{podSelector: {{}}}}], addresses: [203.0.113.1, 198.51.100.1], \
                     zoneAffinity: {affinity}}}"
                ),
            ),
        ]
    };
    for (affinity, limit, expected) in [
        ("Require", "", "slot gw-2"),
        ("Require", ", maxAddresses: 1", "gateway gw-2"),
        ("Prefer", ", maxAddresses: 1", "slot gw-1"),
    ] {
        let (placement, warnings) = placement(&documents(affinity, limit));
        assert_eq!(warnings, [""; 0]);
        let endpoints = placement.endpoints.to_vec();
        let [endpoint] = &endpoints[..] else { panic!("one endpoint") };
        let by = if endpoint.slot.is_some() { "slot" } else { "gateway" };
        let got = format!("{by} {}", placement.gateway_of(endpoint).unwrap());
        assert_eq!(got, expected, "{affinity}{limit}: {endpoint:?}");
        assert!(placement.shard_maps.iter().all(|map| !map.orders.is_empty() && !map.orders.contains(&Vec::new())));
    }
}

#[test]
fn missing_and_duplicate_peer_addresses_of_gateways_are_warnings() {
    let without_address = |name: &str| gateway(name, "").replace("peerAddress: ", "node: n");
    assert_eq!(messages(&compiled(&[without_address("gw-a")])), [""; 0], "a standalone gateway needs none");
    let duplicate = gateway("gw-c", "").replace(&format!("192.0.2.{}", b'c'), "192.0.2.98");
    let got = messages(&compiled(&[without_address("gw-a"), gateway("gw-b", ""), duplicate]));
    assert_eq!(
        got,
        [
            "m.yaml:4: spec.peerAddress: warning: is missing: other gateways reach this one only if its configuration \
             sets peer.address",
            "m.yaml:14: spec.peerAddress: warning: 192.0.2.98 is also the address of VipGateway gw-b (m.yaml:6)",
        ]
    );
}
