//! Compiled policy, as the stages read it: endpoints, destinations, VIPs, Services.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use foldhash::{HashMap, HashSet};

use super::cluster::{ClusterPrefixes, DestinationMatch};
use super::endpoints::{Endpoint, EndpointSlot, Endpoints};
use super::listeners::{Backends, Frontends};
use super::members::Members;
use super::overlay::Nodes;
use super::prefixes::Prefixes;
use super::quota::EndpointUsage;
use super::service::{Backend, Service, ServiceFamily};
use super::spec::{AddressSelection, Announce, ClusterSpec, EgressSpec, PrivateAddressSpec, SlotRef};
use super::static_nat::StaticNat;
use crate::flow::address::{Address, V6, of_family};
use crate::flow::ids::{EgressId, EndpointId, FrontendId, GatewayId, NodeId, Owner, ServiceId, ShardMapId, VipId};
use crate::flow::listener::Listener;
use crate::flow::tuple::{HashKey, Tuple};
use crate::policy::shard::Shard;
use crate::policy::shard_map::ShardMap;
use crate::policy::shards::Shards;
use crate::ports::allocator::PortShard;
use crate::ports::vip::VipPorts;

/// The compiled policy. What a change doesn't touch is shared with the previous policy.
#[derive(Clone, Debug)]
pub struct Policy {
    pub(super) version: String,
    /// By number.
    pub(super) egress: Arc<Vec<Option<Arc<Egress>>>>,
    /// By number.
    pub(super) vips: Arc<Vec<Option<Arc<Vip>>>>,
    /// By number.
    pub(super) shard_maps: Arc<Vec<Option<NamedShardMap>>>,
    /// By number.
    pub(super) services: Arc<Vec<Option<Arc<Service>>>>,
    pub(super) members: Arc<Members>,
    /// Whether other gateways have to release shards or endpoints that policy has moved here.
    pub(super) awaits_release: bool,
    pub(super) nodes: Arc<Nodes>,
    pub(super) cluster: Arc<ClusterSpec>,
    pub(super) v4: FamilyIndex<u32>,
    pub(super) v6: FamilyIndex<V6>,
    pub(super) static_nat: Arc<StaticNat>,
}

/// A shard map that VIPs share.
#[derive(Clone, Debug)]
pub(super) struct NamedShardMap {
    pub(super) name: Arc<str>,
    pub(super) map: Arc<ShardMap>,
}

/// Address lookup tables of one family.
#[derive(Clone, Debug)]
pub struct FamilyIndex<A> {
    pub(super) endpoints: Endpoints<A>,
    pub(super) vips: Arc<HashMap<A, VipId>>,
    pub(super) frontends: Frontends<A>,
    pub(super) backends: Backends<A>,
    pub(super) pod_nodes: Arc<Prefixes<A, NodeId>>,
    pub(super) cluster: Arc<ClusterPrefixes<A>>,
}

impl<A: Address> FamilyIndex<A> {
    pub(super) fn empty() -> Self {
        Self {
            endpoints: Endpoints::empty(),
            vips: Arc::default(),
            frontends: Arc::default(),
            backends: Backends::empty(),
            pod_nodes: Arc::new(Prefixes::new([])),
            cluster: ClusterPrefixes::new(&ClusterSpec::default()),
        }
    }
}

/// An egress policy.
#[derive(Debug)]
pub struct Egress {
    pub spec: EgressSpec,
    /// Its number.
    pub id: EgressId,
    /// IPv4 destinations; traffic to others is routed unchanged.
    pub(super) v4: Prefixes<u32, DestinationMatch>,
    /// IPv6 destinations.
    pub(super) v6: Prefixes<V6, DestinationMatch>,
}

#[derive(Clone, Debug)]
pub struct Vip {
    pub address: IpAddr,
    /// The object that it belongs to, for display.
    pub name: Arc<str>,
    /// Its SNAT ports.
    pub ports: VipPorts,
    /// How it is announced.
    pub announce: Announce,
    /// Its shards and their owners.
    pub shards: Shards,
    /// Its private addresses at gateways.
    pub(super) private: Arc<[PrivateAddressSpec]>,
}

impl Vip {
    /// Whether this gateway owns it or a shard of it, and it isn't retired.
    pub fn is_ours(&self) -> bool {
        !self.ports.retired && self.shards.owner() == Owner::This
    }

    /// Its private address at a gateway; without a name, at the first one that has one.
    pub fn private_at(&self, gateway: Option<&str>) -> Option<IpAddr> {
        let mut all = self.private.iter();
        all.find(|private| gateway.is_none_or(|name| *private.gateway == *name)).map(|private| private.address)
    }

