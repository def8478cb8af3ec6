//! VIPs and endpoints over gateways: who holds which, who translates whom, and what moves when something comes.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

fn node(name: &str, zone: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{topology.kubernetes.io/zone: {zone}}}}}\n")
}

/// The endpoint slice of Service `a/{service}`; each address with what else is known of its endpoint.
fn slice_with(service: &str, endpoints: &[(String, &str)]) -> String {
    let endpoints = endpoints.iter().map(|(address, more)| format!("{{addresses: [\"{address}\"]{more}}}"));
    let listed: Vec<String> = endpoints.collect();
    let form = slice(service, &["10.0.0.0"]);
    let (head, _) = form.split_once("endpoints: ").unwrap();
    format!("{head}endpoints: [{}]\n", listed.join(", "))
}

/// Announced by every gateway: 198.51.100.0/24 and 2001:db8:100::/64.
fn routed() -> String {
    pool("routed", "{ranges: [198.51.100.0/24, \"2001:db8:100::/64\"], announce: BGP}")
}

fn deal(documents: &[String]) -> (Deal, Vec<String>) {
    let got = compiled(documents);
    let said = said(&got);
    (got.accept().unwrap().0, said)
}

/// The gateway of each endpoint; empty where there is none.
fn gateways_of(deal: &Deal) -> BTreeMap<IpAddr, String> {
    let name = |it: &EndpointSpec| it.gateway.as_deref().unwrap_or_default().to_owned();
    deal.endpoints.iter().map(|it| (it.address, name(it))).collect()
}

/// The holders of each VIP.
fn holders(deal: &Deal) -> BTreeMap<IpAddr, Vec<String>> {
    let names = |vip: &VipSpec| vip.shares.iter().map(|share| share.gateway.to_string()).collect();
    deal.vips.iter().map(|vip| (vip.address, names(vip))).collect()
}

#[test]
fn round_robin_is_sorted_endpoints_over_sorted_gateways() {
    let v4: Vec<String> = (1..=7).map(|n| format!("10.0.0.{}", n * 3)).collect();
    let v6: Vec<String> = (1..=4).map(|n| format!("fd00::{n}")).collect();
    let mut backwards: Vec<&str> = v4.iter().map(String::as_str).collect();
    backwards.reverse();
    let (deal, said) = deal(&[
        routed(),
        gateway("gw-c", ""),
        gateway("gw-a", ""),
        gateway("gw-b", ""),
        service("s", "", 80, &["198.51.100.1", "2001:db8:100::1"]),
        slice("s", &backwards),
        slice("s", &v6.iter().map(String::as_str).collect::<Vec<_>>()),
        policy("p", "", "{serviceRef: {name: s}, distribution: RoundRobin}"),
    ]);
    assert_eq!(said, [""; 0]);
    let names = ["gw-a", "gw-b", "gw-c"];
    let expected = |addresses: &[String]| -> Vec<_> {
        addresses.iter().zip(names.iter().cycle()).map(|(address, name)| (ip(address), (*name).to_owned())).collect()
    };
    assert_eq!(gateways_of(&deal), expected(&v4).into_iter().chain(expected(&v6)).collect());
}

#[test]
fn round_robin_takes_turns_within_each_zone() {
    // Every second endpoint is in the other zone: one count for both would leave out every second gateway.
    let zone = |n: u8| if n.is_multiple_of(2) { ", zone: z2" } else { ", zone: z1" };
    let endpoints: Vec<_> = (1..=8).map(|n| (format!("10.0.0.{n}"), zone(n))).collect();
    let zones = [("gw-a", "zone: z1"), ("gw-b", "zone: z1"), ("gw-c", "zone: z2"), ("gw-d", "zone: z2")];
    let mut documents: Vec<String> = zones.iter().map(|(name, spec)| gateway_with(name, spec)).collect();
    documents.extend([
        routed(),
        service("s", "", 80, &["198.51.100.1"]),
        slice_with("s", &endpoints),
        policy("p", "", "{serviceRef: {name: s}, distribution: RoundRobin, zoneAffinity: Prefer}"),
    ]);
    let (deal, said) = deal(&documents);
    assert_eq!(said, [""; 0]);
    let got: Vec<String> = gateways_of(&deal).into_values().collect();
    assert_eq!(got, ["gw-a", "gw-c", "gw-b", "gw-d", "gw-a", "gw-c", "gw-b", "gw-d"]);
}

