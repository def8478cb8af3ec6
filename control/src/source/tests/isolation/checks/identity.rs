//! Identity: an address is that of one pod, and leaves with a VIP of the pod's own namespace or not at all. One that is
//! outside of the cluster and of no pod that is known is that of a namespace whose slices list it.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;
use vipgate_coverage::Coverage;
use vipgate_dataplane::policy::spec::BackendState;
use vipgate_policy::diagnostic::Code;
use vipgate_policy::manifest::{Kind, ObjectId};

use super::{Observation, namespace_of};
use crate::source::tests::isolation::objects::{SERVICE_NAME, pod_addresses, texts, vips};
use crate::source::tests::isolation::world::API_SERVER;

/// Pods by address, as their manifests name it.
struct Pods<'a> {
    by_address: BTreeMap<IpAddr, Vec<(&'a ObjectId, &'a Value)>>,
    /// Addresses of pods on the host network, with namespaces.
    on_hosts: BTreeSet<(IpAddr, &'a str)>,
    hosts: BTreeSet<IpAddr>,
    prefixes: Vec<IpNet>,
}

fn address(text: &str) -> Option<IpAddr> {
    text.parse().ok()
}

impl<'a> Pods<'a> {
    fn new(objects: &'a BTreeMap<&ObjectId, Value>) -> Self {
        let mut pods = Self {
            by_address: BTreeMap::new(),
            on_hosts: BTreeSet::new(),
            hosts: BTreeSet::new(),
            prefixes: Vec::new(),
        };
        for (id, value) in objects {
            match id.kind {
                Kind::Pod if !matches!(value["status"]["phase"].as_str(), Some("Succeeded" | "Failed")) => {
                    for address in pod_addresses(value).into_iter().filter_map(address) {
                        if value["spec"]["hostNetwork"] == true {
                            pods.on_hosts.insert((address, &id.namespace));
                            pods.hosts.insert(address);
                        } else {
                            pods.by_address.entry(address).or_default().push((id, value));
                        }
                    }
                }
                Kind::Node => {
                    pods.hosts.extend(texts(value, "status.addresses.*.address").into_iter().filter_map(address));
                    pods.prefixes
                        .extend(texts(value, "spec.podCIDRs.*").iter().filter_map(|it| it.parse::<IpNet>().ok()));
                }
                Kind::Gateway => pods.hosts.extend(value["spec"]["peerAddress"].as_str().and_then(address)),
                Kind::EndpointSlice
                    if id.namespace == "default" && value["metadata"]["labels"][SERVICE_NAME] == "kubernetes" =>
                {
                    pods.hosts.extend(address(API_SERVER));
                }
                Kind::ServiceCidr => {
                    pods.prefixes.extend(texts(value, "spec.cidrs.*").iter().filter_map(|it| it.parse::<IpNet>().ok()));
                }
                _ => {}
            }
        }
        pods
    }

    /// The pod that has an address: the one that is greater than all others.
    fn holder(&self, address: IpAddr) -> Option<&'a ObjectId> {
        let all = self.by_address.get(&address)?;
        let is_greater = |(id, pod): &&(&ObjectId, &Value)| {
            all.iter().filter(|(other, _)| other != id).all(|(_, other)| compare(pod, other) == Some(Ordering::Greater))
        };
        all.iter().find(is_greater).map(|(id, _)| *id)
    }

    /// Whether an address is a host's, or one that the cluster gives to pods and Services.
    fn is_of_cluster(&self, address: IpAddr) -> bool {
        self.hosts.contains(&address) || self.prefixes.iter().any(|prefix| prefix.contains(&address))
    }

    fn is_contested(&self, address: IpAddr) -> bool {
        self.by_address.get(&address).is_some_and(|pods| pods.len() > 1)
    }
}

/// Which of two pods has an address now: one that isn't being deleted, then the one that is ready and younger.
fn compare(one: &Value, other: &Value) -> Option<Ordering> {
    let facts = |pod: &Value| {
        let is_ready = pod["status"]["conditions"][0]["status"] == "True";
        (pod["metadata"]["deletionTimestamp"].is_null(), is_ready, pod["metadata"]["creationTimestamp"].clone())
    };
    let ((lives, ready, created), (other_lives, other_ready, other_created)) = (facts(one), facts(other));
    if lives != other_lives {
        return Some(lives.cmp(&other_lives));
    }
    // Timestamps sort as texts.
    let age = created.as_str().zip(other_created.as_str()).map_or(Ordering::Equal, |(a, b)| a.cmp(b));
    match (ready.cmp(&other_ready), age) {
        (Ordering::Equal, Ordering::Equal) => None,
        (Ordering::Equal, it) | (it, Ordering::Equal) => Some(it),
        (one, other) => (one == other).then_some(one),
    }
}

pub(super) fn check(observation: &Observation<'_>, coverage: &Coverage) {
    let pods = Pods::new(&observation.objects);
    check_endpoints(observation, &pods, coverage);
    check_sharing(observation);
    check_backends(observation, &pods);
    check_ready(observation, &pods, coverage);
}

