//! Building snapshots, on the control thread: from descriptions to what the stages read.
//!
//! The builder remembers what must outlast a snapshot: the owners of ports, what endpoints use, the numbers of VIPs and
//! next hops. It decides when the generation moves on, so that sessions are checked again only when something changed
//! that could matter to them: policy, routes or interfaces, but not a neighbour's link address.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use thiserror::Error;

use super::Snapshot;
use super::network::{Exit, Hop, HopId, NUMBERS, Network, Port, RouteEntry, Target};
use super::policy::{Egress, Endpoint, FamilyIndex, Policy, Vip, VipId};
use super::prefixes::Prefixes;
use super::quota::EndpointUse;
use super::spec::{EgressSpec, NetworkSpec, PolicySet, RouteTarget, VipSpec};
use crate::address::{Address, V6};
use crate::io::InterfaceId;
use crate::ports::pool::PortPool;
use crate::wire::ethernet;

/// VIPs that a gateway can serve, retired ones included.
pub const MOST_VIPS: usize = 16_384;
/// Next hops that have a number; behind that, sessions look theirs up for each packet.
const MOST_HOPS: usize = HopId::HAIRPIN.0 as usize;

/// A description that no snapshot can be built from.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BuildError {
    /// Too many VIPs.
    #[error("{count} VIPs, sessions of former ones included, but a gateway serves at most {MOST_VIPS}")]
    TooManyVips {
        /// How many there would be.
        count: usize,
    },
    /// An endpoint names a policy that isn't there.
    #[error("endpoint {address} names policy number {policy}, of {policies}")]
    UnknownPolicy {
        /// The endpoint.
        address: IpAddr,
        /// The number.
        policy: u32,
        /// How many there are.
        policies: usize,
    },
    /// An endpoint names a VIP that isn't there, or one of the other family.
    #[error("endpoint {address} names {vip}, which is no VIP of its address family")]
    UnknownVip {
        /// The endpoint.
        address: IpAddr,
        /// What it names.
        vip: IpAddr,
    },
    /// An address is there twice.
    #[error("{address} is listed twice")]
    Twice {
        /// The address.
        address: IpAddr,
    },
    /// An address is an endpoint and a VIP.
    #[error("{address} is both an endpoint and a VIP")]
    EndpointIsVip {
        /// The address.
        address: IpAddr,
    },
}

/// Builds one snapshot after the other.
#[derive(Debug)]
pub struct Builder {
    generation: u32,
    policy: Arc<Policy>,
    network: Arc<Network>,
    network_spec: NetworkSpec,
    pools: HashMap<IpAddr, (VipId, Arc<PortPool>)>,
    free_vip_ids: Vec<VipId>,
    usage: HashMap<IpAddr, Arc<EndpointUse>>,
    hop_numbers: HashMap<(InterfaceId, IpAddr), HopId>,
}

impl Builder {
    /// A builder that knows the network and no policy yet.
    pub fn new(network: NetworkSpec) -> Self {
        let empty = Policy {
            version: String::new(),
            egress: Vec::new(),
            endpoints: Vec::new(),
            vips: Vec::new(),
            v4: FamilyIndex::default(),
            v6: FamilyIndex::default(),
        };
        let mut hop_numbers = HashMap::new();
        let network_built = Arc::new(build_network(&network, &mut hop_numbers));
        let free_vip_ids = (0..MOST_VIPS as u16).rev().map(VipId).collect();
        Self {
            generation: 1,
            policy: Arc::new(empty),
            network: network_built,
            network_spec: network,
            pools: HashMap::new(),
            free_vip_ids,
            usage: HashMap::new(),
            hop_numbers,
        }
    }

