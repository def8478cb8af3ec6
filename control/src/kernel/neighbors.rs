//! Resolved neighbors on the gateway's interfaces.

use std::collections::BTreeMap;
use std::net::IpAddr;

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::NeighborSpec;
use vipgate_netlink::{Change, Neighbor};

/// MAC addresses by interface and IP address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Neighbors(BTreeMap<(InterfaceId, IpAddr), [u8; 6]>);

impl Neighbors {
    /// Applies a neighbor event; returns whether a MAC address was added, changed or removed.
    pub(super) fn apply(&mut self, interface: InterfaceId, change: Change, neighbor: &Neighbor) -> bool {
        let key = (interface, neighbor.address);
        match neighbor.usable_mac().filter(|_| change != Change::Removed) {
            Some(mac) => self.0.insert(key, mac) != Some(mac),
            None => self.0.remove(&key).is_some(),
        }
    }

    /// Removes all neighbors of an interface; returns whether there were any.
    pub(super) fn remove_interface(&mut self, interface: InterfaceId) -> bool {
        let before = self.0.len();
        self.0.retain(|key, _| key.0 != interface);
        before != self.0.len()
    }

    /// The neighbors, sorted by interface and address.
    pub(super) fn spec(&self) -> Vec<NeighborSpec> {
        let spec = |(&(interface, address), &mac): (&(InterfaceId, IpAddr), &[u8; 6])| NeighborSpec {
            interface,
            address,
            mac,
        };
        self.0.iter().map(spec).collect()
    }
}
