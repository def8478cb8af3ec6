//! `services` of `gateway.yaml`: rejects and embryonic limits of inbound Services.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Inbound Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Services {
    /// Action for packets to a port of a VIP without a Service. Default: `drop`.
    pub no_service: DenyAction,
    /// Action for packets to a Service without any backend. Default: `reject`.
    pub no_backend: DenyAction,
    /// Maximum number of embryonic (opened, not confirmed) client sessions per VIP; above it the oldest are evicted.
    /// Default: 1/8 of `sessions.capacity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub embryonic_per_vip: Option<u32>,
}

impl Default for Services {
    fn default() -> Self {
        Self { no_service: DenyAction::Drop, no_backend: DenyAction::Reject, embryonic_per_vip: None }
    }
}

/// Action for packets without a Service or backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DenyAction {
    /// Drop silently.
    Drop,
    /// TCP reset or ICMP port unreachable, rate limited.
    Reject,
}
