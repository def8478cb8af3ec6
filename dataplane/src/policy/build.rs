//! Snapshot builder: builds snapshots from specs, on the control thread.
//!
//! It also decides when the generation advances and which sessions that affects, so that only sessions with a changed
//! policy, route or interface are revalidated, and none for a neighbor's new MAC address.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::Snapshot;
use super::change::PolicyChange;
use super::freshness::Freshness;
use super::members::MembersSpec;
use super::network::{Network, NextHopId};
use super::rebuild::Rebuild;
use super::service::Service;
use super::spec::NetworkSpec;
use super::tunnels::Tunnels;
use crate::flow::address::V6;
use crate::flow::ids::{GatewayId, InterfaceId};
use crate::flow::listener::Listener;
use crate::policy::compiled::{Egress, Policy};
use crate::policy::network_builder::{MAX_NEXT_HOPS, build_network};
use crate::policy::references::References;
use crate::policy::validation;
use crate::policy::validation::BuildError;

/// Builds each snapshot from the previous one.
#[derive(Debug)]
pub struct Builder {
    policy: Arc<Policy>,
    freshness: Arc<Freshness>,
    references: References,
    network: Arc<Network>,
    network_spec: NetworkSpec,
    next_hop_ids: HashMap<(InterfaceId, IpAddr), NextHopId>,
    /// The VXLAN address and port for overlay nodes.
    overlay: Option<SocketAddr>,
    tunnels: Arc<Tunnels>,
}

impl Builder {
    /// A builder with a network and without policy.
    pub fn new(network: NetworkSpec) -> Self {
        let mut next_hop_ids = HashMap::new();
        let built = Arc::new(build_network(&network, &mut next_hop_ids));
        Self {
            policy: Arc::new(Policy::empty()),
            freshness: Arc::new(Freshness::new(1)),
            references: References::default(),
            network: built,
            network_spec: network,
            next_hop_ids,
            overlay: None,
            tunnels: Arc::default(),
        }
    }

    /// Sets the VXLAN address and port for overlay nodes; `None`: no overlay network.
    #[must_use]
    pub fn with_overlay(mut self, address: Option<SocketAddr>) -> Self {
        self.overlay = address;
        self.rebuild_tunnels();
        self
    }

    /// Rebuilds the tunnels from policy and network.
    fn rebuild_tunnels(&mut self) {
        self.tunnels = Arc::new(Tunnels::new(&self.policy, self.overlay, &self.network));
    }

    /// The current snapshot.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            generation: self.freshness.generation(),
            freshness: self.freshness.clone(),
            policy: self.policy.clone(),
            network: self.network.clone(),
            tunnels: self.tunnels.clone(),
        }
    }

    /// The number of a gateway in policy or membership.
    pub fn gateway_id(&self, name: &str) -> Option<GatewayId> {
        self.policy.members.id(name)
    }

    /// The egress policy of this name.
    pub fn egress(&self, name: &str) -> Option<&Egress> {
        let id = self.references.egress.get(name)?;
        self.policy.egress.get(id.0 as usize)?.as_deref()
    }

    /// The Service of this name.
    pub fn service(&self, name: &str) -> Option<&Service> {
        self.policy.service(*self.references.services.get(name)?)
    }

    /// Whether a backend of any Service listens at an address, port and protocol.
    pub fn is_backend_port(&self, (address, port, protocol): (IpAddr, u16, u8)) -> bool {
        let frontends = match address {
            IpAddr::V4(v4) => self.policy.frontends_of(&Listener { address: v4.to_bits(), port, protocol }),
            IpAddr::V6(v6) => {
                self.policy.frontends_of(&Listener { address: V6::from_bits(v6.to_bits()), port, protocol })
            }
        };
        !frontends.is_empty()
    }

    /// Reference counts and free numbers.
    #[cfg(test)]
    pub(super) fn references(&self) -> &References {
        &self.references
    }

    /// The snapshot with another network. The generation advances unless only neighbors have changed.
    pub fn with_network(&mut self, network: NetworkSpec) -> Snapshot {
        let routes_changed =
            network.routes != self.network_spec.routes || network.interfaces != self.network_spec.interfaces;
        // Removed neighbors keep their numbers, so that the number in a session never changes its meaning; when they
        // run out, all are assigned anew under a new generation.
        let exhausted = self.next_hop_ids.len() + network.neighbors.len() > MAX_NEXT_HOPS;
        if exhausted {
            self.next_hop_ids.clear();
        }
        if routes_changed || exhausted {
            let mut freshness = self.freshness.next();
            freshness.touch_all();
            self.freshness = Arc::new(freshness);
        }
        self.network = Arc::new(build_network(&network, &mut self.next_hop_ids));
        self.network_spec = network;
        self.rebuild_tunnels();
        self.snapshot()
    }

    /// The snapshot with other gateway states; the generation advances. Sessions of VIPs with shards that change owner
    /// are revalidated.
    pub fn with_members(&mut self, spec: &MembersSpec) -> Snapshot {
        let mut rebuild = Rebuild::new((*self.policy).clone(), self.freshness.next(), &mut self.references);
        rebuild.set_members(spec);
        let (policy, freshness) = rebuild.finish();
        self.policy = Arc::new(policy);
        self.freshness = Arc::new(freshness);
        self.rebuild_tunnels();
        self.snapshot()
    }

    /// Validates a change: if it passes, [`Self::with_change`] succeeds.
    ///
    /// # Errors
    /// If the change is inconsistent, or doesn't fit the current policy.
    pub fn validate(&self, change: &PolicyChange) -> Result<(), BuildError> {
        validation::policy_change(&self.policy, &self.references, change)
    }

    /// The snapshot with a changed policy; the generation advances. The cost depends on the change, hardly on the size
    /// of the policy.
    ///
    /// # Errors
    /// If the change is inconsistent, or doesn't fit the current policy; nothing has changed then.
    pub fn with_change(&mut self, change: &PolicyChange) -> Result<Snapshot, BuildError> {
        self.validate(change)?;
        let mut rebuild = Rebuild::new((*self.policy).clone(), self.freshness.next(), &mut self.references);
        rebuild.apply(change);
        let (policy, freshness) = rebuild.finish();
        self.policy = Arc::new(policy);
        self.freshness = Arc::new(freshness);
        // Gateways that are new with this change have no tunnel address yet, so only nodes matter here.
        if !change.nodes.is_empty() {
            self.rebuild_tunnels();
        }
        Ok(self.snapshot())
    }
}
