//! The neighbours on the gateway's interfaces that packets can be sent to.

use std::collections::BTreeMap;
use std::net::IpAddr;

use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::NeighbourSpec;

use super::message::{Change, Neighbour};

/// Link addresses by interface and address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Neighbours(BTreeMap<(InterfaceId, IpAddr), [u8; 6]>);

impl Neighbours {
    /// A neighbour as it is now, or its end; returns whether a link address has come, changed or gone.
    pub(super) fn apply(&mut self, interface: InterfaceId, change: Change, neighbour: &Neighbour) -> bool {
        let key = (interface, neighbour.address);
        match neighbour.usable_mac().filter(|_| change != Change::Gone) {
            Some(mac) => self.0.insert(key, mac) != Some(mac),
            None => self.0.remove(&key).is_some(),
        }
    }

    /// Forgets all neighbours on an interface; returns whether there were any.
    pub(super) fn forget(&mut self, interface: InterfaceId) -> bool {
        let before = self.0.len();
        self.0.retain(|key, _| key.0 != interface);
        before != self.0.len()
    }

    /// The neighbours, sorted by interface and address.
    pub(super) fn spec(&self) -> Vec<NeighbourSpec> {
        let spec = |(&(interface, address), &mac): (&(InterfaceId, IpAddr), &[u8; 6])| NeighbourSpec {
            interface,
            address,
            mac,
        };
        self.0.iter().map(spec).collect()
    }
}
