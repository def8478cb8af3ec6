//! The cluster's own addresses: who says what, and what a gateway goes by.

use vipgate_dataplane::snapshot::spec::ClusterSpec;

use super::*;

fn node(name: &str, cidrs: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{{cidrs}}}\n")
}

fn cidrs(texts: &[&str]) -> Vec<crate::manifest::Cidr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// What a gateway goes by whose own configuration says this.
fn seen_by(name: &str, own: Cluster, deal: &Deal) -> ClusterSpec {
    deal.part_of(Some(&Viewer { cluster: own, ..Viewer::named(name) }), "").cluster
}

fn spec(pods: &[&str], others: &[&str], drop_uncovered: bool) -> ClusterSpec {
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    ClusterSpec { pods: nets(pods), others: nets(others), drop_uncovered }
}

#[test]
fn without_a_word_about_it_nothing_is_inside() {
    let got = compiled_for("a", &[gateway("a", "")]);
    assert_eq!((got.deal.cluster, got.set.cluster), (None, ClusterSpec::default()));
}

#[test]
fn nodes_say_which_destinations_are_inside_and_make_nobody_uncovered() {
    let documents = [
        node("n1", "podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, \"fd00:244:1::/64\"]"),
        node("n2", "podCIDRs: [10.244.2.0/24]"),
        node("n3", ""),
    ];
    let got = compiled_for("a", &documents);
    assert_eq!(said(&got), Vec::<String>::new());
    assert_eq!(got.set.cluster, spec(&[], &["10.244.1.0/24", "10.244.2.0/24", "fd00:244:1::/64"], false));
    for (cidrs, expected) in [
        ("podCIDR: 10.244.1.0", "m.yaml:4: spec.podCIDR: `10.244.1.0` is an address"),
        ("podCIDRs: [10.244.1.0/24, 10.244.1.1/24]", "m.yaml:4: spec.podCIDRs[1]: 10.244.1.1/24 has bits set"),
        ("podCIDRs: [\"::/0\"]", "m.yaml:4: spec.podCIDRs[0]: ::/0 holds every address"),
    ] {
        let said = said(&compiled(&[node("n1", cidrs)]));
        assert!(said.len() == 1 && said[0].contains(expected.split_once(": ").unwrap().1), "{said:?}, not {expected}");
    }
}

#[test]
fn what_is_said_of_pods_counts_together_and_the_nearest_says_what_becomes_of_them() {
    let gateways = [gateway_with("a", "podCIDRs: [10.1.0.0/16], uncovered: pass"), gateway("b", "")];
    let mut deal = compiled(&gateways).deal;
    let server = Cluster::of(&cidrs(&["10.244.0.0/16"]), &cidrs(&["10.96.0.0/12"]), Some(Uncovered::Drop));
    deal.cluster = Some(server);
    let own = |uncovered| Cluster::of(&cidrs(&["10.2.0.0/16"]), &[], uncovered);
    let services = ["10.96.0.0/12"];
    for (name, own, expected) in [
        ("a", Cluster::default(), spec(&["10.1.0.0/16", "10.244.0.0/16"], &services, false)),
        ("b", Cluster::default(), spec(&["10.244.0.0/16"], &services, true)),
        ("c", own(Some(Uncovered::Pass)), spec(&["10.2.0.0/16", "10.244.0.0/16"], &services, false)),
        ("a", own(Some(Uncovered::Drop)), spec(&["10.1.0.0/16", "10.2.0.0/16", "10.244.0.0/16"], &services, true)),
        ("b", own(None), spec(&["10.2.0.0/16", "10.244.0.0/16"], &services, true)),
    ] {
        assert_eq!(seen_by(name, own, &deal), expected, "{name}");
    }
    // Where nobody says what becomes of them, they are dropped; where nobody is a pod, nobody is.
    deal.cluster = None;
    assert_eq!(seen_by("b", own(None), &deal), spec(&["10.2.0.0/16"], &[], true));
    let none = Cluster { uncovered: Some(Uncovered::Drop), ..Cluster::default() };
    assert_eq!(seen_by("b", none, &deal), ClusterSpec::default());
}

#[test]
fn a_gateway_that_contradicts_itself_is_refused() {
    for (more, expected) in [
        ("podCIDRs: [10.1.0.0/16, 10.1.0.0/16]", "spec.podCIDRs[1]: 10.1.0.0/16 is in the list already"),
        ("podCIDRs: [0.0.0.0/0]", "spec.podCIDRs[0]: 0.0.0.0/0 holds every address"),
        ("podCIDRs: [10.1.0.1/16]", "spec.podCIDRs[0]: 10.1.0.1/16 has bits set"),
        ("uncovered: Dorp", "spec.uncovered: unknown value `Dorp`"),
    ] {
        let said = said(&compiled(&[gateway_with("a", more)]));
        assert!(said.iter().any(|said| said.contains(expected)), "{said:?}, not {expected}");
    }
}
