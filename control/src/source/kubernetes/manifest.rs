//! Objects of the API as manifests: named `Kind/namespace/name`, with the fields that policy is made of.
//!
//! What changes without meaning (managed fields, resource versions, node heartbeats) is left out, so that it causes no
//! update.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kube::api::DynamicObject;
use kube::core::ObjectMeta;
use serde_json::{Map, Value, json};
use vipgate_policy::manifest::{FIELD_MANAGER, Kind, is_own_status};

use super::observed::has_observations;

/// Prefix of vipgate's own annotations.
const ANNOTATION_PREFIX: &str = "vipgate.io/";
/// Flannel's annotations of nodes that describe their VXLAN tunnel endpoints.
const FLANNEL_ANNOTATIONS: [&str; 5] = [
    "flannel.alpha.coreos.com/backend-type",
    "flannel.alpha.coreos.com/backend-data",
    "flannel.alpha.coreos.com/backend-v6-data",
    "flannel.alpha.coreos.com/public-ip",
    "flannel.alpha.coreos.com/public-ipv6",
];

/// An object of the API as a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    /// `Kind/namespace/name`, or `Kind/name` of a cluster-scoped object.
    pub(super) name: Arc<str>,
    pub(super) document: Value,
    /// Of the document: what two versions are compared by, of which one isn't kept.
    pub(super) hash: u64,
    /// Whether it is a policy that selects pods by labels.
    pub(super) selects_pods: bool,
    /// What is no part of policy, of kinds that have a status or events of the server's.
    pub(super) observation: Option<Observation>,
}

/// The hash of a document.
pub(super) fn hash(document: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    document.hash(&mut hasher);
    hasher.finish()
}

/// What the API says of an object besides its manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Observation {
    pub(super) uid: Arc<str>,
    pub(super) generation: i64,
    /// Of vipgate's own kinds; without what is in the manifest.
    pub(super) status: Option<Value>,
}

/// The name of an object.
pub(super) fn name(kind: Kind, metadata: &ObjectMeta) -> Arc<str> {
    let name = metadata.name.as_deref().unwrap_or_default();
    match metadata.namespace.as_deref() {
        Some(namespace) if kind.is_namespaced() => format!("{}/{namespace}/{name}", kind.as_str()).into(),
        _ => format!("{}/{name}", kind.as_str()).into(),
    }
}

