//! Pods: labels, node, addresses and weight. Terminated pods have no addresses; those of host-network pods are the
//! node's.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod as Document, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{annotation, unusable_address};
use crate::diagnostic::{Code, Report, Severity};

/// The fields of a Pod that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub labels: BTreeMap<String, String>,
    /// `metadata.uid`, if set.
    pub uid: Option<Arc<str>>,
    /// What decides whether it has its addresses, if another pod claims them, too.
    pub life: Life,
    /// Its node, if scheduled.
    pub node: Option<Arc<str>>,
    /// Whether its addresses are the node's.
    pub is_on_host_network: bool,
    /// Its current addresses, with their fields.
    pub addresses: Vec<(Arc<str>, IpAddr)>,
    /// Its relative weight for new sessions among the backends of a Service; 0: none.
    pub weight: u16,
}

/// Where a pod is in its life. An address is given to a new pod when an old one has released it, but the manifest of the
/// old one may still name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Whether it is being deleted.
    pub is_terminating: bool,
    /// Whether it is ready.
    pub is_ready: bool,
    /// `metadata.creationTimestamp`.
    pub created: Option<Time>,
}

impl Life {
    /// Which of two pods with the same address has it now: the greater one; `None`: their manifests don't say.
    pub fn compare(&self, other: &Self) -> Option<Ordering> {
        let is_terminating = other.is_terminating.cmp(&self.is_terminating);
        if is_terminating.is_ne() {
            return Some(is_terminating);
        }
        let age = self.created.as_ref().zip(other.created.as_ref()).map_or(Ordering::Equal, |(a, b)| a.cmp(b));
        match (self.is_ready.cmp(&other.is_ready), age) {
            (Ordering::Equal, Ordering::Equal) => None,
            (Ordering::Equal, only) | (only, Ordering::Equal) => Some(only),
            (ready, age) => (ready == age).then_some(age),
        }
    }

    /// Why this pod has an address, and the other one doesn't.
    pub fn reason(&self, other: &Self) -> &'static str {
        match () {
            () if other.is_terminating && !self.is_terminating => "the other one is being deleted",
            () if self.created > other.created => "it is the younger one",
            () => "the other one is not ready",
        }
    }
}

/// Weight of a pod without the annotation.
pub const DEFAULT_WEIGHT: u16 = 1;
/// Maximum weight.
pub const MAX_WEIGHT: u16 = 256;

/// Reads a pod; invalid addresses are reported and left out.
pub(super) fn read(document: Document, report: &mut Report<'_>) -> Pod {
    let life = life(&document);
    let spec = document.spec.unwrap_or_default();
    let is_on_host_network = spec.host_network.unwrap_or_default();
    let mut addresses = document.status.map(|status| addresses(&status, report)).unwrap_or_default();
    addresses.retain(|(field, address)| match unusable_address(*address).filter(|_| !is_on_host_network) {
        Some(what) => {
            report(Severity::Error, Code::NotAPodAddress, field, format!("{address} is {what}"));
            false
        }
        None => true,
    });
    annotation::warn_about_unknown(&document.metadata, &annotation::POD_ANNOTATIONS, report);
    let expected = format!("a number from 0 to {MAX_WEIGHT}");
    let is_valid = |weight| weight <= u32::from(MAX_WEIGHT);
    let weight = annotation::number(&document.metadata, annotation::WEIGHT, is_valid, &expected, report);
    let weight = weight.and_then(|weight| weight.try_into().ok()).unwrap_or(DEFAULT_WEIGHT);
    let uid = document.metadata.uid.map(Arc::from);
    let labels = document.metadata.labels.unwrap_or_default();
    Pod { labels, uid, life, node: spec.node_name.map(Arc::from), is_on_host_network, addresses, weight }
}

fn life(document: &Document) -> Life {
    let conditions = document.status.iter().flat_map(|status| status.conditions.iter().flatten());
    Life {
        is_terminating: document.metadata.deletion_timestamp.is_some(),
        is_ready: conditions.into_iter().any(|it| it.type_ == "Ready" && it.status == "True"),
        created: document.metadata.creation_timestamp.clone(),
    }
}

fn addresses(status: &PodStatus, report: &mut Report<'_>) -> Vec<(Arc<str>, IpAddr)> {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let list = status.pod_ips.iter().flatten().map(|address| address.ip.as_str()).enumerate();
    let mut texts: Vec<_> = list.map(|(i, text)| (format!("status.podIPs[{i}].ip"), text)).collect();
    if texts.is_empty() {
        texts.extend(status.pod_ip.as_deref().map(|text| ("status.podIP".to_owned(), text)));
    }
    let mut addresses = Vec::new();
    for (field, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
        match text.parse() {
            Ok(address) => addresses.push((field.into(), address)),
            Err(_) => {
                report(Severity::Error, Code::MalformedValue, &field, format!("`{text}` is not an IP address"));
            }
        }
    }
    addresses
}
