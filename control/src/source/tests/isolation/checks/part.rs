//! The part of one tenant: what is published for it and said of it equals that of a world without the other tenants. Where it
//! differs, a documented rule says who gives way, and the tenant's own status names it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use vipgate_coverage::Coverage;
use vipgate_dataplane::policy::spec::{EgressSpec, EndpointSpec, Scope, ShardMapSpec, VipSpec};
use vipgate_policy::compiler::{Peer, PlacedService, Placement};
use vipgate_policy::diagnostic::Code;
use vipgate_policy::manifest::{Family, Kind, ObjectId};

use super::privacy::is_in_text;
use super::{Observation, namespace_of};
use crate::source::store::{CompileOutcome, Faulty};
use crate::source::tests::isolation::objects::{pod_addresses, texts, vips};
use crate::source::tests::isolation::pipeline::Pipeline;
use crate::source::tests::isolation::world::{Age, PUBLIC};

/// Where the younger gives way.
const CONTENTION: [Code; 13] = [
    Code::PortConflict,
    Code::AnnounceConflict,
    Code::VipOfTwoNamespaces,
    Code::HealthCheckPortConflict,
    Code::VipOfTwoPolicies,
    Code::VipOfOtherNamespace,
    Code::VipInUse,
    Code::PoolExhausted,
    Code::NoEligibleGateway,
    Code::NoGatewayInZone,
    Code::LimitExceeded,
    Code::BackendIsVip,
    Code::PoliciesOverlap,
];
/// What follows from gateways without capacity for younger VIPs.
const OF_GATEWAYS: [Code; 2] = [Code::NoEligibleGateway, Code::NoGatewayInZone];
/// Where one kind gives way to another, whatever their age: an address that a policy lists to a Service's, and one outside
/// of all pools to that of a Pod.
const BETWEEN_KINDS: [Code; 2] = [Code::VipOfOtherNamespace, Code::VipInUse];
/// What follows from an address that a pod doesn't have.
const OF_ADDRESSES: [Code; 8] = [
    Code::NoPodSelected,
    Code::NoVipOfFamily,
    Code::PoliciesOverlap,
    Code::PortWithoutBackend,
    Code::VipWithoutBackend,
    Code::MaglevTableTooSmall,
    Code::NoEligibleGateway,
    Code::NoGatewayInZone,
];

/// A VIP without the order of its backups: gateways with capacity for another VIP are first.
fn without_order(vip: &VipSpec) -> VipSpec {
    let mut vip = vip.clone();
    vip.shards.iter_mut().for_each(|shard| shard.backups.sort_unstable());
    vip
}

fn without_prefix(faulty: &Faulty, prefix: &str) -> Faulty {
    let reasons = faulty.reasons.iter().map(|reason| reason.replace(prefix, "")).collect();
    Faulty { reasons, ..faulty.clone() }
}

/// What is published for a tenant, and what is said of its objects.
#[derive(Debug, Default, PartialEq)]
struct Part {
    policies: Vec<EgressSpec>,
    vips: BTreeMap<IpAddr, VipSpec>,
    maps: BTreeMap<Arc<str>, ShardMapSpec>,
    endpoints: BTreeMap<IpAddr, EndpointSpec>,
    services: Vec<PlacedService>,
    /// Its pods in the policies of nodes.
    on_nodes: BTreeSet<(Arc<str>, IpAddr, Arc<str>)>,
    faulty: BTreeMap<ObjectId, Faulty>,
    diagnostics: BTreeMap<String, Code>,
}

