//! What manifests mean together: the policy that they come to, and every complaint with file, line and field.

mod cluster;
mod drained;
mod good;
mod inbound;
mod moves;
mod refused;
mod spread;
mod stable;

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::ports::{BLOCKS, BlockId};
use vipgate_dataplane::snapshot::spec::{EndpointSpec, PolicySet, ShareSpec, VipSpec};

use super::*;
use crate::manifest::{Manifests, Uncovered, read};
use crate::xds::resource::version_of;
use crate::yaml::Source;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The objects of a text, and what is wrong with single ones; `m.yaml` is its name.
fn manifests(text: &str) -> Manifests {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("m.yaml", text.to_owned())), Foreign::Refuse, &mut manifests);
    manifests
}

/// The objects of a text in which each is fine by itself.
fn objects(text: &str) -> Vec<Object> {
    let manifests = manifests(text);
    assert_eq!(manifests.complaints, [], "{text}");
    manifests.objects
}

/// A policy as one gateway, or nobody in particular, sees it.
struct Viewed {
    set: PolicySet,
    deal: Deal,
    complaints: Vec<Complaint>,
}

impl Viewed {
    fn accept(self) -> Result<(Deal, Vec<Complaint>), Complaints> {
        Compiled { deal: self.deal, complaints: self.complaints }.accept()
    }
}

fn viewed(objects: &[Object], gateway: Option<&str>) -> Viewed {
    seen(&Manifests { objects: objects.to_vec(), ..Manifests::default() }, gateway)
}

fn seen(manifests: &Manifests, gateway: Option<&str>) -> Viewed {
    let Compiled { deal, mut complaints } = compile(&manifests.objects);
    complaints.extend(manifests.complaints.iter().cloned());
    settle(&mut complaints);
    let viewer = gateway.map(Viewer::named);
    Viewed { set: deal.part_of(viewer.as_ref(), &version_of(&deal)), deal, complaints }
}

fn compiled(documents: &[String]) -> Viewed {
    seen(&manifests(&documents.join("---\n")), None)
}

fn compiled_for(gateway: &str, documents: &[String]) -> Viewed {
    seen(&manifests(&documents.join("---\n")), Some(gateway))
}

fn said(compiled: &Viewed) -> Vec<String> {
    compiled.complaints.iter().map(ToString::to_string).collect()
}

/// `address name policy vips` of every endpoint.
fn endpoints(compiled: &Viewed) -> Vec<String> {
    let set = &compiled.set;
    let endpoints = set.endpoints.iter().map(|endpoint| {
        let vips: Vec<_> = endpoint.vips.iter().map(ToString::to_string).collect();
        let policy = &endpoint.policy;
        format!("{} {} | {policy} | {}", endpoint.address, endpoint.name, vips.join(" "))
    });
    endpoints.collect()
}

/// `address name ports` of every VIP.
fn vips(compiled: &Viewed) -> Vec<String> {
    let vips = compiled.set.vips.iter();
    vips.map(|vip| format!("{} {:?} {} {:?}", vip.address, vip.announce, vip.name, vip.reserved_ports)).collect()
}

/// A `LoadBalancer` Service `a/{name}` in 5 lines: `{extra}` is put into its metadata.
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

/// An `EgressPolicy` `a/{name}` in 4 lines and those of the specification.
fn policy(name: &str, extra: &str, spec: &str) -> String {
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: {name}, namespace: a{extra}}}\nspec: {spec}\n"
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

/// A `Gateway` in 4 lines; the last letter of its name is in its address.
fn gateway(name: &str, labels: &str) -> String {
    let last = name.bytes().last().unwrap();
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: Gateway\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n\
         spec: {{peerAddress: 192.0.2.{last}}}\n"
    )
}

/// With this in its specification too.
fn gateway_with(name: &str, spec: &str) -> String {
    gateway(name, "").replace("spec: {", &format!("spec: {{{spec}, "))
}

fn namespace(name: &str, labels: &str) -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n")
}
