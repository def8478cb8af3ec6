//! `services` of `gateway.yaml`: what clients of Services may and hear.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Inbound Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Services {
    /// What is said at a VIP where no Service listens: a TCP reset, or ICMP port unreachable. Default: `drop`, nothing.
    pub no_service: Unserved,
    /// The same where a Service listens that has no backend at all. Default: `reject`.
    pub no_backend: Unserved,
    /// Sessions that clients of one VIP may have opened and not confirmed; beyond it the oldest of them end. Default: an eighth
    /// of `sessions.capacity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub embryonic_per_vip: Option<u32>,
}

impl Default for Services {
    fn default() -> Self {
        Self { no_service: Unserved::Drop, no_backend: Unserved::Reject, embryonic_per_vip: None }
    }
}

/// What whoever can't be served hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unserved {
    /// Nothing.
    Drop,
    /// That nobody listens, as fast as the gateway may speak.
    Reject,
}