    /// Whether this gateway answers ARP and ND for it. After a move, the new owner answers only once the former one has
    /// released it, which answers until then: two different answers would split its traffic.
    pub fn answers_arp_nd(&self) -> bool {
        !self.ports.retired && self.shards.answers_arp_nd()
    }
}

/// An address family with policy lookup tables.
pub trait Family: ServiceFamily {
    /// The family's tables.
    fn index(policy: &Policy) -> &FamilyIndex<Self>;
    /// The family's tables, mutable.
    fn index_mut(policy: &mut Policy) -> &mut FamilyIndex<Self>;
    /// An egress policy's destinations of the family.
    fn destinations(egress: &Egress) -> &Prefixes<Self, DestinationMatch>;
}

impl Policy {
    pub(super) fn empty() -> Self {
        Self {
            version: String::new(),
            egress: Arc::default(),
            vips: Arc::default(),
            shard_maps: Arc::default(),
            services: Arc::default(),
            members: Arc::default(),
            awaits_release: false,
            nodes: Arc::default(),
            cluster: Arc::default(),
            v4: FamilyIndex::empty(),
            v6: FamilyIndex::empty(),
            static_nat: Arc::new(StaticNat::new(&[], &HashSet::default())),
        }
    }

    /// Version of the policy.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// All egress policies, by number.
    pub fn egress(&self) -> impl Iterator<Item = &Egress> {
        self.egress.iter().flatten().map(Arc::as_ref)
    }

    /// The egress policy of an endpoint.
    #[inline]
    pub fn egress_of(&self, endpoint: &Endpoint) -> &Egress {
        let egress = self.egress.get(endpoint.policy.0 as usize).and_then(Option::as_deref);
        egress.expect("a policy is kept while an endpoint refers to it")
    }

    /// All VIPs, retired ones included.
    pub fn vips(&self) -> impl Iterator<Item = &Vip> {
        self.vips.iter().flatten().map(Arc::as_ref)
    }

    /// Private addresses of VIPs at this gateway.
    #[inline]
    pub fn static_nat(&self) -> &StaticNat {
        &self.static_nat
    }

    /// All VIPs that aren't retired.
    pub fn live_vips(&self) -> impl Iterator<Item = &Vip> {
        self.vips().filter(|vip| !vip.ports.retired)
    }

    /// All endpoints with their addresses, unordered.
    pub fn endpoints(&self) -> impl Iterator<Item = (IpAddr, &Endpoint)> {
        let v4 = self.v4.endpoints.iter().map(|(address, endpoint)| (address.to_ip(), endpoint));
        v4.chain(self.v6.endpoints.iter().map(|(address, endpoint)| (address.to_ip(), endpoint)))
    }

    /// Number of endpoints.
    pub fn endpoint_count(&self) -> usize {
        self.v4.endpoints.len() + self.v6.endpoints.len()
    }

    /// The endpoint with this address, and its egress policy.
    #[inline]
    pub fn endpoint<A: Family>(&self, address: A) -> Option<(EndpointId, &Endpoint, &Egress)> {
        let (id, endpoint) = A::index(self).endpoints.get(address)?;
        Some((id, endpoint, self.egress_of(endpoint)))
    }

    /// The endpoint with this number, and its egress policy.
    #[inline]
    pub fn endpoint_by_id(&self, id: EndpointId) -> (&Endpoint, &Egress) {
        let endpoint = if id.is_v6() { self.v6.endpoints.by_id(id) } else { self.v4.endpoints.by_id(id) };
        (endpoint, self.egress_of(endpoint))
    }

    /// Usage of an endpoint, or of a former endpoint that still has sessions.
    pub fn usage<A: Family>(&self, address: A) -> Option<&EndpointUsage> {
        A::index(self).endpoints.usage(address).map(Arc::as_ref)
    }

    /// As [`Policy::usage`], for either family.
    #[cfg(test)]
    pub(super) fn usage_of(&self, address: IpAddr) -> Option<&EndpointUsage> {
        of_family!(address, it => self.usage(it))
    }

    /// The VIP with this address, retired ones included.
    #[inline]
    pub fn vip<A: Family>(&self, address: A) -> Option<&Vip> {
        A::index(self).vips.get(&address).map(|&id| self.vip_by_id(id))
    }

    #[inline]
    fn vip_by_id(&self, id: VipId) -> &Vip {
        let vip = self.vips.get(usize::from(id.0)).and_then(Option::as_deref);
        vip.expect("a VIP is kept while anything refers to it")
    }

    /// The overlay nodes.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// The overlay node of a pod address.
    #[inline]
    pub fn node_of<A: Family>(&self, address: A) -> Option<NodeId> {
        A::index(self).pod_nodes.find(address)
    }

