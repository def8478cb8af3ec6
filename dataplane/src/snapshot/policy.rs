//! Policy as the stages read it: which endpoint, which destination, which VIP.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use foldhash::HashMap;

use super::cluster::{Ranges, Reach};
use super::endpoints::{Endpoint, EndpointId, Endpoints};
use super::listeners::{Backends, Frontends};
use super::members::Members;
use super::overlay::{NodeId, Nodes};
use super::prefixes::Prefixes;
use super::quota::EndpointUse;
use super::service::{FrontendId, Listener, Service, ServiceFamily, ServiceId, Target};
use super::shares::{Owner, Share, Shares};
use super::spec::{Announce, ClusterSpec, EgressSpec};
use crate::address::{Address, V6};
use crate::ports::pool::PortPool;
use crate::ports::{BlockId, PortRange};

/// A VIP's place in the workers' tables of ports: it stays the same for as long as anybody has a port of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VipId(pub u16);

/// A policy's number: it stays the same for as long as there is a policy of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EgressId(pub u32);

/// All of the policy, compiled. What a change doesn't concern is shared with the policy before it.
#[derive(Clone, Debug)]
pub struct Policy {
    pub(super) version: String,
    /// By number.
    pub(super) egress: Arc<Vec<Option<Arc<Egress>>>>,
    /// By number.
    pub(super) vips: Arc<Vec<Option<Arc<Vip>>>>,
    /// By number.
    pub(super) services: Arc<Vec<Option<Arc<Service>>>>,
    pub(super) members: Arc<Members>,
    pub(super) nodes: Arc<Nodes>,
    pub(super) cluster: Arc<ClusterSpec>,
    pub(super) v4: FamilyIndex<u32>,
    pub(super) v6: FamilyIndex<V6>,
}

/// Where addresses of one family are.
#[derive(Clone, Debug)]
pub struct FamilyIndex<A> {
    pub(super) endpoints: Endpoints<A>,
    pub(super) vips: Arc<HashMap<A, VipId>>,
    pub(super) frontends: Frontends<A>,
    pub(super) backends: Backends<A>,
    pub(super) pods: Arc<Prefixes<A, NodeId>>,
    pub(super) ranges: Arc<Ranges<A>>,
}

impl<A: Address> FamilyIndex<A> {
    pub(super) fn empty() -> Self {
        Self {
            endpoints: Endpoints::empty(),
            vips: Arc::default(),
            frontends: Arc::default(),
            backends: Backends::empty(),
            pods: Arc::new(Prefixes::new([])),
            ranges: Ranges::new(&ClusterSpec::default()),
        }
    }
}

/// One egress policy.
#[derive(Debug)]
pub struct Egress {
    /// What it was built from.
    pub spec: EgressSpec,
    /// Its number.
    pub id: EgressId,
    /// Destinations; what matches none is routed unchanged.
    pub(super) v4: Prefixes<u32, Reach>,
    /// The same for IPv6.
    pub(super) v6: Prefixes<V6, Reach>,
}

/// One VIP.
#[derive(Clone, Debug)]
pub struct Vip {
    /// The address.
    pub address: IpAddr,
    /// Whose it is, for people.
    pub name: Arc<str>,
    /// Its place in the workers' tables.
    pub id: VipId,
    /// Who owns its port blocks.
    pub pool: Arc<PortPool>,
    /// Policy has dropped it, but sessions that must still end hold ports of it.
    pub retired: bool,
    /// How the network learns where it is.
    pub announce: Announce,
    /// Ports that are never given out, ascending.
    pub reserved: Box<[u16]>,
    /// Ports that are guaranteed to its endpoints, all together.
    pub guaranteed: u32,
    /// Which gateway has which part of it.
    pub shares: Shares,
}

impl Vip {
    /// Whether this gateway serves it: policy wants it, and it is this one's, or a part of it is.
    pub fn is_ours(&self) -> bool {
        !self.retired && self.shares.owner() == Owner::This
    }

    /// Whether this gateway says on a link that it has it. A VIP that is no one else's is this gateway's as soon as the view says so, but
    /// whoever had it answers until it has seen that view: two answers to one question would send packets to either.
    pub fn is_answered(&self) -> bool {
        !self.retired && self.shares.may_answer()
    }

    /// The part of a range that every endpoint may have ports of; the rest is for those that have less than they are
    /// guaranteed. `None` if there is no such part.
    #[inline]
    pub fn ordinary(&self, range: PortRange) -> Option<PortRange> {
        match self.guaranteed {
            0 => Some(range),
            // Reserved ports may be among the last ones.
            count => range.without_last(count.saturating_add(self.reserved.len() as u32)),
        }
    }