    /// The snapshot of what the builder was last given.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { generation: self.generation, policy: self.policy.clone(), network: self.network.clone() }
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
            self.generation = self.generation.wrapping_add(1);
        }
        self.network = Arc::new(build_network(&network, &mut self.hop_numbers));
        self.network_spec = network;
        self.snapshot()
    }

    /// The snapshot with another policy; the generation moves on.
    ///
    /// # Errors
    /// When the description contradicts itself; nothing has changed then.
    pub fn with_policy(&mut self, set: &PolicySet) -> Result<Snapshot, BuildError> {
        check(set)?;
        self.reserve_vips(&set.vips)?;
        let vips = self.build_vips(set);
        let mut v4 = FamilyIndex::default();
        let mut v6 = FamilyIndex::default();
        for (at, vip) in (0..).zip(&vips) {
            insert(&mut v4.vips, &mut v6.vips, vip.address, at);
        }
        let places: HashMap<IpAddr, u32> = (0..).zip(&vips).map(|(at, vip)| (vip.address, at)).collect();
        let mut endpoints = Vec::with_capacity(set.endpoints.len());
        for (at, spec) in (0..).zip(&set.endpoints) {
            insert(&mut v4.endpoints, &mut v6.endpoints, spec.address, at);
            let usage = self.usage.entry(spec.address).or_default().clone();
            endpoints.push(Endpoint {
                policy: spec.policy,
                vips: spec.vips.iter().map(|vip| places[vip]).collect(),
                usage,
            });
        }
        self.usage.retain(|&address, usage| {
            let known = is_endpoint(&v4, &v6, address);
            if !known && usage.sessions() > 0 {
                insert(&mut v4.retired, &mut v6.retired, address, usage.clone());
            }
            known || usage.sessions() > 0
        });
        let egress = set.policies.iter().map(build_egress).collect();
        self.policy = Arc::new(Policy { version: set.version.clone(), egress, endpoints, vips, v4, v6 });
        self.generation = self.generation.wrapping_add(1);
        Ok(self.snapshot())
    }

    /// Makes sure that every VIP has a number, forgetting those that nobody needs any more.
    fn reserve_vips(&mut self, vips: &[VipSpec]) -> Result<(), BuildError> {
        let listed = |address: &IpAddr| vips.binary_search_by_key(address, |vip| vip.address).is_ok();
        let free = &mut self.free_vip_ids;
        self.pools.retain(|address, (id, pool)| {
            let needed = listed(address) || !pool.close();
            if !needed {
                free.push(*id);
            }
            needed
        });
        let new = vips.iter().filter(|vip| !self.pools.contains_key(&vip.address)).count();
        if new > self.free_vip_ids.len() {
            return Err(BuildError::TooManyVips { count: self.pools.len() + new });
        }
        Ok(())
    }

    fn build_vips(&mut self, set: &PolicySet) -> Vec<Vip> {
        let specs = &set.vips;
        let guaranteed = guaranteed(set);
        let mut vips = Vec::with_capacity(specs.len());
        for spec in specs {
            let free = &mut self.free_vip_ids;
            let (id, pool) = self
                .pools
                .entry(spec.address)
                .or_insert_with(|| (free.pop().expect("reserve_vips has counted the free numbers"), Arc::default()));
            vips.push(Vip {
                address: spec.address,
                id: *id,
                pool: pool.clone(),
                retired: false,
                announce: spec.announce,
                reserved: spec.reserved_ports.clone().into(),
                guaranteed: guaranteed.get(&spec.address).copied().unwrap_or(0),
            });
        }
        let known: foldhash::HashSet<IpAddr> = specs.iter().map(|vip| vip.address).collect();
        vips.extend(self.pools.iter().filter(|(address, _)| !known.contains(*address)).map(|(address, (id, pool))| {
            Vip {
                address: *address,
                id: *id,
                pool: pool.clone(),
                retired: true,
                announce: super::spec::Announce::default(),
                reserved: Box::default(),
                guaranteed: 0,
            }
        }));
        vips
    }
}

/// For each VIP the ports that policy guarantees to the endpoints behind it.
fn guaranteed(set: &PolicySet) -> HashMap<IpAddr, u32> {
    let mut sums = HashMap::default();
    for endpoint in &set.endpoints {
        let limits = set.policies.get(endpoint.policy as usize).map(|policy| policy.limits);
        if let Some(ports) = limits.and_then(|limits| limits.guaranteed_ports) {
            for vip in &endpoint.vips {
                let sum: &mut u32 = sums.entry(*vip).or_default();
                *sum = sum.saturating_add(ports);
            }
        }
    }
    sums
}

fn insert<T>(v4: &mut HashMap<u32, T>, v6: &mut HashMap<V6, T>, address: IpAddr, value: T) {
    match address {
        IpAddr::V4(address) => drop(v4.insert(address.to_bits(), value)),
        IpAddr::V6(address) => drop(v6.insert(V6::from_bits(address.to_bits()), value)),
    }
}

fn is_endpoint(v4: &FamilyIndex<u32>, v6: &FamilyIndex<V6>, address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => v4.endpoints.contains_key(&address.to_bits()),
        IpAddr::V6(address) => v6.endpoints.contains_key(&V6::from_bits(address.to_bits())),
    }
}

