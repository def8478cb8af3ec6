//! Incremental compilation: after any sequence of changes the result equals that of a new compiler.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};

use super::any_node::{any_node, count_nodes};
use super::determinism::random_document;
use super::*;
use crate::diagnostic::Code;
use crate::manifest::{Body, Kind};

const GATEWAYS: [&str; 4] = ["gw-1", "gw-2", "gw-3", "gw-4"];

/// Fields of a pool: the namespaces that may have its addresses.
const NAMESPACES: [&str; 4] =
    ["", "", ", namespaces: {matchLabels: {team: x}}", ", namespaces: {matchLabels: {kubernetes.io/metadata.name: b}}"];

/// A document of a kind that concerns others.
fn shared_document() -> impl Strategy<Value = String> {
    let specs = vec!["", "zone: z1", "zone: z2", "node: n1", "node: n2", "maxAddresses: 1", "maxAddresses: 3"];
    let labels = prop::sample::select(vec!["labels: {}", "labels: {tier: gold}"]);
    let gateways = (prop::sample::select(GATEWAYS.to_vec()), prop::sample::select(specs), labels)
        .prop_map(|(name, spec, labels)| gateway_with(name, spec).replace("{, ", "{").replace("labels: {}", labels));
    let namespaces = (prop::sample::select(vec!["a", "b"]), prop::bool::ANY)
        .prop_map(|(name, labelled)| namespace(name, if labelled { "team: x" } else { "" }));
    let overlay = (prop::sample::select(vec!["o1", "o2"]), 1_u8..3).prop_map(|(name, last)| {
        format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: OverlayNode\nmetadata: {{name: {name}}}\n\
             spec: {{address: 192.0.2.{last}, vni: 7, mac: \"02:00:00:00:00:0{last}\", podCIDRs: [10.{last}.0.0/24]}}\n"
        )
    });
    let announce = prop::sample::select(vec!["L2", "BGP"]);
    let pools =
        (prop::sample::select(vec!["public", "other"]), 2_u8..6, announce, prop::sample::select(NAMESPACES.to_vec()))
            .prop_map(|(name, last, announce, of)| {
                pool(name, &format!("{{ranges: [203.0.113.2-203.0.113.{last}], announce: {announce}{of}}}"))
            });
    let service_cidrs = prop::sample::select(vec!["10.96.0.0/12", "10.97.0.0/16", "10.96.0.1/12"]).prop_map(|cidr| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {{name: c}}\nspec: {{cidrs: [{cidr}]}}\n"
        )
    });
    prop_oneof![3 => gateways, 2 => any_node(), 2 => namespaces, 1 => overlay, 2 => pools, 1 => service_cidrs].boxed()
}

/// A slice whose addresses may be VIPs by mistake, and those of other Services.
fn overlapping_slice() -> impl Strategy<Value = String> {
    let all = vec!["10.0.0.1", "10.0.0.2", "10.0.0.3", "203.0.113.1", "203.0.113.3"];
    (prop::sample::select(vec!["s", "t", "u"]), prop::sample::subsequence(all, 1..4))
        .prop_map(|(of, addresses)| slice(of, &addresses))
}

/// A slice that keeps its name and gets the endpoints of another Service.
fn relabeled_slice() -> impl Strategy<Value = String> {
    (prop::sample::select(vec!["s", "t"]), prop::sample::select(vec!["s", "t", "u"])).prop_map(|(name, of)| {
        let label = |service: &str| format!("kubernetes.io/service-name: {service}}}");
        slice(name, &["10.0.0.1", "10.0.0.3"]).replace(&label(name), &label(of))
    })
}

