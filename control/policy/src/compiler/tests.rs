//! The compiled policy, and every diagnostic with file, line and field.

mod agent_nodes;
mod any_node;
mod balance;
mod budget;
mod cluster;
mod determinism;
mod distribution;
mod flannel;
mod inbound;
mod incremental;
mod invalid;
mod isolation;
mod local_backends;
mod placement_diff;
mod pools;
mod rebalancing;
mod shard_moves;
mod shortages;
mod stability;
mod tenancy;
mod valid;
mod worlds;

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::spec::{
    ClusterSpec, EgressSpec, EndpointSpec, SLOTS, ServiceSpec, ShardMapSpec, VipSpec,
};

use super::*;
use crate::diagnostic::sort_and_dedup;
use crate::fingerprint::Fingerprint;
use crate::manifest::{Manifests, UncoveredAction, UnsupportedKinds, read};
use crate::yaml::Source;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Reads a text named `m.yaml`.
fn manifests(text: &str) -> Manifests {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("m.yaml", text.to_owned())), UnsupportedKinds::Reject, &mut manifests);
    manifests
}

/// The objects of a text without diagnostics.
fn objects(text: &str) -> Vec<Object> {
    let manifests = manifests(text);
    assert_eq!(manifests.diagnostics, [], "{text}");
    manifests.objects
}

/// The policy of a gateway.
struct GatewayPolicy {
    version: String,
    policies: Vec<EgressSpec>,
    vips: Vec<VipSpec>,
    endpoints: Vec<EndpointSpec>,
    services: Vec<ServiceSpec>,
    cluster: ClusterSpec,
}

/// A compiled placement, and the policy for one gateway or for a gateway without locality.
struct Outcome {
    set: GatewayPolicy,
    placement: Placement,
    diagnostics: Vec<Diagnostic>,
}

impl Outcome {
    fn accept(self) -> Result<(Placement, Vec<Diagnostic>), Diagnostics> {
        Compiled { placement: self.placement, diagnostics: self.diagnostics, ..Compiled::default() }.accept()
    }
}

fn compiled_objects(objects: &[Object], gateway: Option<&str>) -> Outcome {
    compiled_manifests(&Manifests { objects: objects.to_vec(), ..Manifests::default() }, gateway)
}

fn compiled_manifests(manifests: &Manifests, gateway: Option<&str>) -> Outcome {
    let compiled = compile(&manifests.objects);
    let (placement, mut diagnostics) = (compiled.placement, compiled.diagnostics);
    diagnostics.extend(manifests.diagnostics.iter().cloned());
    sort_and_dedup(&mut diagnostics);
    let locality = gateway.map(GatewayLocality::named);
    // Policy servers version a placement by its content, encoded for the wire.
    let version = format!("{:016x}", Fingerprint::of(format!("{placement:?}").as_bytes()));
    Outcome { set: policy_for(&placement, locality.as_ref(), &version), placement, diagnostics }
}

/// The policy for one gateway or for a gateway without locality.
fn policy_for(placement: &Placement, gateway: Option<&GatewayLocality>, version: &str) -> GatewayPolicy {
    let peer = gateway.and_then(|gateway| placement.peer(&gateway.name));
    let locality = gateway.map(|gateway| gateway.resolve_zone(peer)).unwrap_or_default();
    let cluster = |gateway: &GatewayLocality| placement.cluster.clone().unwrap_or_default().for_gateway(gateway, peer);
    let vip = |vip: &VipSpec| gateway.map_or_else(|| vip.clone(), |gateway| gateway.vip(vip));
    GatewayPolicy {
        version: version.to_owned(),
        policies: placement.policies.to_vec(),
        vips: placement.vips.iter().map(vip).collect(),
        endpoints: placement.endpoints.to_vec(),
        services: placement.services.iter().map(|service| service.for_gateway(&locality)).collect(),
        cluster: gateway.map(cluster).unwrap_or_default(),
    }
}

fn compiled(documents: &[String]) -> Outcome {
    compiled_manifests(&manifests(&documents.join("---\n")), None)
}

fn compiled_for(gateway: &str, documents: &[String]) -> Outcome {
    compiled_manifests(&manifests(&documents.join("---\n")), Some(gateway))
}

/// The gateways of each port block of a VIP, home first: one of each listed shard, or one of each block by its slot.
fn block_orders(placement: &Placement, vip: &VipSpec) -> Vec<Vec<Arc<str>>> {
    let Some(reference) = &vip.shard_map else {
        return vip
            .shards
            .iter()
            .map(|shard| [std::slice::from_ref(&shard.gateway), &shard.backups].concat())
            .collect();
    };
    let map = shard_map(placement, &reference.map);
    let slot = |block: usize| (block + usize::from(reference.rotation)) % SLOTS;
    (0..SLOTS).map(|block| map.order(slot(block) as u16).to_vec()).collect()
}