    /// The ports of `block` that are never given out, as bits.
    #[inline]
    pub fn reserved_mask(&self, block: BlockId) -> u64 {
        let first = block.first_port();
        let (Some(&lowest), Some(&highest)) = (self.reserved.first(), self.reserved.last()) else { return 0 };
        // Most blocks lie outside of where the reserved ports are. Below and above in one comparison: one branch, which
        // nearly always goes one way.
        let lowest = BlockId::of(lowest).first_port();
        if first.wrapping_sub(lowest) > highest - lowest {
            return 0;
        }
        let from = self.reserved.partition_point(|&port| port < first);
        self.reserved[from..]
            .iter()
            .take_while(|&&port| port - first < 64)
            .fold(0, |mask, &port| mask | 1 << (port - first))
    }
}

/// An address family of which policy keeps an index.
pub trait Family: ServiceFamily {
    /// The family's index.
    fn index(policy: &Policy) -> &FamilyIndex<Self>;
    /// The same, to change it.
    fn index_mut(policy: &mut Policy) -> &mut FamilyIndex<Self>;
    /// What a policy says of destinations of the family.
    fn destinations(egress: &Egress) -> &Prefixes<Self, Reach>;
}

impl Policy {
    pub(super) fn empty() -> Self {
        Self {
            version: String::new(),
            egress: Arc::default(),
            vips: Arc::default(),
            services: Arc::default(),
            members: Arc::default(),
            nodes: Arc::default(),
            cluster: Arc::default(),
            v4: FamilyIndex::empty(),
            v6: FamilyIndex::empty(),
        }
    }

    /// What people call this state of the policy.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Every policy, by number.
    pub fn egress(&self) -> impl Iterator<Item = &Egress> {
        self.egress.iter().flatten().map(Arc::as_ref)
    }

    /// The policy of an endpoint.
    #[inline]
    pub fn egress_of(&self, endpoint: &Endpoint) -> &Egress {
        let egress = self.egress.get(endpoint.policy.0 as usize).and_then(Option::as_deref);
        egress.expect("the builder keeps a policy for as long as an endpoint names it")
    }

    /// Every VIP, retired ones included.
    pub fn vips(&self) -> impl Iterator<Item = &Vip> {
        self.vips.iter().flatten().map(Arc::as_ref)
    }

    /// The VIPs that policy wants.
    pub fn live_vips(&self) -> impl Iterator<Item = &Vip> {
        self.vips().filter(|vip| !vip.retired)
    }

    /// Every endpoint with its address, in no order.
    pub fn endpoints(&self) -> impl Iterator<Item = (IpAddr, &Endpoint)> {
        let v4 = self.v4.endpoints.iter().map(|(address, endpoint)| (address.to_ip(), endpoint));
        v4.chain(self.v6.endpoints.iter().map(|(address, endpoint)| (address.to_ip(), endpoint)))
    }

    /// How many endpoints there are.
    pub fn endpoint_count(&self) -> usize {
        self.v4.endpoints.len() + self.v6.endpoints.len()
    }

    /// The endpoint and its policy, if an address is one.
    #[inline]
    pub fn endpoint<A: Family>(&self, address: A) -> Option<(EndpointId, &Endpoint, &Egress)> {
        let (id, endpoint) = A::index(self).endpoints.get(address)?;
        Some((id, endpoint, self.egress_of(endpoint)))
    }

    /// The endpoint with this number, and its policy.
    #[inline]
    pub fn endpoint_with(&self, id: EndpointId) -> (&Endpoint, &Egress) {
        let endpoint = if id.is_v6() { self.v6.endpoints.with(id) } else { self.v4.endpoints.with(id) };
        (endpoint, self.egress_of(endpoint))
    }

    /// What an address uses, also when policy covers it no more.
    pub fn usage<A: Family>(&self, address: A) -> Option<&EndpointUse> {
        A::index(self).endpoints.usage(address).map(Arc::as_ref)
    }

    /// What an address of either family uses.
    pub fn usage_of(&self, address: IpAddr) -> Option<&EndpointUse> {
        match address {
            IpAddr::V4(v4) => self.usage(v4.to_bits()),
            IpAddr::V6(v6) => self.usage(V6::from_bits(v6.to_bits())),
        }
    }

    /// The VIP with this address, if policy knows one; also a retired one.
    #[inline]
    pub fn vip<A: Family>(&self, address: A) -> Option<&Vip> {
        A::index(self).vips.get(&address).map(|&id| self.vip_with(id))
    }

    #[inline]
    fn vip_with(&self, id: VipId) -> &Vip {
        let vip = self.vips.get(usize::from(id.0)).and_then(Option::as_deref);
        vip.expect("the builder keeps a VIP for as long as anything names it")
    }

    /// The nodes of the overlay network.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// The node of the overlay network that has an address.
    #[inline]
    pub fn node_of<A: Family>(&self, address: A) -> Option<NodeId> {
        A::index(self).pods.find(address)
    }

    /// The VIPs of an endpoint, in an order that is the same for everyone.
    pub fn vips_of<'a>(&'a self, endpoint: &'a Endpoint) -> impl ExactSizeIterator<Item = &'a Vip> + Clone {
        endpoint.vips.iter().map(|&id| self.vip_with(id))
    }