/// A Service with L2 VIPs whose owners have local backends, or its slice.
fn local_document() -> impl Strategy<Value = String> {
    let select = prop::sample::select;
    let policies = vec!["Local", "Local", "Local", "Cluster"];
    let services = (select(policies), prop::bool::ANY).prop_map(|(policy, egress)| local_service(policy, egress));
    let places = vec![", nodeName: n1", ", nodeName: n2", ", nodeName: n3", ""];
    let states =
        vec!["", "", ", conditions: {ready: false}", ", conditions: {ready: false, serving: true, terminating: true}"];
    let addresses = vec!["10.0.0.7", "fd00::7", "203.0.113.1"];
    let slices = (select(addresses), select(places), select(states))
        .prop_map(|(address, place, state)| local_slice(address, &format!("{place}{state}")));
    prop_oneof![1 => services, 3 => slices]
}

fn local_service(policy: &str, egress: bool) -> String {
    service("l", if egress { EGRESS } else { "" }, 82, &["198.51.100.7", "2001:db8:7::7"])
        .replace("LoadBalancer,", &format!("LoadBalancer, externalTrafficPolicy: {policy},"))
}

/// The slice of that Service, with an endpoint that has these fields.
fn local_slice(address: &str, fields: &str) -> String {
    slice("l", &[address]).replace("], targetRef", &format!("]{fields}, targetRef"))
}

/// Gateways, and policies whose VIPs and endpoints are placed on them by shard maps; and L2 VIPs that follow their
/// backend.
fn first_documents() -> Vec<String> {
    let at =
        |document: String, node: &str| document.replace("], targetRef", &format!("], nodeName: {node}, targetRef"));
    vec![
        gateway_with("gw-1", "zone: z1"),
        gateway_with("gw-2", "node: n1"),
        gateway_with("gw-3", "zone: z2").replace("labels: {}", "labels: {tier: gold}"),
        pool("public", "{ranges: [203.0.113.1-203.0.113.4, \"2001:db8::/120\"], announce: BGP}"),
        "apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}}\n".to_owned(),
        "apiVersion: v1\nkind: Node\nmetadata: {name: n2, labels: {topology.kubernetes.io/zone: z2}}\n".to_owned(),
        service("s", "", 80, &["203.0.113.1", "2001:db8::1"]),
        at(slice("s", &["10.0.0.1", "10.0.0.2"]), "n1"),
        at(slice("s", &["10.0.0.3"]), "n2"),
        policy("p", "", "{serviceRef: {name: s}, zoneAffinity: Prefer}"),
        pod("a", "x", "app: web", "10.0.0.4").replace("containers", "nodeName: n2, containers"),
        policy("r", "", "{selectors: [{podSelector: {}}], addresses: [203.0.113.2], zoneAffinity: Require}"),
        gateway_with("gw-4", "node: n2"),
        local_service("Local", true),
        local_slice("10.0.0.7", ", nodeName: n1"),
    ]
}

/// A policy that selects gateways, by itself and for each endpoint.
fn placing_policy() -> impl Strategy<Value = String> {
    let endpoints = vec![
        "serviceRef: {name: s}",
        "serviceRef: {name: t}",
        "selectors: [{podSelector: {}}], addresses: [203.0.113.1]",
        "selectors: [{podSelector: {matchLabels: {app: web}}}], addresses: [203.0.113.4, 203.0.113.9, \"2001:db8::2\"]",
        "selectors: [{podSelector: {matchLabels: {app: db}}}], pools: [{name: public, count: 2}]",
    ];
    let distribution = vec!["", ", distribution: RoundRobin"];
    let affinity = vec!["", ", zoneAffinity: Prefer", ", zoneAffinity: Require"];
    let gateways =
        vec!["", ", gateways: {names: [gw-1, gw-2, gw-4]}", ", gateways: {selector: {matchLabels: {tier: gold}}}"];
    let select = prop::sample::select;
    ("[n-q]", select(endpoints), select(distribution), select(affinity), select(gateways)).prop_map(
        |(name, endpoints, distribution, affinity, gateways)| {
            policy(&name, "", &format!("{{{endpoints}{distribution}{affinity}{gateways}}}"))
        },
    )
}

