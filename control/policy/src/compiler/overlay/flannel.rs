//! Nodes of flannel's VXLAN backend, by the annotations that flannel writes to Nodes.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::Node;
use serde::Deserialize;

use super::{Candidate, Fault, internal_address, pod_cidrs};
use crate::diagnostic::{Code, Severity};
use crate::manifest::{Family, MacAddress, unusable_address};

/// Flannel's port, as Linux' default.
const PORT: u16 = 8472;
/// Flannel's VXLAN network identifier, unless its configuration has another one.
const VNI: u32 = 1;
const BACKEND_TYPE: &str = "flannel.alpha.coreos.com/backend-type";
/// Annotations of a family: backend data, and address of the tunnel endpoint.
const ANNOTATIONS: [(Family, &str, &str); 2] = [
    (Family::V4, "flannel.alpha.coreos.com/backend-data", "flannel.alpha.coreos.com/public-ip"),
    (Family::V6, "flannel.alpha.coreos.com/backend-v6-data", "flannel.alpha.coreos.com/public-ipv6"),
];

/// The tunnel endpoint of one family.
#[derive(Debug, Deserialize)]
struct BackendData {
    #[serde(rename = "VNI", default = "default_vni")]
    vni: u32,
    #[serde(rename = "VtepMAC")]
    mac: String,
}

fn default_vni() -> u32 {
    VNI
}

/// The tunnel endpoint of a node; `None`: flannel doesn't use VXLAN there.
pub(super) fn of_node(node: &Node) -> Option<Result<Candidate, Fault>> {
    if text(node, BACKEND_TYPE)? != "vxlan" {
        return None;
    }
    // One endpoint carries pods' packets of both families.
    let mut families = ANNOTATIONS.into_iter();
    let (family, data, address) = families.find(|(_, data, _)| text(node, data).is_some())?;
    Some(read(node, family, data, address))
}

fn read(node: &Node, family: Family, data_name: &str, address_name: &str) -> Result<Candidate, Fault> {
    let field = |name: &str| format!("metadata.annotations[{name}]");
    let fault = |name: &str, reason: String| Fault { code: Code::MalformedValue, field: field(name), reason };
    let malformed = |reason: String| fault(data_name, reason);
    let data: BackendData = serde_json::from_str(text(node, data_name).unwrap_or_default())
        .map_err(|error| malformed(error.to_string()))?;
    let mac: MacAddress = data.mac.parse().map_err(|error| malformed(format!("{error}")))?;
    if data.vni >= 1 << 24 {
        return Err(malformed(format!("VNI {} has more than 24 bits", data.vni)));
    }
    let (address_field, address) = if let Some(text) = text(node, address_name) {
        let is_usable = |it: &IpAddr| Family::of(*it) == family && unusable_address(*it).is_none();
        let address = text.parse().ok().filter(is_usable);
        let reason = || fault(address_name, format!("`{text}` is not an {family} address of a node"));
        (field(address_name), address.ok_or_else(reason)?)
    } else {
        let (at, address) = internal_address(node, |it| Family::of(it) == family)
            .ok_or_else(|| fault(address_name, format!("is missing, and there is no {family} InternalIP")))?;
        (format!("status.addresses[{at}].address"), address)
    };
    let (prefixes_field, prefixes) = pod_cidrs(node);
    Ok(Candidate {
        address: SocketAddr::new(address, PORT),
        address_field,
        vni: data.vni,
        mac: mac.0,
        agents: None,
        prefixes,
        prefixes_field,
        // Where gateways are no part of flannel's network, nothing of this counts.
        conflict: Severity::Warning,
    })
}

/// The text of an annotation; flannel writes `null` for a family that it doesn't use.
fn text<'a>(node: &'a Node, name: &str) -> Option<&'a str> {
    let text = node.metadata.annotations.as_ref()?.get(name)?.trim();
    (!text.is_empty() && text != "null").then_some(text)
}
