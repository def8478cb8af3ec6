//! Options of a compiler: what follows from the process that compiles, not from manifests.

use std::borrow::Cow;
use std::fmt;

use ring::{digest, hmac};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use vipgate_dataplane::policy::limits::Limit;

use super::cluster::Cluster;
use super::tenancy::Tenancy;
use crate::address_record::Recorded;

/// MAC address of the tunnel endpoints of all node agents without a [`TunnelSecret`], locally administered. Tunnels carry
/// IP packets only, so it tells no node from another.
pub const NODE_AGENT_MAC: [u8; 6] = [0x0a, 0x76, 0x6e, 0x6f, 0x64, 0x65];

/// Options of a compiler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Cluster settings of the process's configuration.
    pub cluster: Cluster,
    /// The part of each limit of the whole that one namespace may have.
    pub namespace_share: Share,
    /// What tenants may use.
    pub tenancy: Tenancy,
    /// The agents on Kubernetes nodes; `None`: nodes run none.
    pub node_agents: Option<NodeAgents>,
    /// The record of addresses of pools; `None`: what is given of pools is a function of the manifests alone.
    pub recorded: Option<Recorded>,
}

/// A part of a limit, in billionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "f64")]
pub struct Share(u32);

/// A part that isn't one.
#[derive(Debug, thiserror::Error)]
#[error("must be above 0 and at most 1, is {0}")]
pub struct InvalidShare(f64);

impl TryFrom<f64> for Share {
    type Error = InvalidShare;

    fn try_from(part: f64) -> Result<Self, InvalidShare> {
        Self::new(part).ok_or(InvalidShare(part))
    }
}

impl JsonSchema for Share {
    fn schema_name() -> Cow<'static, str> {
        "Share".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    }
}

impl Share {
    /// The whole: where there are no tenants.
    pub const WHOLE: Self = Self(Self::BILLION);
    /// Default of a policy server.
    pub const QUARTER: Self = Self(Self::BILLION / 4);
    const BILLION: u32 = 1_000_000_000;

    /// From a number above 0, at most 1.
    pub fn new(part: f64) -> Option<Self> {
        let billionths = (part * f64::from(Self::BILLION)).round();
        #[expect(clippy::cast_sign_loss, reason = "it is in the range")]
        (1.0..=f64::from(Self::BILLION)).contains(&billionths).then_some(Self(billionths as u32))
    }

    /// The part of a limit, at least 1.
    pub fn of(self, limit: &Limit) -> usize {
        (limit.max as u64 * u64::from(self.0) / u64::from(Self::BILLION)).max(1) as usize
    }
}

impl Default for Share {
    fn default() -> Self {
        Self::WHOLE
    }
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
        Self { tenancy, ..Self::default() }
    }
}