/// A pod with a node and a weight, or a slice with nodes or zones.
fn placed_endpoints() -> impl Strategy<Value = String> {
    let select = prop::sample::select;
    let weights = vec!["", ", annotations: {vipgate.io/weight: \"0\"}", ", annotations: {vipgate.io/weight: \"3\"}"];
    let addresses = vec!["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"];
    let names = vec!["x", "y", "z", "s-10-0-0-1", "t-10-0-0-2"];
    let labels = vec!["app: web", "app: db"];
    let nodes = vec!["n1", "n2", "n3"];
    let pods = (select(names), select(labels), select(addresses), select(nodes), select(weights)).prop_map(
        |(name, labels, address, node, weight)| {
            pod("a", name, labels, address)
                .replace("containers", &format!("nodeName: {node}, containers"))
                .replace("}}\nspec", &format!("}}{weight}}}\nspec"))
        },
    );
    let places = vec![", nodeName: n1", ", nodeName: n2", ", zone: z1", ", zone: z2", ", zone: z3"];
    let of_family: Vec<&[&str]> =
        vec![&["10.0.0.1"], &["10.0.0.2", "10.0.0.3"], &["10.0.0.1", "10.0.0.3"], &["fd00::1"]];
    let slices = (select(vec!["s", "t", "u"]), prop::sample::select(of_family), select(places)).prop_map(
        |(of, addresses, place)| slice(of, addresses).replace("], targetRef", &format!("]{place}, targetRef")),
    );
    prop_oneof![pods, slices]
}

fn count_differences(coverage: &Coverage, before: &Placement, after: &Placement) {
    coverage.add("endpoints differ", u64::from(before.endpoints != after.endpoints));
    coverage.add("VIPs differ", u64::from(before.vips != after.vips));
    coverage.add("Services differ", u64::from(before.services != after.services));
    coverage.add("cluster differs", u64::from(before.cluster != after.cluster));
    let (old, new) = (&before.shard_maps, &after.shard_maps);
    let others = |a: &[ShardMapSpec], b: &[ShardMapSpec]| {
        a.iter().filter(|map| b.iter().all(|other| other.name != map.name)).count() as u64
    };
    coverage.add("shard map added", others(new, old));
    coverage.add("shard map removed", others(old, new));
    let is_other = |map: &&ShardMapSpec| old.iter().any(|before| before.name == map.name && before != *map);
    coverage.add("shard map differs", new.iter().filter(is_other).count() as u64);
    coverage.add("shard maps stay", u64::from(!new.is_empty() && Arc::ptr_eq(old, new) && before != after));
    let moved = after.endpoints.iter().filter(|endpoint| {
        let same = before.endpoints.get(&endpoint.address);
        same.is_some_and(|same| before.gateway_of(same) != after.gateway_of(endpoint))
    });
    coverage.add("endpoint moves", moved.count() as u64);
}

/// Counts a slice that replaces one of the same name, whatever the Service.
fn count_replaced_slice(coverage: &Coverage, old: Option<&Object>, new: &Object) {
    let Some(old) = old.filter(|old| old.id == new.id) else { return };
    if let (Body::EndpointSlice(before), Body::EndpointSlice(after)) = (&old.body, &new.body) {
        let is_same = before.service == after.service;
        coverage.count(if is_same { "slice replaced in place" } else { "slice of another Service" });
    }
}

