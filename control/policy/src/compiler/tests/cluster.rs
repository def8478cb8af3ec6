//! Cluster networks: sources, precedence and the effective settings of a gateway.

use vipgate_dataplane::policy::spec::ClusterSpec;

use super::*;

fn node(name: &str, cidrs: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{{cidrs}}}\n")
}

fn cidrs(texts: &[&str]) -> Vec<crate::manifest::Cidr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Effective settings of a gateway with `own` in its configuration.
fn effective(name: &str, own: Cluster, placement: &Placement) -> ClusterSpec {
    policy_for(placement, Some(&GatewayLocality { cluster: own, ..GatewayLocality::named(name) }), "").cluster
}

fn spec(pods: &[&str], others: &[&str], drop_uncovered: bool) -> ClusterSpec {
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    ClusterSpec { pods: nets(pods), others: nets(others), drop_uncovered }
}

#[test]
fn by_default_no_prefix_is_inside_the_cluster() {
    let got = compiled_for("a", &[gateway("a", "")]);
    assert_eq!((got.placement.cluster, got.set.cluster), (None, ClusterSpec::default()));
}

#[test]
fn node_prefixes_are_internal_destinations_but_not_uncovered_sources() {
    let documents = [
        node("n1", "podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, \"fd00:244:1::/64\"]"),
        node("n2", "podCIDRs: [10.244.2.0/24]"),
        node("n3", ""),
    ];
    let got = compiled_for("a", &documents);
    assert_eq!(messages(&got), Vec::<String>::new());
    let expected = spec(&[], &["10.244.1.0/24", "10.244.2.0/24", "fd00:244:1::/64"], false);
    assert_eq!(got.set.cluster, expected);
    for (cidrs, expected) in [
        ("podCIDR: 10.244.1.0", "m.yaml:4: spec.podCIDR: `10.244.1.0` is an address"),
        ("podCIDRs: [10.244.1.0/24, 10.244.1.1/24]", "m.yaml:4: spec.podCIDRs[1]: 10.244.1.1/24 has host bits set"),
        ("podCIDRs: [\"::/0\"]", "m.yaml:4: spec.podCIDRs[0]: ::/0 covers every address"),
    ] {
        let messages = messages(&compiled(&[node("n1", cidrs)]));
        let expected = expected.split_once(": ").unwrap().1;
        assert!(messages.len() == 1 && messages[0].contains(expected), "{messages:?}, not {expected}");
    }
}

#[test]
fn service_prefixes_of_the_cluster_are_internal_destinations() {
    let service_cidr = |cidrs: &str| {
        format!("apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {{name: kubernetes}}\nspec: {cidrs}\n")
    };
    let documents = [service_cidr("{cidrs: [10.96.0.0/12, \"fd00:96::/108\"]}"), node("n1", "podCIDR: 10.244.1.0/24")];
    let got = compiled_for("a", &documents);
    assert_eq!(messages(&got), Vec::<String>::new());
    let expected = spec(&[], &["10.96.0.0/12", "10.244.1.0/24", "fd00:96::/108"], false);
    assert_eq!(got.set.cluster, expected);
    assert_eq!(compiled_for("a", &[service_cidr("{}")]).set.cluster, ClusterSpec::default());
    for (cidrs, expected) in [
        ("{cidrs: [10.96.0.0/12, 10.96.0.1]}", "m.yaml:4: spec.cidrs[1]: `10.96.0.1` is an address"),
        ("{cidrs: [10.96.0.1/12]}", "m.yaml:4: spec.cidrs[0]: 10.96.0.1/12 has host bits set"),
        ("{cidrs: [\"::/0\"]}", "m.yaml:4: spec.cidrs[0]: ::/0 covers every address"),
    ] {
        let got = compiled(&[service_cidr(cidrs)]);
        assert!(messages(&got)[0].starts_with(expected), "{:?}", messages(&got));
        assert!(got.accept().is_err(), "{expected}: must be an error");
    }
}

#[test]
fn prefixes_of_all_sources_are_merged_and_the_most_specific_source_sets_the_uncovered_action() {
    let gateways = [gateway_with("a", "podCIDRs: [10.1.0.0/16], uncovered: pass"), gateway("b", "")];
    let mut placement = compiled(&gateways).placement;
    let server =
        Cluster::from_config(&cidrs(&["10.244.0.0/16"]), &cidrs(&["10.96.0.0/12"]), Some(UncoveredAction::Drop));
    placement.cluster = Some(server);
    let own = |uncovered| Cluster::from_config(&cidrs(&["10.2.0.0/16"]), &[], uncovered);
    let services = ["10.96.0.0/12"];
    for (name, own, expected) in [
        ("a", Cluster::default(), spec(&["10.1.0.0/16", "10.244.0.0/16"], &services, false)),
        ("b", Cluster::default(), spec(&["10.244.0.0/16"], &services, true)),
        ("c", own(Some(UncoveredAction::Pass)), spec(&["10.2.0.0/16", "10.244.0.0/16"], &services, false)),
        (
            "a",
            own(Some(UncoveredAction::Drop)),
            spec(&["10.1.0.0/16", "10.2.0.0/16", "10.244.0.0/16"], &services, true),
        ),
        ("b", own(None), spec(&["10.2.0.0/16", "10.244.0.0/16"], &services, true)),
    ] {
        assert_eq!(effective(name, own, &placement), expected, "{name}");
    }
    // Default action with pod prefixes: drop. Without pod prefixes no traffic is uncovered.
    placement.cluster = None;
    assert_eq!(effective("b", own(None), &placement), spec(&["10.2.0.0/16"], &[], true));
    let none = Cluster { uncovered: Some(UncoveredAction::Drop), ..Cluster::default() };
    assert_eq!(effective("b", none, &placement), ClusterSpec::default());
}

#[test]
fn invalid_cluster_fields_of_a_gateway_are_rejected() {
    for (more, expected) in [
        ("podCIDRs: [10.1.0.0/16, 10.1.0.0/16]", "spec.podCIDRs[1]: 10.1.0.0/16 is a duplicate"),
        ("podCIDRs: [0.0.0.0/0]", "spec.podCIDRs[0]: 0.0.0.0/0 covers every address"),
        ("podCIDRs: [10.1.0.1/16]", "spec.podCIDRs[0]: 10.1.0.1/16 has host bits set"),
        ("uncovered: Dorp", "spec.uncovered: unknown value `Dorp`"),
    ] {
        let messages = messages(&compiled(&[gateway_with("a", more)]));
        assert!(messages.iter().any(|message| message.contains(expected)), "{messages:?}, not {expected}");
    }
}