    /// The VIPs of an endpoint, in the same order on all gateways.
    pub fn vips_of<'a>(&'a self, endpoint: &'a Endpoint) -> impl ExactSizeIterator<Item = &'a Vip> + Clone {
        endpoint.vips.iter().map(|&id| self.vip_by_id(id))
    }

    /// Whether any gateway has to release shards or endpoints that policy has moved here.
    pub fn awaits_policy_release(&self) -> bool {
        self.awaits_release
    }

    /// All gateways.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// The shard map with this number.
    fn shard_map(&self, id: ShardMapId) -> Option<&ShardMap> {
        self.shard_maps.get(id.0 as usize)?.as_ref().map(|named| &*named.map)
    }

    /// The shard whose owner has an endpoint's packets: that of its slot, or of its first VIP, or of that VIP's shards
    /// the one with the same home. `None`: any gateway has them, or there is no such shard.
    #[inline]
    pub fn shard_of<'a>(&'a self, endpoint: &'a Endpoint) -> Option<&'a Shard> {
        if let Some(slot) = endpoint.slot {
            let map = match slot.map {
                Some(id) => self.shard_map(id),
                None => self.vips_of(endpoint).find(|vip| vip.shards.is_distributed()).map(|vip| &**vip.shards.map()),
            };
            if let Some(map) = map {
                return map.of_slot(slot.slot);
            }
        }
        let shards = &self.vip_by_id(*endpoint.vips.first()?).shards;
        shards.only().or_else(|| shards.of_home(endpoint.home?))
    }

    /// The gateway that an endpoint is placed on; `None`: any gateway.
    pub fn home_of(&self, endpoint: &Endpoint) -> Option<GatewayId> {
        if endpoint.slot.is_some() { self.shard_of(endpoint)?.home() } else { endpoint.home }
    }

    /// The slot that an endpoint is placed by, with the name of its map.
    pub fn slot_of(&self, endpoint: &Endpoint) -> Option<SlotRef> {
        let EndpointSlot { map, slot } = endpoint.slot?;
        let map = map.and_then(|id| self.shard_maps.get(id.0 as usize)?.as_ref().map(|named| named.name.clone()));
        Some(SlotRef { map, slot })
    }

    /// The gateway that handles an endpoint's packets. Without a home, this gateway if it owns any shard of the first
    /// VIP.
    #[inline]
    pub fn owner_of(&self, endpoint: &Endpoint) -> Owner {
        if let Some(shard) = self.shard_of(endpoint) {
            return shard.owner;
        }
        let Some(&vip) = endpoint.vips.first() else { return Owner::This };
        let shards = &self.vip_by_id(vip).shards;
        if endpoint.home.is_none() || shards.is_standalone() { shards.owner() } else { Owner::Unowned }
    }

    /// The VIP that a flow of an endpoint selects with address selection per connection, the same at all gateways; by
    /// rendezvous hashing, so that another VIP takes only its own flows.
    pub fn vip_of_flow<'a, A: Family>(&'a self, endpoint: &'a Endpoint, flow: &Tuple<A>) -> Option<&'a Vip> {
        const RENDEZVOUS: HashKey = HashKey::fixed();
        let hash = RENDEZVOUS.hash(flow);
        let score = |vip: &&Vip| {
            let address = A::from_ip(vip.address).unwrap_or_default();
            RENDEZVOUS.hash(&Tuple { source: address, source_port: hash as u16, ..*flow })
        };
        self.vips_of(endpoint).filter(|vip| A::from_ip(vip.address).is_some()).max_by_key(score)
    }

    /// The gateway that opens the session of an endpoint's flow. With address selection per connection that is the owner
    /// of the VIP that the flow selects, if one gateway owns that as a whole.
    #[inline]
    pub fn owner_of_flow<A: Family>(&self, endpoint: &Endpoint, flow: &Tuple<A>) -> Owner {
        let selection = self.egress_of(endpoint).spec.address_selection;
        if selection == AddressSelection::PerConnection
            && let Some(only) = self.vip_of_flow(endpoint, flow).and_then(|vip| vip.shards.only())
        {
            return only.owner;
        }
        self.owner_of(endpoint)
    }

    /// Whether this gateway handles an endpoint's packets, but the gateway that did before may still send sessions.
    pub fn awaits_release(&self, endpoint: &Endpoint) -> bool {
        let is_moving = endpoint.former_owner.is_some() && self.members.awaits_policy_release();
        is_moving || self.shard_of(endpoint).is_some_and(Shard::awaits_release)
    }