/// What a placement has of gateways, shard maps, slots, weights and zones.
fn count_parts(coverage: &Coverage, placement: &Placement) {
    coverage.add("several gateways", u64::from(placement.peers.len() > 1));
    let vips =
        |is_counted: &dyn Fn(&VipSpec) -> bool| placement.vips.iter().filter(|vip| is_counted(vip)).count() as u64;
    coverage.add("VIP with a shard map", vips(&|vip| vip.shard_map.is_some()));
    coverage.add("VIP with an owner", vips(&|vip| !vip.shards.is_empty()));
    let maps = |part: &str| placement.shard_maps.iter().filter(|map| map.name.contains(part)).count() as u64;
    coverage.add("shard map of a zone", maps(" zone "));
    coverage.add("shard map of a node", maps(" node "));
    coverage.add("shard map of a zone alone", maps(" only"));
    coverage.add("shard map without a gateway", maps(" without "));
    for endpoint in &placement.endpoints {
        let slot = endpoint.slot.as_ref();
        coverage.add("slot", u64::from(slot.is_some_and(|slot| slot.map.is_none())));
        coverage.add("slot of a map of its own", u64::from(slot.is_some_and(|slot| slot.map.is_some())));
        coverage.add("endpoint with a gateway", u64::from(endpoint.gateway.is_some()));
    }
    for backend in placement.services.iter().flat_map(|service| &service.backends) {
        coverage.add("weight", u64::from(backend.weight != 1));
        coverage.add("zone", u64::from(backend.zone.is_some()));
    }
}

/// Number of chunks that differ between two tables of the same size.
fn replaced<T>(one: &Table<T>, other: &Table<T>) -> usize {
    one.chunks().iter().zip(other.chunks()).filter(|(a, b)| !Arc::ptr_eq(a, b)).count()
}

/// A document for a place; `None`: none.
fn edit() -> impl Strategy<Value = (usize, Option<String>)> {
    let document = prop_oneof![
        4 => random_document(),
        2 => overlapping_slice(),
        2 => relabeled_slice(),
        2 => shared_document(),
        3 => placing_policy(),
        3 => placed_endpoints(),
        2 => local_document(),
    ];
    (0..24_usize, prop::option::weighted(0.8, document))
}

/// What the changes reach: kinds of objects, and parts and differences of placements.
const CLASSES: [&str; 54] = [
    "agents",
    "node of flannel",
    "agent without pods",
    "agent with pods",
    "pod as a prefix",
    "covered pod of an agent",
    "agent stays",
    "AddressPool",
    "ClusterEgressPolicy",
    "EgressPolicy",
    "EndpointSlice",
    "Namespace",
    "Node",
    "OverlayNode",
    "Pod",
    "Service",
    "ServiceCIDR",
    "VipGateway",
    "strict",
    "open",
    "pods of other namespaces",
    "pool of other namespaces",
    "address outside pools",
    "removed",
    "several",
    "unchanged",
    "faulty",
    "mended",
    "duplicate",
    "endpoints differ",
    "VIPs differ",
    "Services differ",
    "cluster differs",
    "only slices differ",
    "only slices differ, and a VIP moves",
    "slice replaced in place",
    "slice of another Service",
    "several gateways",
    "VIP with a shard map",
    "VIP with an owner",
    "shard map of a zone",
    "shard map of a node",
    "shard map of a zone alone",
    "shard map without a gateway",
    "shard map added",
    "shard map removed",
    "shard map differs",
    "shard maps stay",
    "slot",
    "slot of a map of its own",
    "endpoint with a gateway",
    "endpoint moves",
    "weight",
    "zone",
];