#[test]
fn an_endpoint_has_the_gateway_of_its_node_then_one_of_its_zone() {
    let everybody = ["gw-1", "gw-2", "gw-3"];
    // What is known of an endpoint, and who may be its gateway where zones are preferred and required.
    let cases: [(&str, &[&str], &[&str]); 8] = [
        (", nodeName: n1", &["gw-1"], &["gw-1"]),
        (", nodeName: n1, zone: z1", &["gw-1"], &["gw-1"]),
        (", nodeName: n4", &["gw-3"], &["gw-3"]),
        (", zone: z1", &["gw-1", "gw-2"], &["gw-1", "gw-2"]),
        // What the slice says of the zone counts.
        (", nodeName: n4, zone: z1", &["gw-1", "gw-2"], &["gw-1", "gw-2"]),
        (", nodeName: n5", &everybody, &[""]),
        ("", &everybody, &[""]),
        // Nothing in the slice: where the pod is.
        ("", &["gw-3"], &["gw-3"]),
    ];
    let endpoints: Vec<_> = cases.iter().enumerate().map(|(n, (known, ..))| (format!("10.0.0.{n}"), *known)).collect();
    for (affinity, required) in [("Prefer", false), ("Require", true)] {
        let (deal, said) = deal(&[
            routed(),
            gateway_with("gw-1", "zone: z1, node: n1"),
            // Its zone is that of its node.
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
        let got = gateways_of(&deal);
        for ((address, known), (_, preferred, must)) in endpoints.iter().zip(cases) {
            let among = if required { must } else { preferred };
            assert!(among.contains(&got[&ip(address)].as_str()), "{affinity}: {address}{known} has {got:?}");
        }
        assert_eq!(got[&ip("10.0.1.1")], "gw-1", "a pod that a selector selects");
        let closed: Vec<_> = deal.endpoints.iter().filter(|it| it.vips.is_empty()).collect();
        let expected = "spec.zoneAffinity: warning: EgressPolicy a/p requires a gateway in the zone of each endpoint: \
                        the traffic of 2 endpoints (the first is 10.0.0.5) is dropped";
        assert_eq!((closed.len(), said.len()), if required { (2, 1) } else { (0, 0) }, "{said:?}");
        assert!(!required || said[0].ends_with(expected), "{said:?}");
    }
}

#[test]
fn a_routed_vip_is_shared_by_all_candidates_and_another_has_one_holder() {
    let mut documents: Vec<String> = ["gw-a", "gw-b", "gw-c", "gw-d"].iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        routed(),
        service("s", EGRESS, 80, &["198.51.100.1", "203.0.113.1"]),
        slice("s", &["10.0.0.1"]),
        pod("a", "x", "", "10.0.0.2"),
        policy(
            "p",
            "",
            "{selectors: [{podSelector: {}}], addresses: [198.51.100.2, 198.51.100.3], gateways: {names: [gw-b, gw-d]}}",
        ),
    ]);
    let (deal, said) = deal(&documents);
    assert_eq!(said, [""; 0]);
    for (vip, names) in holders(&deal) {
        let dealt = deal.vips.iter().find(|dealt| dealt.address == vip).unwrap();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        match vip.to_string().as_str() {
            "198.51.100.1" => assert_eq!(names, ["gw-a", "gw-b", "gw-c", "gw-d"]),
            "198.51.100.2" | "198.51.100.3" => assert_eq!(names, ["gw-b", "gw-d"]),
            _ => {
                assert!(names.len() == 1 && dealt.shares[0].blocks.is_none(), "{vip}: {names:?}");
                continue;
            }
        }
        let shares: Vec<_> = dealt.shares.iter().map(|share| share.blocks.as_deref().unwrap()).collect();
        let owners = |block| shares.iter().filter(|blocks| blocks.contains(block)).count();
        assert!((0..).take(BLOCKS).all(|block| owners(BlockId(block)) == 1), "{vip}: each block has one owner");
        let fair = BLOCKS / shares.len();
        assert!(
            shares.iter().map(|blocks| blocks.count() as usize).all(|count| (fair / 2..fair * 2).contains(&count)),
            "{vip}"
        );
    }
}

