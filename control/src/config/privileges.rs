//! `privileges` of `gateway.yaml` and `policyd.yaml`: the seccomp filter.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Privileges that the process drops after startup. Unneeded capabilities are always dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Privileges {
    /// Seccomp filter: action for unneeded system calls. Default: `enforce`.
    pub seccomp: Seccomp,
}

/// Action for system calls that the process doesn't need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Seccomp {
    /// Fail with EPERM; the kernel logs them.
    #[default]
    Enforce,
    /// Allow; the kernel logs them.
    Log,
    /// No filter.
    Off,
}
