//! The captured traffic, and changes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

/// The captured traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SteeringTables {
    /// Covered pods, with the ID of their policy.
    pub endpoints: BTreeMap<IpAddr, u32>,
    pub vips: BTreeSet<IpAddr>,
    /// Private addresses of VIPs in a cloud. One may be a local address, too: what resolves and keeps it is the kernel's.
    pub private_addresses: BTreeSet<IpAddr>,
    /// Listening addresses of Services' backends.
    pub listeners: BTreeSet<Listener>,
    /// Addresses of the gateway's kernel: packets from pods to them are not captured.
    pub local_addresses: BTreeSet<IpAddr>,
    /// Tunnel endpoints: an address of this gateway, and a UDP port.
    pub tunnels: BTreeSet<(IpAddr, u16)>,
    /// Destinations by policy, and whether they are translated. Longest prefix match; without a match, not translated.
    pub policy_cidrs: BTreeMap<(u32, IpNet), bool>,
    /// Pod prefixes: packets from them on inside interfaces to destinations outside of the cluster are captured even if
    /// no policy covers them.
    pub pod_cidrs: BTreeSet<IpNet>,
    /// Prefixes in the cluster: destinations in them are translated only by policy prefixes of at least the same
    /// length.
    pub cluster_cidrs: BTreeSet<IpNet>,
}

/// Listening address of a backend: address, port, IP protocol number.
pub type Listener = (IpAddr, u16, u8);

/// Policy ID of endpoints whose policy isn't in force yet: what they send is dropped, and so are packets to them, as it
/// has no prefixes.
pub const NO_POLICY: u32 = u32::MAX;

/// A change of the captured traffic. What it doesn't name stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SteeringChange {
    /// New and changed entries. Addresses keep their other roles. Of a policy that has prefixes here, these are all.
    pub added: SteeringTables,
    /// Removed roles of addresses, and removed prefixes.
    pub removed: SteeringTables,
}