fn shard_map<'a>(placement: &'a Placement, name: &str) -> &'a ShardMapSpec {
    placement.shard_maps.iter().find(|map| *map.name == *name).unwrap()
}

/// The gateways of an endpoint with a slot, home first.
fn slot_order<'a>(placement: &'a Placement, endpoint: &EndpointSpec) -> Option<&'a [Arc<str>]> {
    let slot = endpoint.slot.as_ref()?;
    let of_vip = |vip: &VipSpec| Some(vip.shard_map.as_ref()?.map.clone());
    let mut vips = endpoint.vips.iter().map(|own| placement.vips.iter().find(|vip| vip.address == *own).unwrap());
    let name = slot.map.clone().or_else(|| vips.find_map(of_vip)).unwrap();
    Some(shard_map(placement, &name).order(slot.slot))
}

/// The diagnostics as text, without their codes.
fn messages(compiled: &Outcome) -> Vec<String> {
    let message = |it: &Diagnostic| it.to_string().replace(&format!(" [{}]", it.code), "");
    compiled.diagnostics.iter().map(message).collect()
}

/// `address name policy vips` of every endpoint.
fn endpoints(compiled: &Outcome) -> Vec<String> {
    let set = &compiled.set;
    let endpoints = set.endpoints.iter().map(|endpoint| {
        let vips: Vec<_> = endpoint.vips.iter().map(ToString::to_string).collect();
        let policy = &endpoint.policy;
        format!("{} {} | {policy} | {}", endpoint.address, endpoint.name, vips.join(" "))
    });
    endpoints.collect()
}

/// `address announce name ports` of every VIP.
fn vips(compiled: &Outcome) -> Vec<String> {
    let vips = compiled.set.vips.iter();
    vips.map(|vip| format!("{} {:?} {} {:?}", vip.address, vip.announce, vip.name, vip.reserved_ports)).collect()
}

/// A `LoadBalancer` Service `a/{name}` in 5 lines, with `{extra}` in its metadata.
fn service(name: &str, extra: &str, port: u16, ingress: &[&str]) -> String {
    let ingress: Vec<_> = ingress.iter().map(|ip| format!("{{ip: \"{ip}\"}}")).collect();
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: a{extra}}}\n\
         spec: {{type: LoadBalancer, ports: [{{port: {port}}}]}}\n\
         status: {{loadBalancer: {{ingress: [{}]}}}}\n",
        ingress.join(", ")
    )
}

const EGRESS: &str = ", annotations: {vipgate.io/egress: \"true\"}";

/// The endpoint slice of Service `a/{service}` in 5 lines; the family is that of the first address.
fn slice(service: &str, addresses: &[&str]) -> String {
    let family = if addresses[0].contains(':') { "IPv6" } else { "IPv4" };
    let endpoints: Vec<_> = addresses
        .iter()
        .map(|a| {
            format!(
                "{{addresses: [\"{a}\"], targetRef: {{kind: Pod, name: {service}-{}}}}}",
                a.replace([':', '.'], "-")
            )
        })
        .collect();
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {service}-{}, namespace: a, labels: {{kubernetes.io/service-name: {service}}}}}\n\
         addressType: {family}\nendpoints: [{}]\n",
        addresses[0].replace([':', '.'], "-"),
        endpoints.join(", ")
    )
}

/// An `EgressPolicy` `a/{name}` in 4 lines, with `{extra}` in its metadata.
fn policy(name: &str, extra: &str, spec: &str) -> String {
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: {name}, namespace: a{extra}}}\n\
         spec: {spec}\n"
    )
}

/// A running pod in 5 lines.
fn pod(namespace: &str, name: &str, labels: &str, address: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}\n\
         spec: {{containers: []}}\nstatus: {{phase: Running, podIPs: [{{ip: \"{address}\"}}]}}\n"
    )
}

fn pool(name: &str, spec: &str) -> String {
    format!("apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

/// A `Gateway` in 4 lines; the last byte of its name is the last byte of its address.
fn gateway(name: &str, labels: &str) -> String {
    let last = name.bytes().last().unwrap();
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n\
         spec: {{peerAddress: 192.0.2.{last}}}\n"
    )
}

/// A `Gateway` with more fields in its `spec`.
fn gateway_with(name: &str, spec: &str) -> String {
    gateway(name, "").replace("spec: {", &format!("spec: {{{spec}, "))
}

fn namespace(name: &str, labels: &str) -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n")
}