/// An endpoint with VIPs is a pod, and its policy and its VIPs are its namespace's.
fn check_endpoints(observation: &Observation<'_>, pods: &Pods<'_>, coverage: &Coverage) {
    let placement = observation.placement();
    for endpoint in &placement.endpoints {
        let address = endpoint.address;
        if pods.is_contested(address) {
            coverage.count("address of several pods");
        }
        if pods.is_contested(address) && pods.holder(address).is_none() {
            assert!(endpoint.vips.is_empty(), "nobody is known to have {address}, and it isn't closed: {endpoint:?}");
            coverage.count("address of several pods, and nobody has it");
            continue;
        }
        let Some(namespace) = namespace_of(&endpoint.policy) else { continue };
        if let Some(holder) = pods.holder(address) {
            assert_eq!(namespace, holder.namespace, "{holder} is covered by another namespace: {endpoint:?}");
            assert!(*endpoint.name == *holder.path(), "{holder} has {address}: {endpoint:?}");
        } else {
            assert!(!pods.is_of_cluster(address), "no pod of the cluster has {address}: {endpoint:?}");
            assert!(is_listed(observation, namespace, address), "{namespace} doesn't list {address}: {endpoint:?}");
            coverage.count("address outside of the cluster");
        }
        for vip in &endpoint.vips {
            let name = placement.vips.get(vip).map(|vip| &*vip.name).unwrap_or_default();
            let mut owners = name.split(", ").filter_map(namespace_of);
            assert!(owners.any(|owner| owner == namespace), "{namespace} has a VIP of {name}: {endpoint:?}");
        }
    }
}

/// Whether a slice of a namespace lists an address.
fn is_listed(observation: &Observation<'_>, namespace: &str, listed: IpAddr) -> bool {
    let slices =
        observation.objects.iter().filter(|(id, _)| id.kind == Kind::EndpointSlice && id.namespace == namespace);
    let addresses = slices.into_iter().flat_map(|(_, slice)| texts(slice, "endpoints.*.addresses.*"));
    addresses.into_iter().filter_map(address).any(|address| address == listed)
}

/// A VIP is that of one namespace, unless Services of several have it in their own status, and a diagnostic says so.
fn check_sharing(observation: &Observation<'_>) {
    let has_vip = |namespace: &str, vip: &str| {
        let services =
            observation.objects.iter().filter(|(id, _)| id.kind == Kind::Service && id.namespace == namespace);
        services.into_iter().any(|(_, service)| vips(service).contains(&vip))
    };
    for vip in &observation.placement().vips {
        let owners: BTreeSet<&str> = vip.name.split(", ").filter_map(namespace_of).collect();
        if owners.len() > 1 {
            let text = vip.address.to_string();
            assert!(owners.iter().all(|owner| has_vip(owner, &text)), "{vip:?} has VIPs of several namespaces");
            let is_said =
                |code| observation.whole.1.diagnostics.iter().any(|it| it.code == code && it.reason.contains(&text));
            assert!(is_said(Code::VipOfTwoNamespaces), "nobody says that several namespaces share {vip:?}");
        }
    }
}

/// A backend is a pod of the Service's namespace, the host of one, or outside of the cluster.
fn check_backends(observation: &Observation<'_>, pods: &Pods<'_>) {
    let placement = observation.placement();
    for service in &placement.services {
        let namespace = namespace_of(&service.name).expect("a namespace");
        for backend in &service.backends {
            let address = backend.address;
            let is_own = match pods.holder(address) {
                Some(holder) => holder.namespace == namespace,
                None if pods.is_contested(address) => false,
                None if pods.hosts.contains(&address) => pods.on_hosts.contains(&(address, namespace)),
                None => !pods.is_of_cluster(address),
            };
            assert!(is_own, "{} has a backend that isn't its own: {backend:?}", service.name);
            assert!(placement.vips.get(&address).is_none(), "{} has a VIP as backend: {backend:?}", service.name);
        }
    }
}

/// A ready endpoint that is the pod that has its address serves, whatever else slices list.
fn check_ready(observation: &Observation<'_>, pods: &Pods<'_>, coverage: &Coverage) {
    let placement = observation.placement();
    for (id, slice) in observation.objects.iter().filter(|(id, _)| id.kind == Kind::EndpointSlice) {
        let service = slice["metadata"]["labels"][SERVICE_NAME].as_str().unwrap_or_default();
        let Some(service) = placement.services.get(&format!("Service {}/{service}", id.namespace).into()) else {
            continue;
        };
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            let reference = &endpoint["targetRef"];
            let Some(address) = endpoint["addresses"][0].as_str().and_then(address) else { continue };
            let Some(holder) = pods.holder(address).filter(|_| endpoint["conditions"]["ready"] == true) else {
                continue;
            };
            let uid = observation.objects.get(holder).map(|pod| &pod["metadata"]["uid"]);
            let is_its = reference["name"] == holder.name
                && reference["namespace"] == holder.namespace
                && holder.namespace == id.namespace;
            let has_port = slice["ports"][0]["name"] == "main" && slice["ports"][0]["port"] == 8080;
            if !is_its
                || uid != Some(&reference["uid"])
                || !has_port
                || &*service.ports[0].name != "main"
                || placement.vips.get(&address).is_some()
            {
                continue;
            }
            let mut backends = service.backends.iter().filter(|it| it.address == address && it.ports[0] == 8080);
            let serves = backends.any(|it| it.state == BackendState::Ready);
            assert!(serves, "{} doesn't have {holder} as a ready backend: {:?}", service.name, service.backends);
            coverage.count("a ready endpoint serves");
        }
    }
}