#[test]
fn a_routed_vip_of_one_candidate_is_all_its_own() {
    let names_one = policy("p", "", "{serviceRef: {name: s}, gateways: {names: [gw-a]}}");
    let vip = service("s", "", 80, &["198.51.100.1"]);
    let (deal, _) = deal(&[routed(), gateway("gw-a", ""), gateway("gw-b", ""), vip, names_one]);
    assert_eq!(deal.vips[0].shares, [ShareSpec { gateway: "gw-a".into(), blocks: None, backups: vec![] }]);
}

#[test]
fn who_is_in_no_policy_knows_it_all_and_has_nothing() {
    let documents = [
        routed(),
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
    assert_eq!((&idle.set.vips, &idle.set.endpoints), (&idle.deal.vips, &idle.deal.endpoints));
    assert_eq!((idle.set.vips.len(), idle.set.endpoints.len(), said(&idle)), (3, 3, vec![]));
    assert!(gateways_of(&idle.deal).values().all(|name| name == "gw-a" || name == "gw-b"));
    let serving = |vip: &VipSpec| -> Vec<Arc<str>> {
        let names = |share: &ShareSpec| [vec![share.gateway.clone()], share.backups.clone()].concat();
        vip.shares.iter().flat_map(names).collect()
    };
    assert!(idle.set.vips.iter().all(|vip| !serving(vip).contains(&"gw-c".into())));
    // A VIP that no policy speaks of is any gateway's.
    let mut documents = documents.to_vec();
    documents.push(service("t", "", 80, &["198.51.100.3"]));
    let all = compiled_for("gw-c", &documents).set.vips;
    assert!(serving(all.iter().find(|vip| vip.address == ip("198.51.100.3")).unwrap()).contains(&"gw-c".into()));
}

#[test]
fn a_policy_is_served_by_its_own_gateways_also_where_others_hold_its_vip() {
    let pods: Vec<String> = (1..=20).map(|n| pod("a", &format!("x{n}"), "", &format!("10.0.0.{n}"))).collect();
    let documents = |names: &str| {
        let spec = format!(
            "{{selectors: [{{podSelector: {{}}}}], addresses: [198.51.100.1], gateways: {{names: [{names}]}}}}"
        );
        let mut documents = vec![
            routed(),
            service("s", "", 80, &["198.51.100.1"]),
            policy("p", "", "{serviceRef: {name: s}, gateways: {names: [gw-a, gw-b]}}"),
            policy("q", "", &spec),
        ];
        documents.extend(["gw-a", "gw-b", "gw-c"].map(|name| gateway(name, "")));
        [documents, pods.clone()].concat()
    };
    // Who holds a VIP is said by the stronger policy.
    for (names, serving, complaints) in [("gw-b", "gw-b", 0), ("gw-b, gw-c", "gw-b", 0), ("gw-c", "", 1)] {
        let (deal, said) = deal(&documents(names));
        assert_eq!(holders(&deal)[&ip("198.51.100.1")], ["gw-a", "gw-b"]);
        assert!(gateways_of(&deal).values().all(|name| name == serving), "{names}: {:?}", gateways_of(&deal));
        assert_eq!(said.len(), complaints, "{said:?}");
    }
}

#[test]
fn vips_of_a_policy_keep_apart_and_none_is_held_beyond_the_limit() {
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
        let (deal, said) = deal(&documents(limit));
        assert_eq!(said, [""; 0]);
        let holders = holders(&deal);
        for family in [true, false] {
            let of: BTreeSet<_> = holders.iter().filter(|(vip, _)| vip.is_ipv4() == family).map(|(_, it)| it).collect();
            assert_eq!(of.len(), 3, "each has one of each family: {holders:?}");
        }
    }
    // With room for three in all, whoever has none of a family serves nobody of that family.
    let (deal, _) = deal(&documents("maxAddresses: 1"));
    let holders = holders(&deal);
    assert_eq!(holders.len(), 3, "those that nobody can hold are left out: {holders:?}");
    assert_eq!(holders.values().flatten().collect::<BTreeSet<_>>().len(), 3, "each has one");
    for endpoint in &deal.endpoints {
        let of_family: Vec<_> = holders.iter().filter(|(vip, _)| vip.is_ipv4() == endpoint.address.is_ipv4()).collect();
        let name = endpoint.gateway.as_deref().unwrap_or_default();
        assert_eq!(endpoint.vips.len(), usize::from(!of_family.is_empty()));
        assert!(of_family.is_empty() || of_family.iter().any(|(_, holders)| holders[0] == name));
    }
    // And where nobody has room at all, that is said.
    let one = |n: usize| service(["s", "t", "u"][n], EGRESS, 80, &[v4[n]]);
    let mut full = vec![gateway_with("gw-a", "maxAddresses: 2"), one(0), one(1), one(2)];
    full.extend(
        ["s", "t", "u"].iter().enumerate().map(|(n, name)| slice(name, &[["10.0.0.1", "10.0.0.2", "10.0.0.3"][n]])),
    );
    let got = compiled(&full);
    assert_eq!(got.set.vips.len(), 2);
    assert_eq!(got.set.endpoints.iter().filter(|endpoint| endpoint.vips.is_empty()).count(), 1);
    assert!(
        said(&got)[0].contains("has no gateway with room that may hold its IPv4 VIPs: the traffic of endpoint 10.0.0.")
    );
}