    /// All gateways.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// The share of a VIP that an endpoint's sessions are of: its home's, or, without a home, one that this gateway has. `None` if the VIP
    /// is this gateway's alone, or there is no such share.
    #[inline]
    pub fn share_of<'a>(&self, endpoint: &Endpoint, vip: &'a Vip) -> Option<&'a Share> {
        match endpoint.home {
            Some(home) => vip.shares.of_home(home),
            None => vip.shares.own(self.members.this()),
        }
    }

    /// Whose an endpoint is: whoever has its home's share of the VIP that it leaves with. Without a home, it is this gateway's where
    /// this one has any part of that VIP.
    pub fn owner_of(&self, endpoint: &Endpoint) -> Owner {
        let Some(&vip) = endpoint.vips.first() else { return Owner::This };
        let shares = &self.vip_with(vip).shares;
        let Some(home) = endpoint.home else { return shares.owner() };
        match shares.of_home(home) {
            Some(share) => share.owner,
            None if shares.list().is_empty() => Owner::This,
            None => Owner::Nobody,
        }
    }

    /// Whether a session from `endpoint` to `remote` by way of a port of `vip` is what policy wants.
    pub fn permits<A: Family>(&self, endpoint: A, remote: A, (vip, port): (A, u16)) -> bool {
        let is_his =
            |own: &Vip| own.address == vip.to_ip() && !own.retired && own.reserved.binary_search(&port).is_err();
        self.endpoint(endpoint)
            .is_some_and(|(_, endpoint, egress)| self.translates(egress, remote) && self.vips_of(endpoint).any(is_his))
    }

    /// Every Service, by number.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.iter().flatten().map(Arc::as_ref)
    }

    /// The Service with this number, if there still is one.
    #[inline]
    pub fn service(&self, id: ServiceId) -> Option<&Service> {
        self.services.get(id.0 as usize)?.as_deref()
    }

    /// The frontend at a VIP.
    #[inline]
    pub fn frontend<A: Family>(&self, listener: &Listener<A>) -> Option<FrontendId> {
        A::index(self).frontends.get(listener).copied()
    }

    /// The frontends that somebody who listens there serves, ascending.
    #[inline]
    pub fn frontends_of<A: Family>(&self, backend: &Listener<A>) -> &[FrontendId] {
        A::index(self).backends.get(backend)
    }

    /// What backends of this family listen on, in no order.
    pub fn backends<A: Family>(&self) -> impl Iterator<Item = &Listener<A>> {
        A::index(self).backends.iter()
    }

    /// Whether a backend listens at this address.
    pub fn is_backend<A: Family>(&self, address: A) -> bool {
        A::index(self).backends.is_at(address)
    }

    /// Whether a backend of either family listens at this address.
    pub fn is_backend_at(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => self.is_backend(v4.to_bits()),
            IpAddr::V6(v6) => self.is_backend(V6::from_bits(v6.to_bits())),
        }
    }

    /// The node of the overlay network that has an address of either family.
    pub fn node_at(&self, address: IpAddr) -> Option<NodeId> {
        match address {
            IpAddr::V4(v4) => self.node_of(v4.to_bits()),
            IpAddr::V6(v6) => self.node_of(V6::from_bits(v6.to_bits())),
        }
    }

    /// The Service that is reached at an address and port.
    pub fn service_at(&self, at: SocketAddr, protocol: u8) -> Option<&Service> {
        let port = at.port();
        let frontend = match at.ip() {
            IpAddr::V4(v4) => self.frontend(&Listener { address: v4.to_bits(), port, protocol }),
            IpAddr::V6(v6) => self.frontend(&Listener { address: V6::from_bits(v6.to_bits()), port, protocol }),
        };
        self.service(frontend?.service)
    }

    /// The backend of a session by way of `frontend`, with its Service, as far as policy wants them together.
    pub fn target<A: Family>(&self, frontend: &Listener<A>, backend: &Listener<A>) -> Option<(&Service, &Target<A>)> {
        let id = self.frontend(frontend)?;
        let service = self.service(id.service)?;
        let target = A::half(service).frontends.get(usize::from(id.port))?.target(backend.address)?;
        (target.port == backend.port).then_some((service, target))
    }
}

impl Family for u32 {
    #[inline]
    fn index(policy: &Policy) -> &FamilyIndex<Self> {
        &policy.v4
    }

    fn index_mut(policy: &mut Policy) -> &mut FamilyIndex<Self> {
        &mut policy.v4
    }

    #[inline]
    fn destinations(egress: &Egress) -> &Prefixes<Self, Reach> {
        &egress.v4
    }
}

impl Family for V6 {
    #[inline]
    fn index(policy: &Policy) -> &FamilyIndex<Self> {
        &policy.v6
    }

    fn index_mut(policy: &mut Policy) -> &mut FamilyIndex<Self> {
        &mut policy.v6
    }

    #[inline]
    fn destinations(egress: &Egress) -> &Prefixes<Self, Reach> {
        &egress.v6
    }
}
