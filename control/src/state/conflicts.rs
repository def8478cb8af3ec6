//! Address conflicts, as they are reported: hosts that claim a VIP of this gateway.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use vipgate_common::MinInterval;

/// The last claim to each VIP.
pub type Claims = BTreeMap<IpAddr, Claim>;

/// A claim to a VIP by another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// MAC address of the host.
    pub mac: [u8; 6],
    /// When the claim was last seen.
    pub last_seen: Instant,
    pub(crate) log: MinInterval,
    pub(crate) defense: MinInterval,
}

/// A MAC address as text, `02:00:5e:10:00:01`.
pub(crate) fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