/// The manifest of an object.
pub(super) fn manifest(kind: Kind, object: DynamicObject) -> Manifest {
    let DynamicObject { metadata, mut data, .. } = object;
    let name = name(kind, &metadata);
    let observation = observation(kind, &metadata, &data);
    if let Some(Value::Array(endpoints)) = data.get_mut("endpoints") {
        for reference in endpoints.iter_mut().filter_map(|endpoint| endpoint.get_mut("targetRef")) {
            *reference = kept(reference, &["kind", "namespace", "name", "uid"]);
        }
    }
    let mut document = kept(&data, fields(kind));
    document["apiVersion"] = kind.api_version().into();
    document["kind"] = kind.as_str().into();
    document["metadata"] = kept_metadata(kind, metadata);
    if kind == Kind::Pod && is_ready(&data) {
        // Without its time and other conditions, which change all the time.
        document["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    }
    let selectors = data.pointer("/spec/selectors").and_then(Value::as_array);
    Manifest {
        name,
        hash: hash(&document),
        document,
        selects_pods: is_policy(kind) && selectors.is_some_and(|selectors| !selectors.is_empty()),
        observation,
    }
}

/// Whether a pod is ready.
fn is_ready(pod: &Value) -> bool {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    conditions.into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

fn observation(kind: Kind, metadata: &ObjectMeta, data: &Value) -> Option<Observation> {
    let uid = metadata.uid.as_deref().filter(|_| has_observations(kind))?.into();
    let status = data.get("status").filter(|_| kind.is_custom()).map(|status| match status.as_object() {
        Some(fields) if kind == Kind::AddressPool => without_record(fields),
        _ => status.clone(),
    });
    Some(Observation { uid, generation: metadata.generation.unwrap_or_default(), status })
}

/// The status of a pool without the record of its addresses, which is a part of the manifest.
fn without_record(status: &Map<String, Value>) -> Value {
    let others = status.iter().filter(|(field, _)| *field != "addresses");
    others.map(|(field, value)| (field.clone(), value.clone())).collect()
}

/// Whether objects of this kind may select pods by labels.
pub(super) fn is_policy(kind: Kind) -> bool {
    matches!(kind, Kind::EgressPolicy | Kind::ClusterEgressPolicy)
}

/// The fields that policy is made of, besides metadata.
fn fields(kind: Kind) -> &'static [&'static str] {
    match kind {
        // Who has its addresses, and had them.
        Kind::AddressPool => &["spec", "status.addresses"],
        Kind::ClusterEgressPolicy | Kind::EgressPolicy | Kind::Gateway | Kind::OverlayNode | Kind::ServiceCidr => {
            &["spec"]
        }
        Kind::EndpointSlice => &["addressType", "endpoints", "ports"],
        Kind::Namespace => &[],
        Kind::Node => &["spec.podCIDR", "spec.podCIDRs", "status.addresses"],
        Kind::Pod => &["spec.nodeName", "spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs"],
        Kind::Service => &[
            "spec.type",
            "spec.loadBalancerClass",
            "spec.loadBalancerIP",
            "spec.ipFamilies",
            "spec.ipFamilyPolicy",
            "spec.ports",
            "spec.sessionAffinity",
            "spec.sessionAffinityConfig",
            "spec.loadBalancerSourceRanges",
            "spec.externalTrafficPolicy",
            "spec.internalTrafficPolicy",
            "spec.healthCheckNodePort",
            "status.loadBalancer",
        ],
    }
}

/// A map with only these fields (`field` or `field.field`) of another one.
fn kept(value: &Value, fields: &[&str]) -> Value {
    let mut kept = Map::new();
    for field in fields {
        match field.split_once('.') {
            None => {
                kept.extend(value.get(field).map(|value| ((*field).to_owned(), value.clone())));
            }
            Some((outer, inner)) => {
                let Some(value) = value.get(outer).and_then(|value| value.get(inner)) else { continue };
                kept.entry(outer).or_insert_with(|| json!({}))[inner] = value.clone();
            }
        }
    }
    Value::Object(kept)
}

fn kept_metadata(kind: Kind, metadata: ObjectMeta) -> Value {
    let mut kept = json!({"name": metadata.name});
    if kind.is_namespaced() {
        kept["namespace"] = metadata.namespace.into();
    }
    if let Some(labels) = metadata.labels.filter(|labels| !labels.is_empty()) {
        kept["labels"] = json!(labels);
    }
    let mut annotations = metadata.annotations.unwrap_or_default();
    let is_flannels = |name: &str| kind == Kind::Node && FLANNEL_ANNOTATIONS.contains(&name);
    annotations.retain(|name, _| name.starts_with(ANNOTATION_PREFIX) || is_flannels(name));
    if !annotations.is_empty() {
        kept["annotations"] = json!(annotations);
    }
    if let Some(created) = metadata.creation_timestamp {
        kept["creationTimestamp"] = json!(created);
    }
    if kind == Kind::Pod {
        // Which of two pods has an address.
        for (field, value) in [("uid", json!(metadata.uid)), ("deletionTimestamp", json!(metadata.deletion_timestamp))]
        {
            if !value.is_null() {
                kept[field] = value;
            }
        }
    }
    if kind == Kind::Service && metadata.managed_fields.iter().flatten().any(is_own_status) {
        // Without its time, and without other managers.
        kept["managedFields"] = json!([{"manager": FIELD_MANAGER, "fieldsV1": {"f:status": {}}}]);
    }
    kept
}

#[cfg(test)]
mod tests;
