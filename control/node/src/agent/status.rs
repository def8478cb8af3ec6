//! What the agent shows of itself.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::indices::Indices;
use crate::kernel::Counter;
use crate::plan::NodePlan;
use crate::policy::NodePolicy;

/// The agent's state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub policy: Option<Arc<NodePolicy>>,
    /// What the kernel has; `None`: it can't be programmed, or isn't yet.
    pub plan: Option<Arc<NodePlan>>,
    /// MTU inside the tunnel, bytes.
    pub mtu: Option<u32>,
    /// Number of the membership view; 0: none.
    pub view: u64,
    /// Numbers of gateways, for the next process.
    pub indices: Indices,
    /// Gateways with a tunnel endpoint.
    pub gateways: BTreeMap<Arc<str>, GatewayStatus>,
    /// How many packets are held, were released, and were dropped.
    pub held: (usize, u64, u64),
    /// Named counters of the table.
    pub counters: BTreeMap<String, Counter>,
    /// How often something was repaired that others had changed.
    pub repairs: u64,
    /// Why the kernel can't be programmed.
    pub error: Option<String>,
}

/// A gateway as its echoes show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayStatus {
    /// Its tunnel endpoint.
    pub endpoint: SocketAddr,
    /// Round-trip time of its last answer.
    pub round_trip: Option<Duration>,
}
