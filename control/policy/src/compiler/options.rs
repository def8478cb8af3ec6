//! Options of a compiler: what follows from the process that compiles, not from manifests.

use std::fmt;

use ring::{digest, hmac};

use super::tenancy::Tenancy;

/// MAC address of the tunnel endpoints of all node agents without a [`TunnelSecret`], locally administered. Tunnels carry
/// IP packets only, so it tells no node from another.
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
    /// Secret of their MAC addresses; `None`: all have [`NODE_AGENT_MAC`], and it authenticates nobody.
    pub secret: Option<TunnelSecret>,
}

impl NodeAgents {
    /// MAC address of the tunnel endpoint of a node.
    pub(super) fn mac(&self, node: &str) -> [u8; 6] {
        self.secret.map_or(NODE_AGENT_MAC, |secret| secret.mac(node))
    }
}

/// Secret from which all servers derive the same MAC address for a node's tunnel endpoint. Without it, a packet that passes
/// for the node's, or that the node accepts as a gateway's, takes a guess of 46 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TunnelSecret([u8; 32]);

impl TunnelSecret {
    /// From bytes of any length, which should hold at least 128 random bits.
    pub fn new(bytes: &[u8]) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
        Self(hash)
    }

    /// The node's MAC address: a unicast one, locally administered (IEEE 802c).
    fn mac(&self, node: &str) -> [u8; 6] {
        let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &self.0));
        context.update(b"vipgate node tunnel endpoint\0");
        context.update(node.as_bytes());
        let mut mac = [0; 6];
        mac.copy_from_slice(&context.sign().as_ref()[..6]);
        mac[0] = mac[0] & 0b1111_1100 | 0b10;
        mac
    }
}

impl fmt::Debug for TunnelSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TunnelSecret")
    }
}

impl From<Tenancy> for Options {
    fn from(tenancy: Tenancy) -> Self {
        Self { tenancy, node_agents: None }
    }
}
