//! Endpoint slices: addresses and localities of the endpoints of each Service, and whose addresses they are.
//!
//! Whoever may write a slice may write any address into it. So an address counts only if nobody else has it: no VIP, and no
//! pod but the one that the slice refers to. With strict tenancy, and where pods are known, it is a pod's of the slice's
//! namespace, or outside of the cluster.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashSet;

use super::claim::Inputs;
use super::gateways::Locality;
use super::inventory::{NamespacedName, ObjectRef};
use super::pods::CoveredAddress;
use super::tenancy::Tenancy;
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{EndpointSlice, SliceEndpoint};

/// Whose an address of a slice is.
enum Owner<'p> {
    /// A pod that the slice may name: `namespace/pod`.
    Pod(&'p Arc<str>),
    /// The node of the slice's pod, which is on the host network.
    Host,
    /// Nobody that is known.
    Unknown,
}

/// Why an address of a slice is ignored.
struct Ignored {
    code: Code,
    reason: String,
}

/// Whether the pod `namespace/name` is in a namespace.
fn is_in(path: &str, namespace: &str) -> bool {
    path.split_once('/').is_some_and(|(of, _)| of == namespace)
}

fn ignored(reason: String) -> Ignored {
    Ignored { code: Code::SliceAddressOfOther, reason }
}

impl<'a> Inputs<'a> {
    /// Whether slices are checked against pods.
    fn verifies_slices(&self) -> bool {
        self.tenancy == Tenancy::Strict && self.pods.are_known()
    }

    /// Whether there is a manifest of the pod `namespace/name`.
    fn is_pod(&self, path: &str) -> bool {
        path.split_once('/').is_some_and(|key| self.inventory.has_pod(key))
    }

    /// The subset of `addresses` that are addresses of pods or hosts, or of endpoints of any Service.
    pub(super) fn in_use_among(&self, addresses: &HashSet<IpAddr>) -> HashSet<IpAddr> {
        let slices = self.inventory.slices().flat_map(|slice| &slice.body.endpoints);
        let of_slices = slices.map(|endpoint| endpoint.address).filter(|address| addresses.contains(address));
        let is_used = |it: &IpAddr| self.pods.name_of(*it).is_some() || self.pods.host_of(*it).is_some();
        of_slices.chain(addresses.iter().copied().filter(is_used)).collect()
    }

    /// Whose an endpoint's address is, unless it is ignored.
    fn owner_of(&self, slice: &ObjectRef<'a, EndpointSlice>, endpoint: &SliceEndpoint) -> Result<Owner<'a>, Ignored> {
        let SliceEndpoint { address, pod, uid, .. } = endpoint;
        if self.vips.contains(address) {
            return Err(Ignored {
                code: Code::BackendIsVip,
                reason: format!("{address} is a VIP, not a pod address: ignored"),
            });
        }
        if self.pods.is_disputed(*address) {
            return Err(ignored(format!("{address} is the address of several pods: ignored")));
        }
        let namespace = slice.id.namespace.as_str();
        if let Some(holder) = self.pods.holder(*address) {
            let is_same = *holder.name == **pod && uid.as_deref().zip(holder.uid).is_none_or(|(a, b)| a == b);
            // A pod without a manifest may be one of the same namespace that was renamed in one place only.
            if !pod.is_empty() && !is_same && (!is_in(pod, holder.namespace) || self.is_pod(pod)) {
                return Err(ignored(format!("{address} is the address of another pod than {pod}: ignored")));
            }
            if self.tenancy == Tenancy::Strict && holder.namespace != namespace {
                return Err(ignored(format!("{address} is the address of a pod of another namespace: ignored")));
            }
            return Ok(Owner::Pod(&holder.name));
        }
        if self.pods.host_of(*address).is_some() {
            if self.verifies_slices() && !self.pods.is_of_host_pod(*address, namespace) {
                let reason =
                    format!("{address} is an address of a host, and no pod of this namespace is there: ignored");
                return Err(ignored(reason));
            }
            return Ok(Owner::Host);
        }
        if !self.verifies_slices() {
            return Ok(Owner::Unknown);
        }
        if !pod.is_empty() && self.is_pod(pod) {
            return Err(ignored(format!("{address} is not an address of Pod {pod}: ignored")));
        }
        if self.cluster.contains(*address) || self.gateways.with_peer_address(*address).is_some() {
            return Err(ignored(format!("{address} is an address of the cluster, and no pod has it: ignored")));
        }
        Ok(Owner::Unknown)
    }

    /// The endpoints of a Service whose addresses count, with their slices. `diagnostics`: about the others.
    pub(super) fn endpoints_of(
        &self,
        service: NamespacedName<'a>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Vec<(&ObjectRef<'a, EndpointSlice>, &'a SliceEndpoint)> {
        let slices = self.inventory.slices_of(service);
        let mut found = Vec::with_capacity(slices.clone().map(|slice| slice.body.endpoints.len()).sum());
        for slice in slices {
            for endpoint in &slice.body.endpoints {
                match self.owner_of(slice, endpoint) {
                    Ok(_) => found.push((slice, endpoint)),
                    Err(Ignored { code, reason }) => diagnostics.push(slice.warning(code, &endpoint.field(), reason)),
                }
            }
        }
        found
    }

    /// The pods among the endpoints of a Service. Warns of hosts: the egress policy doesn't cover their traffic.
    pub(super) fn covered_endpoints(
        &self,
        service: NamespacedName<'a>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Vec<CoveredAddress<'a>> {
        let slices = self.inventory.slices_of(service);
        let mut covers = Vec::with_capacity(slices.clone().map(|slice| slice.body.endpoints.len()).sum());
        for slice in slices {
            for endpoint in &slice.body.endpoints {
                let SliceEndpoint { address, pod, state, .. } = endpoint;
                let name = match self.owner_of(slice, endpoint) {
                    Ok(Owner::Pod(name)) => Some(name),
                    Ok(Owner::Unknown) => Some(pod),
                    Ok(Owner::Host) => {
                        // Which pods of other namespaces are on the host isn't said.
                        let reason = format!("{address} is a host address, not a pod address: ignored for egress");
                        diagnostics.push(slice.warning(Code::HostAddress, &endpoint.field(), reason));
                        None
                    }
                    // Two pods claim it, and one is this one: closed for both, unless it is a VIP.
                    Err(_) if self.pods.is_disputed(*address) && !self.vips.contains(address) => Some(pod),
                    Err(Ignored { code, reason }) => {
                        diagnostics.push(slice.warning(code, &endpoint.field(), reason));
                        None
                    }
                };
                if let Some(name) = name {
                    let locality = self.locality_of(endpoint);
                    covers.push(CoveredAddress { address: *address, name, locality, state: *state });
                }
            }
        }
        covers
    }

    /// Locality of an endpoint: from its slice, else from its pod.
    pub(super) fn locality_of(&self, endpoint: &'a SliceEndpoint) -> Locality<'a> {
        let (node, zone) = (endpoint.node.as_deref(), endpoint.zone.as_deref());
        if node.or(zone).is_some() { self.pods.locality(node, zone) } else { self.pods.locality_of(endpoint.address) }
    }
}
