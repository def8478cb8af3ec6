//! What a cloud provider has for an AddressPool: observed by the policy server, not part of a manifest.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Addresses and NICs of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudPool {
    /// The addresses that VIPs can have: those that nobody else uses.
    pub addresses: BTreeMap<IpAddr, CloudAddress>,
    /// The NICs of gateways, by gateway.
    pub nics: BTreeMap<String, CloudNic>,
}

/// A public address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudAddress {
    /// The object that it is claimed for, `namespace/name`.
    pub owner: Option<String>,
    /// Its zone; `None`: it can be attached in any.
    pub zone: Option<String>,
    /// Its private addresses, by gateway.
    pub private: BTreeMap<String, IpAddr>,
}

/// The NIC of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudNic {
    /// IPv4 VIPs that it can have.
    pub capacity: usize,
    /// IPv6 VIPs that it can have.
    pub ipv6_capacity: usize,
    /// Its zone.
    pub zone: Option<String>,
}

impl CloudPool {
    /// Whether a gateway can have an address.
    pub fn fits(&self, address: IpAddr, gateway: &str) -> bool {
        let Some(nic) = self.nics.get(gateway) else { return false };
        let zone = self.addresses.get(&address).and_then(|address| address.zone.as_ref());
        zone.is_none_or(|zone| nic.zone.as_ref() == Some(zone))
    }
}