#[test]
#[expect(clippy::too_many_lines, reason = "one property, with its classes")]
fn an_incremental_compilation_equals_a_new_one() {
    let steps = prop::collection::vec(prop::collection::vec(edit(), 0..3), 1..24);
    let first = prop::bool::weighted(0.7).prop_map(|has_first| if has_first { first_documents() } else { Vec::new() });
    let tenancies = prop::sample::select(vec![Tenancy::Strict, Tenancy::Open]);
    let agents = prop::option::of(Just(NodeAgents { port: 8473, vni: 7, secret: None }));
    // The whole, and two VIPs.
    let shares = prop::sample::select(vec![Share::WHOLE, Share::new(2.5 / 16_384.0).unwrap()]);
    property(
        ProptestConfig::with_cases(384),
        &(first, steps, tenancies, agents, shares),
        &CLASSES,
        |(first, steps, tenancy, node_agents, namespace_share), coverage| {
            let options = Options { namespace_share, tenancy, node_agents, ..Options::default() };
            coverage.count(if tenancy == Tenancy::Strict { "strict" } else { "open" });
            coverage.add("agents", u64::from(node_agents.is_some()));
            let first = first.iter().map(|text| Arc::new(objects(text).pop().unwrap()));
            let mut places: BTreeMap<usize, Arc<Object>> = (0..).zip(first).collect();
            let (mut compiler, mut before) = (Compiler::new(options.clone()), Compiled::default());
            for step in steps {
                coverage.add("several", u64::from(step.len() > 1));
                coverage.add("unchanged", u64::from(step.is_empty()));
                let mut kinds = Vec::new();
                for (place, text) in step {
                    let old = places.remove(&place);
                    coverage.add("removed", u64::from(text.is_none() && old.is_some()));
                    if let Some(text) = text {
                        let object = Arc::new(objects(&text).pop().unwrap());
                        coverage.count(object.id.kind.as_str());
                        kinds.push(object.id.kind);
                        count_replaced_slice(coverage, old.as_deref(), &object);
                        places.insert(place, object);
                    }
                    kinds.extend(old.map(|old| old.id.kind));
                }
                let compiled = compiler.compile(places.values());
                let new = compile_for(options.clone(), places.values().map(Arc::as_ref));
                prop_assert_eq!(&compiled.placement, &new.placement);
                prop_assert_eq!(&compiled.diagnostics, &new.diagnostics);
                let is_faulty = |it: &Compiled| it.diagnostics.iter().any(Diagnostic::is_error);
                coverage.add("faulty", u64::from(is_faulty(&compiled)));
                coverage.add("mended", u64::from(is_faulty(&before) && !is_faulty(&compiled)));
                let is_duplicate = |it: &&Diagnostic| it.code == Code::DuplicateObject;
                coverage.add("duplicate", compiled.diagnostics.iter().filter(is_duplicate).count() as u64);
                for (class, code) in [
                    ("pods of other namespaces", Code::PodsOfOtherNamespace),
                    ("beyond a limit", Code::LimitExceeded),
                    ("foreign addresses of slices", Code::SliceAddressOfOther),
                    ("addresses that are VIPs", Code::AddressIsVip),
                    ("addresses of two pods", Code::DuplicatePodAddress),
                    ("pool of other namespaces", Code::PoolOfOtherNamespaces),
                    ("address outside pools", Code::AddressOutsidePools),
                ] {
                    coverage.add(class, compiled.diagnostics.iter().filter(|it| it.code == code).count() as u64);
                }
                count_differences(coverage, &before.placement, &compiled.placement);
                count_parts(coverage, &compiled.placement);
                count_nodes(coverage, &before.placement, &compiled.placement);
                let is_slices = !kinds.is_empty() && kinds.iter().all(|kind| *kind == Kind::EndpointSlice);
                coverage.add("only slices differ", u64::from(is_slices));
                let moves = before.placement.vips != compiled.placement.vips;
                coverage.add("only slices differ, and a VIP moves", u64::from(is_slices && moves));
                before = compiled;
            }
            Ok(())
        },
    );
}

