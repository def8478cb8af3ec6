//! Cluster addresses: traffic to them is internal and not translated; traffic of pods that no policy covers doesn't
//! leave the cluster if so configured (RFC 2827).

use std::sync::Arc;

use super::prefixes::Prefixes;
use super::spec::ClusterSpec;
use crate::flow::address::Address;
use crate::policy::compiled::{Egress, Family, Policy};
use crate::policy::prefixes::prefix;

/// What an egress policy defines for a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DestinationMatch {
    /// Translated, or routed unchanged.
    pub(super) translated: bool,
    /// Length of the matching prefix.
    pub(super) length: u8,
}

/// Cluster addresses of one family.
#[derive(Clone, Debug)]
pub(super) struct ClusterPrefixes<A> {
    /// Pod addresses.
    pods: Prefixes<A, ()>,
    /// All cluster addresses, each with the length of its longest prefix.
    all: Prefixes<A, u8>,
}

impl<A: Address> ClusterPrefixes<A> {
    pub(super) fn new(spec: &ClusterSpec) -> Arc<Self> {
        let all = spec.pods.iter().chain(&spec.others).filter_map(|net| prefix(net, net.prefix_len()));
        Arc::new(Self {
            pods: Prefixes::new(spec.pods.iter().filter_map(|net| prefix(net, ()))),
            all: Prefixes::new(all),
        })
    }
}

impl Policy {
    /// The cluster addresses.
    pub fn cluster(&self) -> &ClusterSpec {
        &self.cluster
    }

    /// Whether an egress policy translates traffic to this destination. The longest prefix decides, among the policy's
    /// lists and the cluster addresses, which are internal; on equal length, the policy's destination wins. A VIP is
    /// translated wherever it lies.
    #[inline]
    pub fn translates<A: Family>(&self, egress: &Egress, destination: A) -> bool {
        let Some(DestinationMatch { translated: true, length }) = A::destinations(egress).find(destination) else {
            return false;
        };
        let stays = A::index(self).cluster.all.find(destination).is_some_and(|own| own > length);
        !stays || self.vip(destination).is_some_and(|vip| !vip.ports.retired)
    }

    /// Whether an egress policy translates what the pod with this address, if there is one, sends to a destination.
    pub fn translates_from<A: Family>(&self, pod: A, destination: A) -> bool {
        self.endpoint(pod).is_some_and(|(_, _, egress)| self.translates(egress, destination))
    }

    /// Whether it is a cluster address.
    pub fn is_cluster_address<A: Family>(&self, address: A) -> bool {
        A::index(self).cluster.all.find(address).is_some()
    }

    /// Whether it is a pod address, covered by policy or not.
    pub fn is_pod<A: Family>(&self, address: A) -> bool {
        A::index(self).cluster.pods.find(address).is_some()
    }
}
