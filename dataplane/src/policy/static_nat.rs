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

impl AddressMap for Map {
    #[inline]
    fn v4(&self, address: u32) -> Option<u32> {
        self.v4.get(&address).copied()
    }

    #[inline]
    fn v6(&self, address: V6) -> Option<V6> {
        self.v6.get(&address).copied()
    }
}

impl Map {
    fn insert(&mut self, from: IpAddr, to: IpAddr) {
        if let (Some(from), Some(to)) = (u32::from_ip(from), u32::from_ip(to)) {
            self.v4.insert(from, to);
        }
        if let (Some(from), Some(to)) = (V6::from_ip(from), V6::from_ip(to)) {
            self.v6.insert(from, to);
        }
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
            nat.received.insert(*private, *vip);
            nat.sent.insert(*vip, *private);
            nat.is_empty = false;
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
        translate(frame, Side::Received, &self.received);
    }

    /// Translates a frame that is sent to the outside.
    pub fn sent(&self, frame: &mut [u8]) {
        translate(frame, Side::Sent, &self.sent);
    }

    /// The private addresses, with their VIPs.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        let v4 = self.received.v4.iter().map(|(private, vip)| (private.to_ip(), vip.to_ip()));
        v4.chain(self.received.v6.iter().map(|(private, vip)| (private.to_ip(), vip.to_ip())))
    }
}
