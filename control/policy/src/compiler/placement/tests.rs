//! Eligible backends of a gateway; the cases follow kube-proxy's tests.

use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use vipgate_dataplane::policy::spec::{BackendSpec, BackendState, HealthSpec, Scope, ServicePortSpec};

use super::{GatewayLocality, PlacedBackend, PlacedService, local_states};
use crate::compiler::Cluster;
use crate::manifest::{Family, Hints};

const READY: BackendState = BackendState::Ready;
const TERMINATING: BackendState = BackendState::Terminating;
const NOT_READY: BackendState = BackendState::NotReady;

/// Backend `10.0.0.{last}` on a node.
fn backend(last: u8, state: BackendState, node: &str) -> PlacedBackend {
    PlacedBackend {
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

fn hinted(last: u8, nodes: &[&str], zones: &[&str]) -> PlacedBackend {
    let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
    let hints = Hints { nodes: names(nodes), zones: names(zones) };
    PlacedBackend { hints: Some(Arc::new(hints)), ..backend(last, READY, "n9") }
}

fn service(external: Scope, internal: Scope, backends: Vec<PlacedBackend>) -> PlacedService {
    PlacedService {
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

fn local() -> GatewayLocality {
    GatewayLocality { name: "g1".into(), node: "n1".into(), zone: "z1".into(), cluster: Cluster::default() }
}

/// The last bytes of the eligible backends, for external clients (`Local`) and for pods (`Cluster`).
fn eligible(backends: &[PlacedBackend], gateway: &GatewayLocality) -> (Vec<u8>, Vec<u8>) {
    let spec = service(Scope::Local, Scope::Cluster, backends.to_vec()).for_gateway(gateway);
    let last = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    };
    let filtered = |is_eligible: fn(&BackendSpec) -> bool| {
        spec.backends.iter().filter(|it| is_eligible(it)).map(|it| last(it.address)).collect()
    };
    (filtered(|it| it.external), filtered(|it| it.internal))
}

#[test]
fn terminating_backends_are_eligible_only_if_none_is_ready() {
    let all =
        [backend(1, READY, "n1"), backend(2, READY, "n2"), backend(3, TERMINATING, "n1"), backend(4, NOT_READY, "n1")];
    assert_eq!(eligible(&all, &local()), (vec![1], vec![1, 2]));
    // `Local` without a ready backend on the node: terminating ones on the node, whatever is on other nodes.
    assert_eq!(eligible(&all[1..], &local()), (vec![3], vec![2]));
    assert_eq!(eligible(&all[2..], &local()), (vec![3], vec![3]));
    assert_eq!(eligible(&all[3..], &local()), (vec![], vec![]));
    assert_eq!(eligible(&all, &GatewayLocality::named("n3")), (vec![], vec![1, 2]));
}

#[test]
fn hints_apply_only_if_all_backends_have_them_and_one_matches() {
    let zones = |of: &[&[&str]]| -> Vec<PlacedBackend> {
        (1..).zip(of).map(|(last, zones)| hinted(last, &[], zones)).collect()
    };
    let pods = |backends: &[PlacedBackend], gateway: &GatewayLocality| eligible(backends, gateway).1;
    assert_eq!(pods(&zones(&[&["z1"], &["z2"], &["z1", "z2"]]), &local()), [1, 3]);
    assert_eq!(pods(&zones(&[&["z2"], &["z3"]]), &local()), [1, 2], "no hint for this zone");
    assert_eq!(pods(&zones(&[&["z1"], &[]]), &local()), [1, 2], "one without hints");
    assert_eq!(
        pods(&zones(&[&["z1"], &["z2"]]), &GatewayLocality { zone: "".into(), ..local() }),
        [1, 2],
        "gateway without a zone"
    );
    // Node hints take precedence over zone hints.
    let both = [hinted(1, &["n1"], &["z2"]), hinted(2, &["n2"], &["z1"])];
    assert_eq!(pods(&both, &local()), [1]);
    assert_eq!(pods(&both, &GatewayLocality { node: "n3".into(), ..local() }), [2]);
    // Backends that get no new sessions don't count.
    let mut with_others = zones(&[&["z1"], &["z2"]]);
    with_others.extend([backend(3, TERMINATING, "n1"), backend(4, NOT_READY, "n1")]);
    with_others.push(PlacedBackend { weight: 0, ..backend(5, READY, "n1") });
    with_others.push(PlacedBackend { ports: [0].into(), ..backend(6, READY, "n1") });
    assert_eq!(pods(&with_others, &local()), [1]);
    // `Local` ignores hints.
    assert_eq!(eligible(&zones(&[&["z2"], &["z2"]]), &GatewayLocality { node: "n9".into(), ..local() }).0, [1, 2]);
}

#[test]
fn each_address_family_is_evaluated_separately() {
    let v6 = |last: u16, state| PlacedBackend {
        address: IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]),
        ..backend(1, state, "n1")
    };
    let all = [backend(1, READY, "n1"), backend(2, TERMINATING, "n1"), v6(3, TERMINATING), v6(4, NOT_READY)];
    assert_eq!(eligible(&all, &local()), (vec![1, 3], vec![1, 3]));
}

#[test]
fn backends_of_one_address_are_eligible_each_by_itself() {
    let at_port = |port: u16, state, node| PlacedBackend { ports: [port].into(), ..backend(1, state, node) };
    let all = [at_port(8080, NOT_READY, "n1"), at_port(8081, READY, "n2"), at_port(8082, TERMINATING, "n1")];
    let spec = service(Scope::Local, Scope::Cluster, all.to_vec()).for_gateway(&local());
    let eligible = |it: &BackendSpec| (it.ports[0], it.external, it.internal);
    let expected = [(8080, false, false), (8081, false, true), (8082, true, false)];
    assert_eq!(spec.backends.iter().map(eligible).collect::<Vec<_>>(), expected);
}

#[test]
fn a_health_check_counts_each_address_on_the_node_once() {
    let count = |backends: Vec<PlacedBackend>| {
        service(Scope::Local, Scope::Cluster, backends).for_gateway(&local()).health.unwrap()
    };
    let at = |address: [u16; 8], of: PlacedBackend| PlacedBackend { address: address.into(), ..of };
    let got = count(vec![
        backend(1, READY, "n1"),
        backend(2, READY, "n2"),
        backend(3, TERMINATING, "n1"),
        PlacedBackend { weight: 0, ..backend(4, READY, "n1") },
        PlacedBackend { name: "".into(), ..backend(5, READY, "n1") },
        PlacedBackend { name: "".into(), ..backend(6, READY, "n1") },
        at([0xfd00, 0, 0, 0, 0, 0, 0, 1], backend(1, READY, "n1")),
        // As for kube-proxy, two ports of one address are one endpoint.
        PlacedBackend { ports: [8081].into(), name: "a/p9".into(), ..backend(6, READY, "n1") },
    ]);
    assert_eq!(got, HealthSpec { port: 30_000, local_endpoints: 3 });
    assert_eq!(
        count(vec![backend(1, TERMINATING, "n1")]).local_endpoints,
        0,
        "a terminating pod fails the health check"
    );
}

fn any_backend(last: u8) -> impl Strategy<Value = PlacedBackend> {
    let state = prop::sample::select(vec![READY, TERMINATING, NOT_READY]);
    let names = |of: [&'static str; 2]| prop::sample::subsequence(of.to_vec(), 0..=2);
    let node = prop::sample::select(vec!["n1", "n2"]);
    (state, node, names(["n1", "n2"]), names(["z1", "z2"]), 0..3_u16, 0..4_u16).prop_map(
        move |(state, node, nodes, zones, weight, port)| PlacedBackend {
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
    /// Hints never leave clients without a backend.
    #[test]
    fn a_backend_is_eligible_while_one_is_usable(
        backends in (any_backend(1), any_backend(2), any_backend(3)).prop_map(|(a, b, c)| vec![a, b, c]),
    ) {
        let (external, pods) = eligible(&backends, &local());
        let is_usable = |it: &&PlacedBackend| it.accepts_sessions() && it.state != NOT_READY;
        prop_assert_eq!(pods.is_empty(), backends.iter().find(is_usable).is_none());
        let is_local = |it: &PlacedBackend| it.node.as_deref() == Some("n1");
        prop_assert_eq!(external.is_empty(), !backends.iter().filter(is_usable).any(is_local));
        // Owners of VIPs are chosen by what their clients get.
        let states = local_states(&backends, Family::V4);
        prop_assert_eq!(external.is_empty(), states.get("n1").is_none_or(|state| *state == NOT_READY));
        prop_assert!(external.iter().all(|last| Some(&backends[usize::from(*last) - 1].state) == states.get("n1")));
        for last in external.iter().chain(&pods) {
            prop_assert!(is_usable(&&backends[usize::from(*last) - 1]));
        }
    }
}