impl Part {
    fn of(namespace: &str, pipeline: &Pipeline, outcome: &CompileOutcome) -> Self {
        let placement = outcome.placement.as_deref().expect("a placement");
        let is_its = |name: &str| namespace_of(name) == Some(namespace);
        let is_its_vip = |vip: &&VipSpec| vip.name.split(", ").any(is_its);
        let is_its_pod = |pod: &str| pod.split_once('/').is_some_and(|(of, _)| of == namespace);
        let is_covered = |endpoint: &&EndpointSpec| is_its(&endpoint.policy) || is_its_pod(&endpoint.name);
        let diagnostics = outcome.diagnostics.iter();
        let diagnostics =
            diagnostics.filter(|it| pipeline.entries.object_of(it).is_some_and(|id| id.namespace == namespace));
        let on_nodes = placement.agents.iter().flat_map(|agent| {
            agent.pods.iter().map(|(address, pod)| (agent.tunnel.name.clone(), *address, pod.clone()))
        });
        let mut part = Self {
            policies: placement.policies.iter().filter(|it| is_its(&it.name)).cloned().collect(),
            vips: placement.vips.iter().filter(is_its_vip).map(|vip| (vip.address, without_order(vip))).collect(),
            maps: BTreeMap::new(),
            endpoints: placement.endpoints.iter().filter(is_covered).map(|it| (it.address, it.clone())).collect(),
            services: placement.services.iter().filter(|it| is_its(&it.name)).cloned().collect(),
            on_nodes: on_nodes.filter(|(_, _, pod)| is_its_pod(pod)).collect(),
            faulty: outcome
                .faulty
                .iter()
                .filter(|(id, _)| id.namespace == namespace)
                .map(|(id, it)| (id.clone(), without_prefix(it, &pipeline.prefix())))
                .collect(),
            // Two worlds are in two directories.
            diagnostics: diagnostics.map(|it| (it.to_string().replace(&pipeline.prefix(), ""), it.code)).collect(),
        };
        part.add_maps(placement);
        part
    }

    /// The names of the shard maps that its VIPs and endpoints refer to.
    fn map_names(&self) -> BTreeSet<Arc<str>> {
        let of_vips = self.vips.values().filter_map(|vip| Some(vip.shard_map.as_ref()?.map.clone()));
        let of_endpoints = self.endpoints.values().filter_map(|it| it.slot.as_ref()?.map.clone());
        of_vips.chain(of_endpoints).collect()
    }

    fn add_maps(&mut self, placement: &Placement) {
        let names = self.map_names();
        let maps = placement.shard_maps.iter().filter(|map| names.contains(&map.name));
        self.maps = maps.map(|map| (map.name.clone(), map.clone())).collect();
    }

    /// What is said here and not in another world.
    fn added<'p>(&'p self, other: &'p Self) -> impl Iterator<Item = (&'p str, Code)> {
        let added = self.diagnostics.iter().filter(|(text, _)| !other.diagnostics.contains_key(*text));
        added.map(|(text, code)| (text.as_str(), *code))
    }

    /// Leaves out what is said of addresses, and who has them.
    fn without(mut self, addresses: &BTreeSet<IpAddr>) -> Self {
        if addresses.is_empty() {
            return self;
        }
        let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let is_about = |text: &str| texts.iter().any(|address| text.contains(address.as_str()));
        self.endpoints.retain(|address, _| !addresses.contains(address));
        // One of them may be the only endpoint of a map.
        let names = self.map_names();
        self.maps.retain(|name, _| names.contains(name));
        self.on_nodes.retain(|(_, address, _)| !addresses.contains(address));
        for service in &mut self.services {
            service.backends.retain(|backend| !addresses.contains(&backend.address));
        }
        self.diagnostics.retain(|text, code| !is_about(text) && !OF_ADDRESSES.contains(code));
        self
    }

    /// Whether one of these addresses is of a backend that decides about the owner of its VIP.
    fn has_deciding(&self, addresses: &BTreeSet<IpAddr>) -> bool {
        let local = self.services.iter().filter(|service| service.external == Scope::Local);
        local.flat_map(|service| &service.backends).any(|backend| addresses.contains(&backend.address))
    }

    /// Counts VIPs whose owner has a backend that clients reach only there.
    fn count_local(&self, placement: &Placement, coverage: &Coverage) {
        for service in self.services.iter().filter(|service| service.external == Scope::Local) {
            for vip in service.vips.iter().filter_map(|vip| self.vips.get(vip)) {
                let home = vip.shards.first().and_then(|shard| placement.peer(&shard.gateway));
                let is_there = |home: &Peer| service.backends.iter().any(|it| it.node.as_ref() == Some(&home.node));
                coverage.add("VIP at its backend", u64::from(home.is_some_and(is_there)));
            }
        }
    }

    /// The VIPs that a pool has given, and how many of each family and policy.
    fn drawn(&self) -> (BTreeSet<IpAddr>, BTreeMap<String, usize>) {
        let vips = || self.vips.values().filter(|vip| is_drawn(&vip.address));
        let mut counts = BTreeMap::new();
        for vip in vips() {
            *counts.entry(format!("{} {}", vip.name, Family::of(vip.address))).or_default() += 1;
        }
        (vips().map(|vip| vip.address).collect(), counts)
    }

    /// Leaves out which address a pool has given, and which gateway has what: the load of others decides among gateways for
    /// a younger one.
    fn without_choices(mut self) -> Self {
        self.maps.clear();
        self.vips.retain(|vip, _| !is_drawn(vip));
        for vip in self.vips.values_mut() {
            (vip.shards, vip.shard_map) = (Vec::new(), None);
        }
        for endpoint in self.endpoints.values_mut() {
            endpoint.vips.retain(|vip| !is_drawn(vip));
            (endpoint.gateway, endpoint.slot, endpoint.remarks) = (None, None, Vec::new());
        }
        self.diagnostics.retain(|_, code| !OF_GATEWAYS.contains(code));
        self
    }
}

