//! The cluster's own addresses: what goes to one of them stays inside and isn't translated, and what comes from a pod that no policy
//! covers doesn't leave the cluster (RFC 2827), where that is wanted.

use std::sync::Arc;

use super::build::prefix;
use super::policy::{Egress, Family, Policy};
use super::prefixes::Prefixes;
use super::spec::ClusterSpec;
use crate::address::Address;

/// What an egress policy says of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Translated, or routed unchanged.
    pub(super) translated: bool,
    /// The length of the prefix that says so.
    pub(super) length: u8,
}

/// The cluster's addresses of one family.
#[derive(Clone, Debug)]
pub(super) struct Ranges<A> {
    /// Pods'.
    pods: Prefixes<A, ()>,
    /// Everybody's, with the length of the longest prefix.
    inside: Prefixes<A, u8>,
}

impl<A: Address> Ranges<A> {
    pub(super) fn new(spec: &ClusterSpec) -> Arc<Self> {
        let inside = spec.pods.iter().chain(&spec.others).filter_map(|net| prefix(net, net.prefix_len()));
        Arc::new(Self {
            pods: Prefixes::new(spec.pods.iter().filter_map(|net| prefix(net, ()))),
            inside: Prefixes::new(inside),
        })
    }
}

impl Policy {
    /// The cluster's own addresses, as they were told.
    pub fn cluster(&self) -> &ClusterSpec {
        &self.cluster
    }

    /// Whether an egress policy translates what goes to this destination. The longest prefix decides: of the policy's lists, or of the
    /// cluster's own addresses, which stay inside. Those yield to a destination that the policy names by a prefix as long, and a VIP is a
    /// VIP wherever it lies.
    #[inline]
    pub fn translates<A: Family>(&self, egress: &Egress, destination: A) -> bool {
        let Some(Reach { translated: true, length }) = A::destinations(egress).find(destination) else { return false };
        let stays = A::index(self).ranges.inside.find(destination).is_some_and(|own| own > length);
        !stays || self.vip(destination).is_some_and(|vip| !vip.retired)
    }

    /// Whether an address is one of the cluster's own.
    pub fn is_inside<A: Family>(&self, address: A) -> bool {
        A::index(self).ranges.inside.find(address).is_some()
    }

    /// Whether an address is a pod's, covered or not, as far as pods' addresses are known.
    pub fn is_pod<A: Family>(&self, address: A) -> bool {
        A::index(self).ranges.pods.find(address).is_some()
    }
}
