//! Addresses and instances.

use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpAddress {
    pub address: String,
    /// `EXTERNAL` or `INTERNAL`.
    pub address_type: String,
    pub description: String,
    pub labels: BTreeMap<String, String>,
    /// Changes of the labels; the fingerprint is made of it.
    pub label_version: u32,
    /// `PREMIUM` or `STANDARD`.
    pub tier: String,
    /// URL of something that isn't an instance and uses it.
    pub user: Option<String>,
    /// Whether it is still being reserved.
    pub is_reserving: bool,
}

impl Default for GcpAddress {
    fn default() -> Self {
        Self {
            address: String::new(),
            address_type: "EXTERNAL".to_owned(),
            description: String::new(),
            labels: BTreeMap::new(),
            label_version: 1,
            tier: "PREMIUM".to_owned(),
            user: None,
            is_reserving: false,
        }
    }
}

impl GcpAddress {
    pub(super) fn fingerprint(&self) -> String {
        format!("{:08x}", self.label_version.wrapping_mul(0x9e37_79b1))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpInstance {
    pub zone: String,
    /// Whether it may forward.
    pub can_ip_forward: bool,
    /// Its NICs by name.
    pub interfaces: BTreeMap<String, GcpInterface>,
}

/// A NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpInterface {
    /// Its primary address.
    pub network_ip: String,
    /// One at most.
    pub access_config: Option<GcpAccessConfig>,
}

/// A public address in front of a NIC's primary address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpAccessConfig {
    pub name: String,
    /// The public address.
    pub nat_ip: String,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpState {
    /// Addresses by name.
    pub addresses: BTreeMap<String, GcpAddress>,
    /// Instances by name.
    pub instances: BTreeMap<String, GcpInstance>,
    /// Addresses at most.
    pub quota: usize,
    /// Addresses that were ever allocated.
    pub allocated: u8,
}

impl Default for GcpState {
    fn default() -> Self {
        Self { addresses: BTreeMap::new(), instances: BTreeMap::new(), quota: 1000, allocated: 0 }
    }
}

impl GcpState {
    /// Name of the instance that has an address.
    pub(super) fn instance_with(&self, address: &str) -> Option<&str> {
        let has = |interface: &GcpInterface| interface.access_config.as_ref().is_some_and(|it| it.nat_ip == address);
        let found = self.instances.iter().find(|(_, instance)| instance.interfaces.values().any(has));
        found.map(|(name, _)| name.as_str())
    }

    /// Whether anything uses an address.
    pub(super) fn is_used(&self, address: &GcpAddress) -> bool {
        address.user.is_some() || self.instance_with(&address.address).is_some()
    }
}