/// Whether an address is of a pool that gives what its policies don't name.
fn is_drawn(vip: &IpAddr) -> bool {
    let pools = [format!("{PUBLIC}.64/28"), "2001:db8:7::/124".to_owned()];
    pools.iter().any(|pool| pool.parse::<IpNet>().expect("a prefix").contains(vip))
}

pub(super) fn check(observation: &Observation<'_>, coverage: &Coverage) {
    let namespace = observation.history.protected;
    let ((pipeline, outcome), (alone, alone_outcome)) = (observation.whole, observation.alone);
    let contested = contested(observation);
    if !contested.is_empty() {
        coverage.count("address that others claim, too");
    }
    let age = observation.history.setting.age;
    let (expected, actual) = (Part::of(namespace, alone, alone_outcome), Part::of(namespace, pipeline, outcome));
    check_in_use(observation, &expected, &actual);
    if age == Age::Youngest && actual.added(&expected).any(|(_, code)| OF_GATEWAYS.contains(&code)) {
        coverage.count("contention: the younger gives way");
        return;
    }
    // Who else has the address of a backend decides about its VIP's owner, too.
    let is_owner_contested = expected.has_deciding(&contested) || actual.has_deciding(&contested);
    actual.count_local(observation.placement(), coverage);
    let (expected, mut actual) = (expected.without(&contested), actual.without(&contested));
    let added: Vec<(&str, Code)> = actual.added(&expected).collect();
    let allowed: &[Code] = if age == Age::Youngest { &CONTENTION } else { &BETWEEN_KINDS };
    if added.iter().any(|(_, code)| allowed.contains(code)) {
        coverage.count(if age == Age::Youngest {
            "contention: the younger gives way"
        } else {
            "contention: of two kinds"
        });
        for (_, code) in added {
            coverage.count(format!("contention: {code}"));
        }
        return;
    }
    for (address, vip) in &mut actual.vips {
        let Some(before) = expected.vips.get(address) else { continue };
        if vip.name != before.name && vip.name.contains(&*before.name) {
            // Others share it: their names and ports are there, too.
            coverage.count("VIP that others share");
            assert!(before.reserved_ports.iter().all(|port| vip.reserved_ports.contains(port)), "{vip:?}");
            vip.name = before.name.clone();
            vip.reserved_ports.clone_from(&before.reserved_ports);
        }
    }
    let (drawn, drawn_alone) = (actual.drawn(), expected.drawn());
    if age == Age::Oldest && drawn.0 == drawn_alone.0 && !is_owner_contested {
        compare(&expected, &actual);
    } else {
        if age == Age::Oldest {
            // Who has an address keeps it, also from an older policy that asks for one later and gets another one.
            assert_eq!(drawn.1, drawn_alone.1, "as many addresses as alone");
            let is_of_others = |vip: &&IpAddr| pipeline.is_recorded_for_others(**vip, namespace);
            let free = drawn_alone.0.difference(&drawn.0).find(|vip| !is_of_others(vip));
            assert_eq!(free, None, "nobody else has it, and it isn't given as alone");
            coverage.count("contention: another address of the pool");
        }
        compare(&expected.without_choices(), &actual.without_choices());
    }
    coverage.count("the protected tenant has what it has alone");
}

