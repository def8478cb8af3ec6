//! Whom a gateway may choose, case by case as kube-proxy's own tests have them.

use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use vipgate_dataplane::snapshot::spec::{BackendState, HealthSpec, Scope, ServicePortSpec};

use super::{DealtBackend, DealtService, Viewer};
use crate::manifest::Hints;
use crate::policy::Cluster;

const READY: BackendState = BackendState::Ready;
const ENDING: BackendState = BackendState::Terminating;
const NOT_READY: BackendState = BackendState::NotReady;

/// `10.0.0.{last}`, and where it is.
fn backend(last: u8, state: BackendState, node: &str) -> DealtBackend {
    DealtBackend {
        address: IpAddr::from([10, 0, 0, last]),
        name: format!("a/p{last}").into(),
        ports: [8080].into(),
        weight: 1,
        state,
        node: Some(node.into()),
        zone: None,
        hints: None,
    }
}

fn hinted(last: u8, nodes: &[&str], zones: &[&str]) -> DealtBackend {
    let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
    let hints = Hints { nodes: names(nodes), zones: names(zones) };
    DealtBackend { hints: Some(Arc::new(hints)), ..backend(last, READY, "n9") }
}

fn service(external: Scope, internal: Scope, backends: Vec<DealtBackend>) -> DealtService {
    DealtService {
        name: "Service a/s".into(),
        vips: vec![IpAddr::from([203, 0, 113, 1])],
        ports: vec![ServicePortSpec { name: "".into(), protocol: 6, port: 80 }],
        backends,
        source_ranges: vec![],
        affinity: None,
        table_size: 2039,
        external,
        internal,
        health_port: Some(30_000),
    }
}

fn here() -> Viewer {
    Viewer { name: "g1".into(), node: "n1".into(), zone: "z1".into(), cluster: Cluster::default() }
}

/// The last byte of whom clients outside and pods may be sent to, where the former are served locally.
fn chosen(backends: &[DealtBackend], viewer: &Viewer) -> (Vec<u8>, Vec<u8>) {
    let spec = service(Scope::Local, Scope::Cluster, backends.to_vec()).seen_by(viewer);
    let last = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    };
    let those = |may: fn(&vipgate_dataplane::snapshot::spec::BackendSpec) -> bool| {
        spec.backends.iter().filter(|it| may(it)).map(|it| last(it.address)).collect()
    };
    (those(|it| it.external), those(|it| it.internal))
}

#[test]
fn who_is_ready_is_chosen_and_who_ends_only_without_them() {
    let all = [backend(1, READY, "n1"), backend(2, READY, "n2"), backend(3, ENDING, "n1"), backend(4, NOT_READY, "n1")];
    assert_eq!(chosen(&all, &here()), (vec![1], vec![1, 2]));
    // None is ready on the node: who ends there serves, whatever is elsewhere.
    assert_eq!(chosen(&all[1..], &here()), (vec![3], vec![2]));
    assert_eq!(chosen(&all[2..], &here()), (vec![3], vec![3]));
    assert_eq!(chosen(&all[3..], &here()), (vec![], vec![]));
    assert_eq!(chosen(&all, &Viewer::named("n3")), (vec![], vec![1, 2]));
}

