//! Policy as the stages read it: which endpoint, which destination, which VIP.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;

use super::prefixes::Prefixes;
use super::quota::EndpointUse;
use super::spec::{AddressSelection, Announce, Limits, OnExhaustion};
use crate::address::{Address, V6};
use crate::ports::pool::PortPool;
use crate::ports::{BlockId, PortRange};

/// An endpoint's number in its [`Policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointId(pub u32);

/// A VIP's place in the workers' tables of ports: it stays the same for as long as anybody has a port of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VipId(pub u16);

/// All of the policy, compiled.
#[derive(Debug)]
pub struct Policy {
    pub(super) version: String,
    pub(super) egress: Vec<Egress>,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) vips: Vec<Vip>,
    pub(super) v4: FamilyIndex<u32>,
    pub(super) v6: FamilyIndex<V6>,
}

/// Where addresses of one family are.
#[derive(Debug, Default)]
pub struct FamilyIndex<A> {
    pub(super) endpoints: HashMap<A, u32>,
    pub(super) vips: HashMap<A, u32>,
    /// Addresses that policy covers no more, but whose sessions haven't all ended.
    pub(super) retired: HashMap<A, Arc<EndpointUse>>,
}

/// One egress policy.
#[derive(Debug)]
pub struct Egress {
    /// Its name for people.
    pub name: String,
    /// Destinations: `true` is translated, `false` and no match are routed unchanged.
    pub(super) v4: Prefixes<u32, bool>,
    /// The same for IPv6.
    pub(super) v6: Prefixes<V6, bool>,
    /// How a new session picks its VIP.
    pub selection: AddressSelection,
    /// What one endpoint may have open.
    pub limits: Limits,
    /// What an endpoint hears when it gets no session.
    pub on_exhaustion: OnExhaustion,
}

/// A covered pod address.
#[derive(Debug)]
pub struct Endpoint {
    /// Its place in `Policy::egress`.
    pub(super) policy: u32,
    /// Its VIPs, as places in `Policy::vips`.
    pub(super) vips: Box<[u32]>,
    /// What it uses now, shared by the workers.
    pub usage: Arc<EndpointUse>,
}

/// One VIP.
#[derive(Debug)]
pub struct Vip {
    /// The address.
    pub address: IpAddr,
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
}

impl Vip {
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
pub trait Family: Address {
    /// The family's index.
    fn index(policy: &Policy) -> &FamilyIndex<Self>;
    /// Whether a policy translates this destination.
    fn translates(egress: &Egress, destination: Self) -> bool;
}

impl Policy {
    /// What people call this state of the policy.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Every VIP, retired ones included.
    pub fn vips(&self) -> &[Vip] {
        &self.vips
    }

    /// The endpoint and its policy, if an address is one.
    #[inline]
    pub fn endpoint<A: Family>(&self, address: A) -> Option<(EndpointId, &Endpoint, &Egress)> {
        let id = *A::index(self).endpoints.get(&address)?;
        let endpoint = &self.endpoints[id as usize];
        Some((EndpointId(id), endpoint, &self.egress[endpoint.policy as usize]))
    }

    /// The endpoint with this number, and its policy.
    #[inline]
    pub fn endpoint_with(&self, id: EndpointId) -> (&Endpoint, &Egress) {
        let endpoint = &self.endpoints[id.0 as usize];
        (endpoint, &self.egress[endpoint.policy as usize])
    }

    /// What an address uses, also when policy covers it no more.
    pub fn usage<A: Family>(&self, address: A) -> Option<&EndpointUse> {
        match self.endpoint(address) {
            Some((_, endpoint, _)) => Some(&endpoint.usage),
            None => A::index(self).retired.get(&address).map(Arc::as_ref),
        }
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
        A::index(self).vips.get(&address).map(|&at| &self.vips[at as usize])
    }

    /// The VIPs of an endpoint, in an order that is the same for everyone.
    pub fn vips_of<'a>(&'a self, endpoint: &'a Endpoint) -> impl ExactSizeIterator<Item = &'a Vip> + Clone {
        endpoint.vips.iter().map(|&at| &self.vips[at as usize])
    }

    /// Whether a session from `endpoint` to `remote` by way of `vip` is what policy wants.
    pub fn permits<A: Family>(&self, endpoint: A, remote: A, vip: A) -> bool {
        self.endpoint(endpoint).is_some_and(|(_, endpoint, egress)| {
            A::translates(egress, remote)
                && self.vips_of(endpoint).any(|own| own.address == vip.to_ip() && !own.retired)
        })
    }
}

impl Family for u32 {
    #[inline]
    fn index(policy: &Policy) -> &FamilyIndex<Self> {
        &policy.v4
    }

    #[inline]
    fn translates(egress: &Egress, destination: Self) -> bool {
        egress.v4.find(destination) == Some(true)
    }
}

impl Family for V6 {
    #[inline]
    fn index(policy: &Policy) -> &FamilyIndex<Self> {
        &policy.v6
    }

    #[inline]
    fn translates(egress: &Egress, destination: Self) -> bool {
        egress.v6.find(destination) == Some(true)
    }
}