#[test]
fn shares_stand_in_for_each_other_and_a_single_holder_has_other_candidates() {
    let mut documents: Vec<String> =
        ["gw-a", "gw-b", "gw-c", "gw-d", "gw-e"].iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        routed(),
        service("s", EGRESS, 80, &["198.51.100.1", "198.51.100.2", "203.0.113.1"]),
        pod("a", "x", "", "10.0.0.2"),
        policy(
            "p",
            "",
            "{selectors: [{podSelector: {}}], addresses: [198.51.100.3, 203.0.113.3], gateways: {names: [gw-b, gw-d]}}",
        ),
        policy("q", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.4], gateways: {names: [gw-c]}}"),
    ]);
    let (deal, _) = deal(&documents);
    let shares = |vip: &str| &deal.vips.iter().find(|it| it.address == ip(vip)).unwrap().shares;
    for (one, other) in shares("198.51.100.1").iter().zip(shares("198.51.100.2")) {
        assert_eq!((&one.gateway, &one.backups), (&other.gateway, &other.backups), "of one Service");
        assert_eq!(one.backups.len(), MOST_BACKUPS);
    }
    let [single] = &shares("203.0.113.1")[..] else { panic!("one holder") };
    let same = shares("198.51.100.1").iter().find(|share| share.gateway == single.gateway).unwrap();
    assert_eq!(single.backups, same.backups, "its VIPs go to one place, however they are announced");
    let order = |vip: &str| -> Vec<Vec<Arc<str>>> {
        shares(vip).iter().map(|share| [vec![share.gateway.clone()], share.backups.clone()].concat()).collect()
    };
    assert_eq!(order("198.51.100.3"), [["gw-b".into(), "gw-d".into()], ["gw-d".into(), "gw-b".into()]]);
    let mut both = order("203.0.113.3").concat();
    both.sort_unstable();
    assert_eq!(both, ["gw-b".into(), "gw-d".into()]);
    // Nobody else may hold it: that is what its policy says.
    assert_eq!(order("203.0.113.4"), [["gw-c".into()]]);
}

#[test]
fn gateways_that_others_can_not_find_are_complained_about() {
    let lonely = |name: &str| gateway(name, "").replace("peerAddress: ", "node: n");
    assert_eq!(said(&compiled(&[lonely("gw-a")])), [""; 0], "nobody looks for it");
    let same = gateway("gw-c", "").replace(&format!("192.0.2.{}", b'c'), "192.0.2.98");
    let got = said(&compiled(&[lonely("gw-a"), gateway("gw-b", ""), same]));
    assert_eq!(
        got,
        [
            "m.yaml:4: spec.peerAddress: warning: is missing: other gateways find this one only if its own configuration \
             says where (peer.address)",
            "m.yaml:14: spec.peerAddress: warning: 192.0.2.98 is that of Gateway gw-b (m.yaml:6) too",
        ]
    );
}
