//! `cloud` of `policyd.yaml`: public addresses of cloud providers.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;
use vipgate_policy::schema::{NAME_PATTERN, URL_PATTERN};

/// Public addresses of cloud providers, for AddressPools with a `provider`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CloudConfig {
    /// Name of the cluster in the claims on addresses, unique among all clusters that use the account.
    #[schemars(regex(pattern = NAME_PATTERN))]
    pub cluster: String,
    /// Whether nothing is changed at providers; `vipgate cloud plan` shows what would be. Default: `false`.
    #[serde(default)]
    pub dry_run: bool,
    /// File with the last observations, for a start while a provider isn't reachable. Default: none.
    pub cache: Option<PathBuf>,
    /// URLs of the providers' APIs, such as private endpoints. Default: the public ones.
    #[serde(default)]
    pub endpoints: CloudEndpoints,
}

/// URLs of the providers' APIs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CloudEndpoints {
    /// Of EC2.
    #[schemars(regex(pattern = URL_PATTERN))]
    pub aws: Option<String>,
    /// Of Azure Resource Manager.
    #[schemars(regex(pattern = URL_PATTERN))]
    pub azure: Option<String>,
    /// Of Compute Engine, without `/compute/v1`.
    #[schemars(regex(pattern = URL_PATTERN))]
    pub gcp: Option<String>,
}
