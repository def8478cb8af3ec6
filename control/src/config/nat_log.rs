//! `nat_log` of `gateway.yaml`: where the log of translations goes.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest::schema::SocketAddress;

/// The log of translations, as IPFIX (RFC 8158): which endpoint of which tenant could have which ports of a VIP, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NatLog {
    /// The collector's address and port.
    #[schemars(with = "SocketAddress")]
    pub collector: SocketAddr,
    /// How it is reached. Default: udp.
    #[serde(default)]
    pub transport: NatLogTransport,
    /// Whether each session that begins or ends is logged, too. Default: false.
    #[serde(default)]
    pub sessions: bool,
    /// The observation domain, which tells gateways behind one address apart. Default: 0.
    #[serde(default)]
    pub domain: u32,
}

/// How a collector is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NatLogTransport {
    /// Messages that may be lost.
    #[default]
    Udp,
    /// A connection.
    Tcp,
}

impl NatLogTransport {
    /// Its word in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }
}
