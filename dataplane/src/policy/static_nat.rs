//! Private addresses of VIPs at this gateway, for static NAT at the outside edge.
//!
//! In a cloud, packets outside have a private address where policy has the VIP, and the cloud translates between the two. Only what
//! is received from and sent to the outside is translated (`wire/static_nat.rs`); everything between knows the VIP alone.

use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt, HashSet};

use crate::flow::address::{Address, V6};
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

/// The private addresses of VIPs at this gateway; empty where there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticNat {
    /// Private to public.
    received: Map,
    /// Public to private.
    sent: Map,
    is_empty: bool,
}

impl StaticNat {
    /// The translation of VIPs to private addresses. A private address that is a VIP, or another VIP's private address, is left
    /// out: the packets of one of them would be the other's.
    pub(super) fn new(private: &[(IpAddr, IpAddr)], vips: &HashSet<IpAddr>) -> Self {
        let mut used: HashMap<IpAddr, usize> = HashMap::new();
        for (_, private) in private {
            *used.entry(*private).or_default() += 1;
        }
        let mut nat = Self { is_empty: true, ..Self::default() };
        for (vip, private) in private.iter().filter(|(_, private)| used[private] == 1 && !vips.contains(private)) {
            let is_translated = nat.received.insert(*private, *vip) && nat.sent.insert(*vip, *private);
            nat.is_empty &= !is_translated;
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

    /// The private addresses, with their VIPs.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        let v4 = self.received.v4.iter().map(|(private, vip)| (private.to_ip(), vip.to_ip()));
        v4.chain(self.received.v6.iter().map(|(private, vip)| (private.to_ip(), vip.to_ip())))
    }
}