#[test]
fn hints_count_if_all_have_them_and_one_is_meant_for_us() {
    let zones =
        |of: &[&[&str]]| -> Vec<DealtBackend> { (1..).zip(of).map(|(last, zones)| hinted(last, &[], zones)).collect() };
    let pods = |backends: &[DealtBackend], viewer: &Viewer| chosen(backends, viewer).1;
    assert_eq!(pods(&zones(&[&["z1"], &["z2"], &["z1", "z2"]]), &here()), [1, 3]);
    assert_eq!(pods(&zones(&[&["z2"], &["z3"]]), &here()), [1, 2], "none for this zone");
    assert_eq!(pods(&zones(&[&["z1"], &[]]), &here()), [1, 2], "one without");
    assert_eq!(pods(&zones(&[&["z1"], &["z2"]]), &Viewer { zone: "".into(), ..here() }), [1, 2], "no zone");
    // Nodes go before zones.
    let both = [hinted(1, &["n1"], &["z2"]), hinted(2, &["n2"], &["z1"])];
    assert_eq!(pods(&both, &here()), [1]);
    assert_eq!(pods(&both, &Viewer { node: "n3".into(), ..here() }), [2]);
    // Those that take nothing new don't have a say.
    let mut with_others = zones(&[&["z1"], &["z2"]]);
    with_others.extend([backend(3, ENDING, "n1"), backend(4, NOT_READY, "n1")]);
    with_others.push(DealtBackend { weight: 0, ..backend(5, READY, "n1") });
    with_others.push(DealtBackend { ports: [0].into(), ..backend(6, READY, "n1") });
    assert_eq!(pods(&with_others, &here()), [1]);
    // What is on the node is so with or without hints.
    assert_eq!(chosen(&zones(&[&["z2"], &["z2"]]), &Viewer { node: "n9".into(), ..here() }).0, [1, 2]);
}

#[test]
fn each_address_family_is_chosen_by_itself() {
    let v6 = |last: u16, state| DealtBackend {
        address: IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]),
        ..backend(1, state, "n1")
    };
    let all = [backend(1, READY, "n1"), backend(2, ENDING, "n1"), v6(3, ENDING), v6(4, NOT_READY)];
    assert_eq!(chosen(&all, &here()), (vec![1, 3], vec![1, 3]));
}

#[test]
fn a_health_check_counts_pods_on_the_node_once() {
    let count =
        |backends: Vec<DealtBackend>| service(Scope::Local, Scope::Cluster, backends).seen_by(&here()).health.unwrap();
    let at = |address: [u16; 8], of: DealtBackend| DealtBackend { address: address.into(), ..of };
    let got = count(vec![
        backend(1, READY, "n1"),
        backend(2, READY, "n2"),
        backend(3, ENDING, "n1"),
        DealtBackend { weight: 0, ..backend(4, READY, "n1") },
        DealtBackend { name: "".into(), ..backend(5, READY, "n1") },
        DealtBackend { name: "".into(), ..backend(6, READY, "n1") },
        at([0xfd00, 0, 0, 0, 0, 0, 0, 1], backend(1, READY, "n1")),
    ]);
    assert_eq!(got, HealthSpec { port: 30_000, local_endpoints: 3 });
    assert_eq!(count(vec![backend(1, ENDING, "n1")]).local_endpoints, 0, "who ends sends load balancers away");
}

fn any_backend(last: u8) -> impl Strategy<Value = DealtBackend> {
    let state = prop::sample::select(vec![READY, ENDING, NOT_READY]);
    let names = |of: [&'static str; 2]| prop::sample::subsequence(of.to_vec(), 0..=2);
    let node = prop::sample::select(vec!["n1", "n2"]);
    (state, node, names(["n1", "n2"]), names(["z1", "z2"]), 0..3_u16, 0..4_u16).prop_map(
        move |(state, node, nodes, zones, weight, port)| DealtBackend {
            weight,
            state,
            ports: [port].into(),
            node: Some(node.into()),
            hints: hinted(last, &nodes, &zones).hints.filter(|_| !(nodes.is_empty() && zones.is_empty())),
            ..backend(last, state, node)
        },
    )
}

proptest! {
    /// Whatever hints say, nobody is left without an answer who would have had one without them.
    #[test]
    fn while_anybody_can_serve_somebody_is_chosen(
        backends in (any_backend(1), any_backend(2), any_backend(3)).prop_map(|(a, b, c)| vec![a, b, c]),
    ) {
        let (outside, pods) = chosen(&backends, &here());
        let can = |it: &&DealtBackend| it.may_be_chosen() && it.state != NOT_READY;
        prop_assert_eq!(pods.is_empty(), backends.iter().find(can).is_none());
        let is_here = |it: &DealtBackend| it.node.as_deref() == Some("n1");
        prop_assert_eq!(outside.is_empty(), !backends.iter().filter(can).any(is_here));
        for last in outside.iter().chain(&pods) {
            prop_assert!(can(&&backends[usize::from(*last) - 1]));
        }
    }
}
