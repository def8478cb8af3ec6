//! `nat_log` of `gateway.yaml`: IPFIX export of the NAT log.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vipgate_policy::schema::SocketAddress;

/// NAT log, as IPFIX (RFC 8158): which endpoint had which ports of a VIP, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NatLog {
    /// Address and port of the collector; the port of IPFIX is 4739.
    #[schemars(with = "SocketAddress")]
    pub collector: SocketAddr,
    /// Transport to the collector. Default: `udp`.
    #[serde(default)]
    pub transport: NatLogTransport,
    /// Whether the start and end of each session are logged, in addition to port blocks. Default: `false`.
    #[serde(default)]
    pub sessions: bool,
    /// Observation domain id; distinguishes gateways with the same source address. Default: 0.
    #[serde(default)]
    pub domain: u32,
}

/// Transport to the collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NatLogTransport {
    /// UDP; messages may be lost.
    #[default]
    Udp,
    /// TCP.
    Tcp,
}

impl NatLogTransport {
    /// Value in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }
}
