//! `privileges` of `gateway.yaml` and `policyd.yaml`: what the process gives up.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the process gives up once it runs. Capabilities that it doesn't need go in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Privileges {
    /// What becomes of system calls that it has no use for. Default: `enforce`.
    pub seccomp: Seccomp,
}

/// What becomes of system calls that the process has no use for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Seccomp {
    /// They fail with EPERM, and the kernel logs them.
    #[default]
    Enforce,
    /// The kernel logs them.
    Log,
    /// Nothing: there is no filter.
    Off,
}
