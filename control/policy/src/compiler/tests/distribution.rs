//! Distribution of VIPs and endpoints over gateways: owners, round robin, zone affinity, `maxAddresses` and backups.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

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
    let name = |it: &EndpointSpec| it.gateway.as_deref().unwrap_or_default().to_owned();
    placement.endpoints.iter().map(|it| (it.address, name(it))).collect()
}

/// The owners of each VIP.
fn owners(placement: &Placement) -> BTreeMap<IpAddr, Vec<String>> {
    let names = |vip: &VipSpec| vip.shards.iter().map(|shard| shard.gateway.to_string()).collect();
    placement.vips.iter().map(|vip| (vip.address, names(vip))).collect()
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
fn a_bgp_vip_is_sharded_over_all_candidates_and_an_l2_vip_has_one_owner() {
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
                continue;
            }
        }
        let shards: Vec<_> = spec.shards.iter().map(|shard| shard.blocks.as_deref().unwrap()).collect();
        let count_owners = |block| shards.iter().filter(|blocks| blocks.contains(block)).count();
        assert!((0..).take(BLOCKS).all(|block| count_owners(BlockId(block)) == 1), "{vip}: each block has one owner");
        let mean = BLOCKS / shards.len();
        assert!(
            shards.iter().map(|blocks| blocks.count() as usize).all(|count| (mean / 2..mean * 2).contains(&count)),
            "{vip}"
        );
    }
}

#[test]
fn a_bgp_vip_with_one_candidate_has_one_shard_with_all_blocks() {
    let names_one = policy("p", "", "{serviceRef: {name: s}, gateways: {names: [gw-a]}}");
    let vip = service("s", "", 80, &["198.51.100.1"]);
    let (placement, _) = placement(&[bgp_pool(), gateway("gw-a", ""), gateway("gw-b", ""), vip, names_one]);
    assert_eq!(placement.vips[0].shards, [ShardSpec { gateway: "gw-a".into(), blocks: None, backups: vec![] }]);
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
    assert_eq!((&idle.set.vips, &idle.set.endpoints), (&idle.placement.vips, &idle.placement.endpoints));
    assert_eq!((idle.set.vips.len(), idle.set.endpoints.len(), messages(&idle)), (3, 3, vec![]));
    assert!(gateways_of(&idle.placement).values().all(|name| name == "gw-a" || name == "gw-b"));
    let gateways = |vip: &VipSpec| -> Vec<Arc<str>> {
        let names = |shard: &ShardSpec| [vec![shard.gateway.clone()], shard.backups.clone()].concat();
        vip.shards.iter().flat_map(names).collect()
    };
    assert!(idle.set.vips.iter().all(|vip| !gateways(vip).contains(&"gw-c".into())));
    // For a VIP without a policy every gateway is eligible.
    let mut documents = documents.to_vec();
    documents.push(service("t", "", 80, &["198.51.100.3"]));
    let all = compiled_for("gw-c", &documents).set.vips;
    assert!(gateways(all.iter().find(|vip| vip.address == ip("198.51.100.3")).unwrap()).contains(&"gw-c".into()));
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
    // With a capacity of three VIPs in total, a gateway without a VIP of a family has no endpoints of that family.
    let (placement, _) = placement(&documents("maxAddresses: 1"));
    let owners = owners(&placement);
    assert_eq!(owners.len(), 3, "VIPs without an owner are left out: {owners:?}");
    assert_eq!(owners.values().flatten().collect::<BTreeSet<_>>().len(), 3, "each gateway has one");
    for endpoint in &placement.endpoints {
        let of_family: Vec<_> = owners.iter().filter(|(vip, _)| vip.is_ipv4() == endpoint.address.is_ipv4()).collect();
        let name = endpoint.gateway.as_deref().unwrap_or_default();
        assert_eq!(endpoint.vips.len(), usize::from(!of_family.is_empty()));
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
fn backups_of_a_shard_are_the_other_owners_or_the_other_candidates() {
    let mut documents: Vec<String> =
        ["gw-a", "gw-b", "gw-c", "gw-d", "gw-e"].iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        bgp_pool(),
        service("s", EGRESS, 80, &["198.51.100.1", "198.51.100.2", "203.0.113.1"]),
        pod("a", "x", "", "10.0.0.2"),
        policy(
            "p",
            "",
            "{selectors: [{podSelector: {}}], addresses: [198.51.100.3, 203.0.113.3], gateways: {names: [gw-b, gw-d]}}",
        ),
        policy("q", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.4], gateways: {names: [gw-c]}}"),
    ]);
    let (placement, _) = placement(&documents);
    let shards = |vip: &str| &placement.vips.iter().find(|it| it.address == ip(vip)).unwrap().shards;
    for (one, other) in shards("198.51.100.1").iter().zip(shards("198.51.100.2")) {
        assert_eq!((&one.gateway, &one.backups), (&other.gateway, &other.backups), "of one Service");
        assert_eq!(one.backups.len(), MAX_BACKUPS);
    }
    let [single] = &shards("203.0.113.1")[..] else { panic!("one owner") };
    let same_home = shards("198.51.100.1").iter().find(|shard| shard.gateway == single.gateway).unwrap();
    assert_eq!(single.backups, same_home.backups, "the same backups with either announce mode");
    let order = |vip: &str| -> Vec<Vec<Arc<str>>> {
        shards(vip).iter().map(|shard| [vec![shard.gateway.clone()], shard.backups.clone()].concat()).collect()
    };
    assert_eq!(order("198.51.100.3"), [["gw-b".into(), "gw-d".into()], ["gw-d".into(), "gw-b".into()]]);
    let mut both = order("203.0.113.3").concat();
    both.sort_unstable();
    assert_eq!(both, ["gw-b".into(), "gw-d".into()]);
    // Its policy allows one gateway, so there is no backup.
    assert_eq!(order("203.0.113.4"), [["gw-c".into()]]);
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
            "m.yaml:14: spec.peerAddress: warning: 192.0.2.98 is also the address of Gateway gw-b (m.yaml:6)",
        ]
    );
}