/// Checks that a VIP gives way to Pods of others alone, and outside of all pools only: not to what slices and Nodes say.
fn check_in_use(observation: &Observation<'_>, expected: &Part, actual: &Part) {
    let added = actual.added(expected).filter(|(_, code)| *code == Code::VipInUse);
    let texts_in_use: Vec<&str> = added.map(|(text, _)| text).collect();
    if texts_in_use.is_empty() {
        return;
    }
    let (mut pools, mut pods) = (Vec::<IpNet>::new(), Vec::<IpAddr>::new());
    for (id, value) in &observation.objects {
        match id.kind {
            Kind::AddressPool => {
                pools.extend(texts(value, "spec.ranges.*").iter().filter_map(|it| it.parse::<IpNet>().ok()));
            }
            Kind::Pod if id.namespace != observation.history.protected => {
                pods.extend(pod_addresses(value).iter().filter_map(|it| it.parse::<IpAddr>().ok()));
            }
            _ => {}
        }
    }
    pods.retain(|pod| !pools.iter().any(|pool| pool.contains(pod)));
    for text in texts_in_use {
        let is_of_pod = pods.iter().any(|pod| is_in_text(text, *pod));
        assert!(is_of_pod, "a VIP of the protected tenant gives way to what isn't a Pod, or in a pool: {text}");
    }
}

/// Compares field by field, for short messages.
fn compare(expected: &Part, actual: &Part) {
    assert_eq!(expected.diagnostics, actual.diagnostics, "what is said of the protected tenant");
    assert_eq!(expected.faulty, actual.faulty, "objects of the protected tenant that aren't in force as written");
    assert_eq!(expected.vips, actual.vips, "VIPs of the protected tenant");
    assert_eq!(expected.endpoints, actual.endpoints, "endpoints of the protected tenant");
    assert_eq!(expected.policies, actual.policies, "policies of the protected tenant");
    assert_eq!(expected.services, actual.services, "Services of the protected tenant");
    assert_eq!(expected.maps, actual.maps, "shard maps of the protected tenant");
    assert_eq!(expected, actual, "the protected tenant");
}

/// Addresses of the protected tenant's that others claim by a kind that precedes: pods of others, where the manifests of two
/// pods name one address; and VIPs of others, or what hostile kubelets add to nodes, that its slices list and no pod of its
/// own has.
fn contested(observation: &Observation<'_>) -> BTreeSet<IpAddr> {
    let history = observation.history;
    let parse = |texts: Vec<&str>| texts.into_iter().filter_map(|text| text.parse().ok()).collect::<Vec<IpAddr>>();
    let (mut pods, mut vips_and_hosts, mut own, mut own_pods) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (id, value) in &observation.objects {
        let is_protected = id.namespace == history.protected;
        match id.kind {
            Kind::Pod if is_protected => {
                own.extend(parse(pod_addresses(value)));
                if !matches!(value["status"]["phase"].as_str(), Some("Succeeded" | "Failed")) {
                    own_pods.extend(parse(pod_addresses(value)));
                }
            }
            Kind::Pod if value["spec"]["hostNetwork"] != true => pods.extend(parse(pod_addresses(value))),
            Kind::EndpointSlice if is_protected => own.extend(parse(texts(value, "endpoints.*.addresses.*"))),
            // Without a pod, nobody knows whose an address of a slice is.
            Kind::EndpointSlice if !history.setting.has_pods => {
                pods.extend(parse(texts(value, "endpoints.*.addresses.*")));
            }
            Kind::Service if !is_protected => vips_and_hosts.extend(parse(vips(value))),
            Kind::Node => vips_and_hosts.extend(parse(texts(value, "status.addresses.*.address")).into_iter().skip(1)),
            _ => {}
        }
    }
    let is_listed = |address: &&IpAddr| vips_and_hosts.contains(*address) && !own_pods.contains(*address);
    own.iter().filter(|address| pods.contains(*address)).chain(own.iter().filter(is_listed)).copied().collect()
}