    /// The parts of a VIP's ports that sessions of an endpoint are opened in at this gateway, in order of preference;
    /// none if it may open none.
    pub fn parts_of<'a>(&self, endpoint: &Endpoint, vip: &'a Vip) -> impl Iterator<Item = PortShard<'a>> + use<'a> {
        vip.shards.parts(self.home_of(endpoint).or(self.members.this()))
    }

    /// The gateway to ask for a port of a VIP of which this one has none left for an endpoint: the next owner of such
    /// ports in the order of names. `None`: all were asked, in the order that began at the endpoint's gateway.
    pub fn next_port_owner(&self, owner: Owner, vip: &Vip) -> Option<GatewayId> {
        let members = &self.members;
        let others = vip.shards.other_owners();
        let this = members.name(members.this()?);
        let first = |ids: &mut dyn Iterator<Item = GatewayId>| ids.min_by_key(|id| members.name(*id));
        let behind = first(&mut others.iter().copied().filter(|id| members.name(*id) > this));
        let next = behind.or_else(|| first(&mut others.iter().copied()))?;
        (owner != Owner::Other(next)).then_some(next)
    }

    /// Whether policy permits a session from `endpoint` to `remote` via a port of `vip`.
    pub fn permits<A: Family>(&self, endpoint: A, remote: A, (vip, port): (A, u16)) -> bool {
        let permits_vip = |own: &Vip| {
            own.address == vip.to_ip() && !own.ports.retired && own.ports.reserved.binary_search(&port).is_err()
        };
        self.endpoint(endpoint).is_some_and(|(_, endpoint, egress)| {
            self.translates(egress, remote) && self.vips_of(endpoint).any(permits_vip)
        })
    }

    /// All Services, by number.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.iter().flatten().map(Arc::as_ref)
    }

    /// The Service with this number, if it still exists.
    #[inline]
    pub fn service(&self, id: ServiceId) -> Option<&Service> {
        self.services.get(id.0 as usize)?.as_deref()
    }

    /// The frontend at a VIP.
    #[inline]
    pub fn frontend<A: Family>(&self, listener: &Listener<A>) -> Option<FrontendId> {
        A::index(self).frontends.get(listener).copied()
    }

    /// False if no frontend has this address and port, whatever its protocol.
    #[inline]
    pub fn may_have_frontend<A: Family>(&self, address: A, port: u16) -> bool {
        A::index(self).frontends.may_have(address, port)
    }

    /// The frontends of a backend, ascending.
    #[inline]
    pub fn frontends_of<A: Family>(&self, backend: &Listener<A>) -> &[FrontendId] {
        A::index(self).backends.get(backend)
    }

    /// All backends of this family, unordered.
    pub fn backends<A: Family>(&self) -> impl Iterator<Item = &Listener<A>> {
        A::index(self).backends.iter()
    }

    /// Whether a backend listens at this address.
    pub fn is_backend<A: Family>(&self, address: A) -> bool {
        A::index(self).backends.has_address(address)
    }

    /// Whether a backend of either family listens at this address.
    pub fn is_backend_at(&self, address: IpAddr) -> bool {
        of_family!(address, it => self.is_backend(it))
    }

    /// The overlay node of a pod address of either family.
    pub fn node_at(&self, address: IpAddr) -> Option<NodeId> {
        of_family!(address, it => self.node_of(it))
    }

    /// The Service with a frontend at this address and port.
    pub fn service_at(&self, at: SocketAddr, protocol: u8) -> Option<&Service> {
        let port = at.port();
        let frontend = of_family!(at.ip(), it => self.frontend(&Listener { address: it, port, protocol }));
        self.service(frontend?.service)
    }

    /// The backend of a session via `frontend`, and its Service, if policy permits the pair.
    pub fn permitted_backend<A: Family>(
        &self,
        frontend: &Listener<A>,
        backend: &Listener<A>,
    ) -> Option<(&Service, &Backend<A>)> {
        let id = self.frontend(frontend)?;
        let service = self.service(id.service)?;
        let frontend = A::part(service).frontends.get(usize::from(id.port))?;
        Some((service, frontend.backend(backend.address, backend.port)?))
    }
}

macro_rules! family {
    ($family:ty, $part:ident) => {
        impl Family for $family {
            #[inline]
            fn index(policy: &Policy) -> &FamilyIndex<Self> {
                &policy.$part
            }

            fn index_mut(policy: &mut Policy) -> &mut FamilyIndex<Self> {
                &mut policy.$part
            }

            #[inline]
            fn destinations(egress: &Egress) -> &Prefixes<Self, DestinationMatch> {
                &egress.$part
            }
        }
    };
}

family!(u32, v4);
family!(V6, v6);