fn check(set: &PolicySet) -> Result<(), BuildError> {
    if let Some(pair) = set.vips.windows(2).find(|pair| pair[0].address >= pair[1].address) {
        return Err(BuildError::Twice { address: pair[1].address });
    }
    if let Some(pair) = set.endpoints.windows(2).find(|pair| pair[0].address >= pair[1].address) {
        return Err(BuildError::Twice { address: pair[1].address });
    }
    let is_vip = |address: &IpAddr| set.vips.binary_search_by_key(address, |vip| vip.address).is_ok();
    for endpoint in &set.endpoints {
        let address = endpoint.address;
        if endpoint.policy as usize >= set.policies.len() {
            return Err(BuildError::UnknownPolicy { address, policy: endpoint.policy, policies: set.policies.len() });
        }
        if is_vip(&address) {
            return Err(BuildError::EndpointIsVip { address });
        }
        if let Some(&vip) = endpoint.vips.iter().find(|vip| vip.is_ipv4() != address.is_ipv4() || !is_vip(vip)) {
            return Err(BuildError::UnknownVip { address, vip });
        }
    }
    Ok(())
}

fn build_egress(spec: &EgressSpec) -> Egress {
    // Excluded first: where both lists name one prefix, the first counts.
    let all = || {
        let excluded = spec.excluded.iter().map(|net| (net, false));
        excluded.chain(spec.destinations.iter().map(|net| (net, true)))
    };
    Egress {
        name: spec.name.clone(),
        v4: Prefixes::new(all().filter_map(|(net, value)| prefix(net, value))),
        v6: Prefixes::new(all().filter_map(|(net, value)| prefix(net, value))),
        selection: spec.address_selection,
        limits: spec.limits,
        on_exhaustion: spec.on_exhaustion,
    }
}

fn prefix<A: Address, T>(net: &ipnet::IpNet, value: T) -> Option<(A, u8, T)> {
    Some((A::from_ip(net.network())?, net.prefix_len(), value))
}

fn build_network(spec: &NetworkSpec, numbers: &mut HashMap<(InterfaceId, IpAddr), HopId>) -> Network {
    let mut number = |interface: InterfaceId, address: IpAddr| {
        let next = numbers.len();
        match numbers.get(&(interface, address)) {
            Some(&id) => Some(id),
            None if next < MOST_HOPS => Some(*numbers.entry((interface, address)).or_insert(HopId(next as u16))),
            None => None,
        }
    };
    let mut targets = Vec::new();
    let mut entries = Vec::with_capacity(spec.routes.len());
    for route in &spec.routes {
        let entry = match &route.target {
            RouteTarget::Local => RouteEntry::Local,
            RouteTarget::Unreachable => RouteEntry::Unreachable,
            RouteTarget::Via(hops) => {
                let first = targets.len();
                targets.extend(hops.iter().filter_map(|hop| match hop.gateway {
                    Some(gateway) => number(hop.interface, gateway).map(Target::Router),
                    None => Some(Target::OnLink(hop.interface)),
                }));
                match targets.len() - first {
                    0 => RouteEntry::Unreachable,
                    count => RouteEntry::Via { first: first as u32, count: count as u16 },
                }
            }
        };
        entries.push((&route.prefix, entry));
    }
    let macs: HashMap<_, _> = spec.neighbours.iter().map(|n| ((n.interface, n.address), n.mac)).collect();
    for neighbour in &spec.neighbours {
        number(neighbour.interface, neighbour.address);
    }
    let mut hops: Vec<Option<Hop>> = vec![None; numbers.len()];
    for (&(interface, address), id) in &*numbers {
        let mac = macs.get(&(interface, address)).copied();
        let link = mac.zip(spec.interfaces.get(usize::from(interface.0)));
        let link = link.map(|(mac, own)| ethernet::link(mac, own.mac));
        hops[usize::from(id.0)] = Some(Hop { interface, address, link });
    }
    let hops: Vec<Hop> = hops.into_iter().flatten().collect();
    let mut ports = Box::new([Port::default(); NUMBERS]);
    for (port, interface) in ports.iter_mut().zip(&spec.interfaces) {
        *port = Port::of(interface);
    }
    Network {
        exits: hops.iter().map(|hop| Exit::of(hop, &spec.interfaces)).collect(),
        interfaces: spec.interfaces.clone(),
        ports,
        hops,
        numbers: numbers.clone(),
        targets,
        v4: Prefixes::new(entries.iter().filter_map(|&(net, entry)| prefix(net, entry))),
        v6: Prefixes::new(entries.iter().filter_map(|&(net, entry)| prefix(net, entry))),
    }
}
