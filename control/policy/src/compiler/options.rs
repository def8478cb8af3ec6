//! Options of a compiler: what follows from the process that compiles, not from manifests.

use super::tenancy::Tenancy;

/// MAC address of the tunnel endpoints of all node agents, locally administered. Tunnels carry IP packets only, so it
/// tells no node from another.
pub const NODE_AGENT_MAC: [u8; 6] = [0x0a, 0x76, 0x6e, 0x6f, 0x64, 0x65];

/// Options of a compiler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// What tenants may use.
    pub tenancy: Tenancy,
    /// The agents on Kubernetes nodes; `None`: nodes run none.
    pub node_agents: Option<NodeAgents>,
}

/// The agents on Kubernetes nodes, which send pods' packets to gateways in VXLAN tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAgents {
    /// UDP port of their tunnel endpoints.
    pub port: u16,
    /// VXLAN network identifier, 24 bits.
    pub vni: u32,
}

impl From<Tenancy> for Options {
    fn from(tenancy: Tenancy) -> Self {
        Self { tenancy, node_agents: None }
    }
}
