//! Pods: their labels, where they are, and their addresses. Pods that ended have none any more, pods on the host's network
//! have the host's, which is nobody's tenant.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod as Document, PodStatus};

use super::read::Report;
use super::{annotation, unusable_address};
use crate::complaint::Severity;

/// What counts of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The node that it is on, if it is on one.
    pub node: Option<Arc<str>>,
    /// Whether its addresses are the node's.
    pub is_on_host_network: bool,
    /// The addresses that it has now, and the fields that they stand in.
    pub addresses: Vec<(Arc<str>, IpAddr)>,
    /// Its part of new sessions, beside those of others behind the same Service; 0: none.
    pub weight: u16,
}

/// The weight of a pod that has none.
pub const DEFAULT_WEIGHT: u16 = 1;
/// The greatest weight: one pod takes at most so many times what another does.
pub const MOST_WEIGHT: u16 = 256;

/// Reads a pod; addresses that it can't have are reported, and left out.
pub(super) fn read(document: Document, report: &mut Report<'_>) -> Pod {
    let spec = document.spec.unwrap_or_default();
    let is_on_host_network = spec.host_network.unwrap_or_default();
    let mut addresses = document.status.map(|status| addresses(&status, report)).unwrap_or_default();
    addresses.retain(|(field, address)| match unusable_address(*address).filter(|_| !is_on_host_network) {
        Some(what) => {
            report(Severity::Error, field, format!("{address} is {what}"));
            false
        }
        None => true,
    });
    annotation::complain_about_unknown(&document.metadata, &annotation::OF_PODS, report);
    let says = format!("a number from 0 to {MOST_WEIGHT}");
    let fits = |weight| weight <= u32::from(MOST_WEIGHT);
    let weight = annotation::number(&document.metadata, annotation::WEIGHT, fits, &says, report);
    let weight = weight.and_then(|weight| weight.try_into().ok()).unwrap_or(DEFAULT_WEIGHT);
    let labels = document.metadata.labels.unwrap_or_default();
    Pod { labels, node: spec.node_name.map(Arc::from), is_on_host_network, addresses, weight }
}

fn addresses(status: &PodStatus, report: &mut Report<'_>) -> Vec<(Arc<str>, IpAddr)> {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let list = status.pod_ips.iter().flatten().map(|address| address.ip.as_str()).enumerate();
    let mut given: Vec<_> = list.map(|(i, text)| (format!("status.podIPs[{i}].ip"), text)).collect();
    if given.is_empty() {
        given.extend(status.pod_ip.as_deref().map(|text| ("status.podIP".to_owned(), text)));
    }
    let mut addresses = Vec::new();
    for (field, text) in given.into_iter().filter(|(_, text)| !text.is_empty()) {
        match text.parse() {
            Ok(address) => addresses.push((field.into(), address)),
            Err(_) => report(Severity::Error, &field, format!("`{text}` is no address")),
        }
    }
    addresses
}