#[test]
fn a_slice_that_precedes_its_duplicate_takes_it_out_of_force() {
    let policy = "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {name: p, namespace: a}\n\
                  spec: {serviceRef: {name: s}}\n";
    let slice = |service: &str| {
        format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: x, namespace: a, labels: {{kubernetes.io/service-name: {service}}}}}\naddressType: IPv4\n\
             endpoints: [{{addresses: [10.0.0.1], targetRef: {{kind: Pod, name: x}}}}]\n"
        )
    };
    let parsed = |text: &str| Arc::new(objects(text).pop().unwrap());
    let [policy, first, second] = [policy, &slice("t"), &slice("s")].map(parsed);
    let mut compiler = Compiler::new(Tenancy::Strict);
    let lists = [vec![&policy, &second], vec![&policy, &first, &second], vec![&policy, &second], vec![&policy, &first]];
    for (list, endpoints) in lists.into_iter().zip([1, 0, 1, 0]) {
        let compiled = compiler.compile(list.iter().copied());
        let new = compile_for(Tenancy::Strict, list.iter().map(|object| &***object));
        assert_eq!(compiled.placement.endpoints.len(), endpoints);
        assert_eq!((&compiled.placement, &compiled.diagnostics), (&new.placement, &new.diagnostics));
    }
}

#[test]
fn a_vip_follows_the_local_backends_of_its_service_whatever_concerns_them() {
    let api_server = |address: &str| slice("kubernetes", &[address]).replace("namespace: a", "namespace: default");
    let with = |local: &str, other: String| {
        let gateways = [gateway_with("gw-1", "node: n1"), gateway_with("gw-2", "node: n2")];
        // Where pods are known, an address that is a host's is no backend of another one's.
        let own = [local_service("Local", true), local.to_owned(), other, pod("a", "x", "", "10.0.0.9")];
        [&gateways[..], &own].concat()
    };
    let at = |node: &str| local_slice("10.0.0.7", &format!(", nodeName: {node}"));
    let both = local_slice("10.0.0.7", ", nodeName: n1")
        .replace("endpoints: [", "endpoints: [{addresses: [10.0.0.8], nodeName: n2, conditions: {ready: false}}, ");
    let cidr = |cidr: &str| {
        let kind = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: c}\n";
        format!("{kind}spec: {{cidrs: [{cidr}]}}\n")
    };
    let elsewhere = api_server("10.9.0.1");
    let steps = [
        (with(&at("n1"), elsewhere.clone()), "gw-1", "its slice"),
        (with(&at("n2"), elsewhere.clone()), "gw-2", "another node"),
        (with(&at("n1"), elsewhere.clone()), "gw-1", "back"),
        (with(&both, elsewhere.clone()), "gw-1", "one more, which isn't ready"),
        (with(&both, api_server("10.0.0.7")), "gw-2", "the ready one is the API server's host"),
        (with(&both, elsewhere), "gw-1", "and isn't"),
        (with(&both, cidr("10.0.0.7/32")), "gw-2", "the ready one is in a prefix of the cluster"),
        (with(&both, cidr("10.9.0.0/16")), "gw-1", "and isn't"),
    ];
    let mut compiler = Compiler::new(Tenancy::Strict);
    let mut before: Vec<(String, Arc<Object>)> = Vec::new();
    for (documents, home, what) in steps {
        // What is the same is the same allocation, as in the store.
        let known = |text: &String| before.iter().find(|(known, _)| known == text).map(|(_, object)| object.clone());
        let parsed = |text: String| {
            let object = known(&text).unwrap_or_else(|| Arc::new(objects(&text).pop().unwrap()));
            (text, object)
        };
        let all: Vec<(String, Arc<Object>)> = documents.into_iter().map(parsed).collect();
        before = all;
        let compiled = compiler.compile(before.iter().map(|(_, object)| object));
        let new = compile_for(Tenancy::Strict, before.iter().map(|(_, object)| &**object));
        assert_eq!(compiled.placement, new.placement, "{what}");
        assert_eq!(compiled.diagnostics, new.diagnostics, "{what}");
        let vip = compiled.placement.vips.get(&ip("198.51.100.7")).unwrap();
        assert_eq!(&*vip.shards[0].gateway, home, "{what}");
        let endpoint = compiled.placement.endpoints.get(&ip("10.0.0.7"));
        assert!(endpoint.is_none_or(|endpoint| endpoint.gateway.as_deref() == Some(home)), "{what}");
    }
}

