//! What a cloud provider has for an AddressPool: observed by the policy server, not part of a manifest.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Addresses and NICs of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct CloudPool {
    /// The addresses that VIPs can have: those that nobody else uses.
    pub addresses: BTreeMap<IpAddr, CloudAddress>,
    /// The NICs of gateways, by gateway.
    pub nics: BTreeMap<String, CloudNic>,
}

/// A public address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct CloudAddress {
    /// The object that it is claimed for, `namespace/name`.
    pub owner: Option<String>,
    /// Its zone; `None`: it can be attached in any.
    pub zone: Option<String>,
    /// Its private addresses, by gateway.
    pub private: BTreeMap<String, IpAddr>,
}

/// The NIC of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct CloudNic {
    /// IPv4 VIPs that it can have.
    pub capacity: usize,
    /// IPv6 VIPs that it can have.
    pub ipv6_capacity: usize,
    pub zone: Option<String>,
}

impl CloudAddress {
    /// Whether it is claimed for an object, alone or with others that share it; `name`: `Service namespace/name`.
    pub fn is_claimed_for(&self, name: &str) -> bool {
        let owner = claim_owner(name);
        self.owner.as_ref().is_some_and(|owners| *owners == owner || owners.split(", ").any(|it| it == owner))
    }
}

/// The owner in the claim on a VIP with this name. Tags have at most 256 characters (AWS, Azure).
pub fn claim_owner(name: &str) -> String {
    name.chars().take(MAX_OWNER).collect()
}

/// Characters of an owner.
const MAX_OWNER: usize = 200;

impl CloudPool {
    /// Whether a gateway can have an address.
    pub fn fits(&self, address: IpAddr, gateway: &str) -> bool {
        let Some(nic) = self.nics.get(gateway) else { return false };
        let zone = self.addresses.get(&address).and_then(|address| address.zone.as_ref());
        zone.is_none_or(|zone| nic.zone.as_ref() == Some(zone))
    }
}

#[cfg(test)]
impl super::Object {
    /// Gives a pool observed addresses, each with the object that it is claimed for.
    pub(crate) fn observe_addresses(&mut self, addresses: &[(&str, Option<&str>)]) {
        let super::Body::AddressPool(pool) = &mut self.body else { return };
        let address = |(address, owner): &(&str, Option<&str>)| {
            let cloud = CloudAddress { owner: owner.map(str::to_owned), ..CloudAddress::default() };
            (address.parse().unwrap(), cloud)
        };
        let addresses = addresses.iter().map(address).collect();
        pool.cloud = Some(std::sync::Arc::new(CloudPool { addresses, ..CloudPool::default() }));
    }
}
