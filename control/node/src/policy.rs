//! The policy of one node: its pods, the policies that cover them, and their gateways.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

/// All that the policy server says about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// The node's name.
    pub node: Arc<str>,
    pub tunnel: TunnelEndpoint,
    /// Prefixes of its pods.
    pub pod_prefixes: Vec<IpNet>,
    /// The policies of its pods.
    pub policies: Vec<EgressPolicy>,
    /// Distinct orders of gateways: the home, then backups.
    pub orders: Vec<Arc<[Arc<str>]>>,
    /// The addresses of its pods.
    pub pods: BTreeMap<IpAddr, Pod>,
}

/// The node's end of all tunnels (VTEP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelEndpoint {
    /// Address and UDP port; gateways have the same port.
    pub address: SocketAddr,
    /// VXLAN network identifier.
    pub vni: u32,
    /// MAC address.
    pub mac: [u8; 6],
}

/// The destinations of an egress policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressPolicy {
    /// `EgressPolicy namespace/name`, or `Service namespace/name`.
    pub name: Arc<str>,
    /// Prefixes whose packets gateways translate.
    pub destinations: Vec<IpNet>,
    /// Prefixes whose packets are routed unchanged.
    pub excluded: Vec<IpNet>,
}

/// A pod's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// `namespace/pod`; empty if unknown.
    pub name: Arc<str>,
    /// The policy that covers it; `None`: its packets leave as without vipgate.
    pub coverage: Option<Coverage>,
}

/// How policy covers a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Index of the policy.
    pub policy: usize,
    /// Index of the order of its gateways; `None`: any gateway.
    pub order: Option<usize>,
    /// Whether it has a VIP; without one its packets are dropped.
    pub has_vip: bool,
}

/// What is inside the cluster: routed unchanged, unless a policy has an equally long or longer prefix among its
/// destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Prefixes of pods and Services.
    pub prefixes: Vec<IpNet>,
    pub nodes: Vec<IpAddr>,
}
