//! Private addresses of VIPs at this gateway, for static NAT at the outside edge.
//!
//! In a cloud, packets outside have a private address where policy has the VIP, and the cloud translates between the two. Only what
//! is received from and sent to the outside is translated (`wire/static_nat.rs`); everything between knows the VIP alone.

use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt, HashSet};

use crate::flow::address::V6;
use crate::wire::static_nat::{AddressMap, Side, translate};

/// One direction: what replaces an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Map {
    v4: HashMap<u32, u32>,
    v6: HashMap<V6, V6>,
}

/// One direction, and the other one.
struct Maps<'a>(&'a Map, &'a Map);

impl AddressMap for Maps<'_> {
    #[inline]
    fn v4(&self, address: u32) -> Option<u32> {
        self.0.v4.get(&address).copied()
    }

    #[inline]
    fn v6(&self, address: V6) -> Option<V6> {
        self.0.v6.get(&address).copied()
    }

    // Nobody outside has the VIP as a neighbor: what asks for it asks for the private address, which isn't a VIP.
    fn hidden_v4(&self, address: u32) -> Option<u32> {
        self.1.v4.get(&address).copied()
    }

    fn hidden_v6(&self, address: V6) -> Option<V6> {
        self.1.v6.get(&address).copied()
    }
}

impl Map {
    /// Returns whether both addresses are of one family.
    fn insert(&mut self, from: IpAddr, to: IpAddr) -> bool {
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => drop(self.v4.insert(from.to_bits(), to.to_bits())),
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                self.v6.insert(V6::from_bits(from.to_bits()), V6::from_bits(to.to_bits()));
            }
            _ => return false,
        }
        true
    }
}

/// A VIP with its private address at this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrivateVip {
    pub vip: IpAddr,
    pub private: IpAddr,
    /// It is no longer in the policy, but a worker still holds ports of it.
    pub retired: bool,
}

/// The private addresses of VIPs at this gateway; empty where there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticNat {
    /// Private to public.
    received: Map,
    /// Public to private.
    sent: Map,
    /// Private and public addresses of the VIPs in the policy.
    live: Vec<(IpAddr, IpAddr)>,
    is_empty: bool,
}

impl StaticNat {
    /// The translation of VIPs to private addresses. A private address that is a VIP of the policy, or another VIP's private
    /// address, is left out: the packets of one of them would be the other's. A retired VIP keeps its private address, for packets
    /// on their way, until a VIP of the policy has that.
    pub(super) fn new(all: &[PrivateVip], vips: &HashSet<IpAddr>) -> Self {
        let mut used: HashMap<IpAddr, (usize, usize)> = HashMap::new();
        for it in all {
            let (live, retired) = used.entry(it.private).or_default();
            *(if it.retired { retired } else { live }) += 1;
        }
        let is_unique = |it: &&PrivateVip| match used[&it.private] {
            (live, retired) if it.retired => live == 0 && retired == 1,
            (live, _) => live == 1,
        };
        let mut nat = Self { is_empty: true, ..Self::default() };
        for it in all.iter().filter(is_unique).filter(|it| !vips.contains(&it.private)) {
            if !nat.received.insert(it.private, it.vip) || !nat.sent.insert(it.vip, it.private) {
                continue;
            }
            nat.is_empty = false;
            if !it.retired {
                nat.live.push((it.private, it.vip));
            }
        }
        nat
    }

    /// Whether nothing is translated.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Translates a frame that was received from outside.
    pub fn received(&self, frame: &mut [u8]) {
        translate(frame, Side::Received, &Maps(&self.received, &self.sent));
    }

    /// Translates a frame that is sent to the outside.
    pub fn sent(&self, frame: &mut [u8]) {
        translate(frame, Side::Sent, &Maps(&self.sent, &self.received));
    }

    /// The private addresses, with their VIPs; without retired ones, which are no longer captured either.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        self.live.iter().copied()
    }
}

#[cfg(test)]
mod tests;
