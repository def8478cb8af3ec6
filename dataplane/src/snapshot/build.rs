//! Building snapshots, on the control thread: from descriptions to what the stages read.
//!
//! The builder decides when the generation moves on, and whom that concerns, so that sessions are checked again only when
//! something changed that could matter to them: their own policy, routes or interfaces, but not a neighbour's link address.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::Snapshot;
use super::change::PolicyChange;
use super::check::{self, BuildError};
use super::freshness::Freshness;
use super::hops::{MOST_HOPS, build_network};
use super::members::{GatewayId, MembersSpec};
use super::network::{HopId, Network};
use super::policy::{Egress, Policy};
use super::rebuild::Rebuild;
use super::service::{Listener, Service};
use super::spec::{NetworkSpec, PolicySet};
use super::tunnels::Tunnels;
use super::uses::Uses;
use crate::address::{Address, V6};
use crate::io::InterfaceId;

/// VIPs that a gateway can serve, retired ones included.
pub const MOST_VIPS: usize = 16_384;
/// Endpoints of one address family that a gateway can serve: with VIPs and its own addresses, what the steering program holds.
pub const MOST_ENDPOINTS: usize = 262_144;
/// Nodes of the overlay network that a gateway can serve.
pub const MOST_NODES: usize = 65_536;
/// Prefixes of the cluster's own addresses: what the steering program holds.
pub const MOST_RANGES: usize = 131_072;
/// Ports of backends of one address family that a gateway can serve: what the steering program holds.
pub const MOST_BACKENDS: usize = 524_288;

/// Builds one snapshot after the other.
#[derive(Debug)]
pub struct Builder {
    policy: Arc<Policy>,
    freshness: Arc<Freshness>,
    uses: Uses,
    network: Arc<Network>,
    network_spec: NetworkSpec,
    hop_numbers: HashMap<(InterfaceId, IpAddr), HopId>,
    /// Where nodes of the overlay network reach this gateway.
    overlay: Option<SocketAddr>,
    tunnels: Arc<Tunnels>,
}

impl Builder {
    /// A builder that knows the network and no policy yet.
    pub fn new(network: NetworkSpec) -> Self {
        let mut hop_numbers = HashMap::new();
        let network_built = Arc::new(build_network(&network, &mut hop_numbers));
        Self {
            policy: Arc::new(Policy::empty()),
            freshness: Arc::new(Freshness::new(1)),
            uses: Uses::default(),
            network: network_built,
            network_spec: network,
            hop_numbers,
            overlay: None,
            tunnels: Arc::default(),
        }
    }

    /// The same, with an address and a port at which nodes of the overlay network reach this gateway. Without, it is no part of it.
    #[must_use]
    pub fn at_overlay(mut self, address: Option<SocketAddr>) -> Self {
        self.overlay = address;
        self.dig();
        self
    }

    /// Makes the tunnels anew, of what is known now.
    fn dig(&mut self) {
        self.tunnels = Arc::new(Tunnels::new(&self.policy, self.overlay, &self.network));
    }

    /// The snapshot of what the builder was last given.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            generation: self.freshness.generation(),
            freshness: self.freshness.clone(),
            policy: self.policy.clone(),
            network: self.network.clone(),
            tunnels: self.tunnels.clone(),
        }
    }

    /// The number of a gateway that policy or the list of gateways names.
    pub fn gateway(&self, name: &str) -> Option<GatewayId> {
        self.policy.members.id(name)
    }

    /// The policy of this name, as it was last built.
    pub fn egress(&self, name: &str) -> Option<&Egress> {
        let id = self.uses.egress.get(name)?;
        self.policy.egress.get(id.0 as usize)?.as_deref()
    }

    /// The Service of this name, as it was last built.
    pub fn service(&self, name: &str) -> Option<&Service> {
        self.policy.service(*self.uses.services.get(name)?)
    }

    /// Whether a backend of any Service listens at an address and port, by a protocol.
    pub fn is_listener(&self, (address, port, protocol): (IpAddr, u16, u8)) -> bool {
        let frontends = match address {
            IpAddr::V4(v4) => self.policy.frontends_of(&Listener { address: v4.to_bits(), port, protocol }),
            IpAddr::V6(v6) => {
                self.policy.frontends_of(&Listener { address: V6::from_bits(v6.to_bits()), port, protocol })
            }
        };
        !frontends.is_empty()
    }

    /// What it has counted.
    #[cfg(test)]
    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    /// The snapshot with another network. The generation moves on unless only neighbours have changed.
    pub fn with_network(&mut self, network: NetworkSpec) -> Snapshot {
        let routes_changed =
            network.routes != self.network_spec.routes || network.interfaces != self.network_spec.interfaces;
        // Numbers of neighbours that are gone are kept, so that no session's number changes its meaning; when they run
        // out, all are dealt anew under a new generation.
        let used_up = self.hop_numbers.len() + network.neighbours.len() > MOST_HOPS;
        if used_up {
            self.hop_numbers.clear();
        }
        if routes_changed || used_up {
            let mut freshness = self.freshness.next();
            freshness.touch_all();
            self.freshness = Arc::new(freshness);
        }
        self.network = Arc::new(build_network(&network, &mut self.hop_numbers));
        self.network_spec = network;
        self.dig();
        self.snapshot()
    }

    /// The snapshot with other states of gateways; the generation moves on. Sessions of VIPs whose shares change hands are checked
    /// anew.
    pub fn with_members(&mut self, spec: &MembersSpec) -> Snapshot {
        let mut rebuild = Rebuild::new((*self.policy).clone(), self.freshness.next(), &mut self.uses);
        rebuild.set_members(spec);
        let (policy, freshness) = rebuild.finish();
        self.policy = Arc::new(policy);
        self.freshness = Arc::new(freshness);
        self.dig();
        self.snapshot()
    }

    /// The snapshot with another policy, given whole; the generation moves on.
    ///
    /// # Errors
    /// When the description contradicts itself; nothing has changed then.
    pub fn with_policy(&mut self, set: &PolicySet) -> Result<Snapshot, BuildError> {
        check::whole(set)?;
        let change = PolicyChange::replacing(&self.policy, set);
        self.with_change(&change)
    }

    /// The snapshot with a changed policy; the generation moves on. What it costs depends on the change, hardly on the policy.
    ///
    /// # Errors
    /// When the change contradicts itself or the policy; nothing has changed then.
    pub fn with_change(&mut self, change: &PolicyChange) -> Result<Snapshot, BuildError> {
        check::change(&self.policy, &self.uses, change)?;
        let mut rebuild = Rebuild::new((*self.policy).clone(), self.freshness.next(), &mut self.uses);
        rebuild.apply(change);
        let (policy, freshness) = rebuild.finish();
        self.policy = Arc::new(policy);
        self.freshness = Arc::new(freshness);
        // A change may bring gateways, too, that nobody has spoken of yet: they have no ways.
        if change.nodes.is_some() {
            self.dig();
        }
        Ok(self.snapshot())
    }
}

/// A prefix as prefix sets take it, if it is of this family.
pub(super) fn prefix<A: Address, T>(net: &ipnet::IpNet, value: T) -> Option<(A, u8, T)> {
    Some((A::from_ip(net.network())?, net.prefix_len(), value))
}