#[test]
fn a_changed_slice_concerns_its_service_alone() {
    let documents = |last: &str| {
        let each = (0..300).flat_map(|n| {
            let name = format!("s{n:03}");
            let pod = if n == 150 { format!("10.1.150.{last}") } else { format!("10.1.{}.{}", n / 250 + 100, n % 250) };
            [service(&name, EGRESS, 80, &[&format!("203.0.{}.{}", n / 250, n % 250 + 1)]), slice(&name, &[&pod])]
        });
        let pool = pool("all", "{ranges: [203.0.0.0/16], announce: BGP}");
        ["gw-1", "gw-2"].map(|name| gateway(name, "")).into_iter().chain([pool]).chain(each).collect::<Vec<_>>()
    };
    let (old, new) = (documents("1"), documents("2"));
    let parsed = |text: &String| Arc::new(objects(text).pop().unwrap());
    let before: Vec<Arc<Object>> = old.iter().map(parsed).collect();
    let changed = old.iter().zip(&new).zip(&before);
    let after: Vec<Arc<Object>> =
        changed.map(|((old, new), object)| if old == new { object.clone() } else { parsed(new) }).collect();
    assert_eq!(before.iter().zip(&after).filter(|(a, b)| !Arc::ptr_eq(a, b)).count(), 1);
    let mut compiler = Compiler::new(Tenancy::Strict);
    let (one, other) = (compiler.compile(&before).placement, compiler.compile(&after).placement);
    assert_eq!((replaced(&one.policies, &other.policies), replaced(&one.vips, &other.vips)), (0, 0));
    assert_eq!((replaced(&one.services, &other.services), other.services.chunks().len()), (1, 3));
    assert!(replaced(&one.endpoints, &other.endpoints) <= 1);
    assert_eq!((other.shard_maps.len(), Arc::ptr_eq(&one.shard_maps, &other.shard_maps)), (4, true));
    assert!(other.endpoints.iter().all(|endpoint| endpoint.slot.is_some()));
}

#[test]
fn objects_of_which_few_changed_are_sorted_as_all_others() {
    let parsed = |n: usize| Arc::new(objects(&service(&format!("s{n:02}"), "", 80, &[])).pop().unwrap());
    let edits = prop::collection::vec((0..30_usize, prop::option::of(0..60_usize)), 0..4);
    property(
        ProptestConfig::with_cases(256),
        &(prop::collection::btree_set(0..60_usize, 0..30), edits),
        &["sorted", "unsorted", "removed"],
        |(old, edits), coverage| {
            let old: Vec<Arc<Object>> = old.into_iter().map(parsed).collect();
            let mut new = old.clone();
            for (place, edit) in edits {
                match edit {
                    Some(n) => new.insert(place.min(new.len()), parsed(n)),
                    None if place < new.len() => drop(new.remove(place)),
                    None => {}
                }
            }
            let mut expected = new.clone();
            expected.sort_by(|a, b| inventory::order(a, b));
            let is_same = |other: &[Arc<Object>]| other.iter().zip(&expected).all(|(a, b)| a.id == b.id);
            coverage.count(if is_same(&new) { "sorted" } else { "unsorted" });
            coverage.add("removed", u64::from(new.len() < old.len()));
            let mut sorted = old.clone();
            let Replaced { at, removed } = replace(&mut sorted, new.iter());
            prop_assert!(is_same(&sorted) && sorted.len() == expected.len());
            // What isn't replaced is what it was.
            let rest = sorted.len() - at.len();
            let is_kept = |(a, b): (&Arc<Object>, &Arc<Object>)| Arc::ptr_eq(a, b);
            prop_assert!(sorted.iter().zip(&old).take(at.start).all(is_kept));
            prop_assert!(sorted[at.end..].iter().rev().zip(old.iter().rev()).all(is_kept));
            prop_assert_eq!(rest + removed.len(), old.len());
            Ok(())
        },
    );
}
