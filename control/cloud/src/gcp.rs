//! Google Cloud: regional static external IPv4 addresses, attached as access configs of gateways' NICs (Compute Engine API v1).
//!
//! A NIC has at most one IPv4 access config, which translates its primary address. So a NIC has one VIP at most, nothing has to
//! be prepared, and a move is two operations: deleteAccessConfig there, addAccessConfig here. Labels of an address hold its
//! claim; setLabels with a fingerprint is the only compare-and-swap that the API has.

mod allocate;
mod attach;
mod claim;
mod client;
mod credentials;
mod error;
mod label;
mod name;
mod observe;
mod operation;
mod resource;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use thiserror::Error;

use self::client::Client;
pub use self::credentials::CredentialSource;
use crate::http::is_trusted_url;
use crate::provider::{Allocation, Associate, Binding, Claim, Nic, NicId, Observation, Provider, PublicAddress, Scope};
use crate::{CallMeter, CloudError};

/// Base of the API's URLs.
const ENDPOINT: &str = "https://compute.googleapis.com";
/// Time that an operation may take by default.
const OPERATION_TIMEOUT: Duration = Duration::from_mins(1);

/// Where the addresses and gateways are, and how the API is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Project of addresses and gateways.
    pub project: String,
    /// Region of addresses and gateways.
    pub region: String,
    /// How VIPs get private addresses; [`Associate::Instance`] is the only possible one.
    pub associate: Associate,
    /// Base URL of the API, without `/compute/v1`; `None`: `https://compute.googleapis.com`.
    pub endpoint: Option<String>,
    /// Where credentials come from.
    pub credentials: CredentialSource,
    /// Time that an operation may take after the API accepted it.
    pub operation_timeout: Duration,
}

impl Config {
    /// Configuration with credentials of the environment and the public endpoint.
    pub fn new(project: &str, region: &str) -> Self {
        Self {
            project: project.to_owned(),
            region: region.to_owned(),
            associate: Associate::Instance,
            endpoint: None,
            credentials: CredentialSource::from_env(),
            operation_timeout: OPERATION_TIMEOUT,
        }
    }
}

/// Why a configuration is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// `associate: nic`.
    #[error(
        "associate: nic is not possible in Google Cloud: an external address belongs to the primary address of a NIC; \
         use associate: instance"
    )]
    Associate,
    /// A project or region that can't be one.
    #[error("{field}: {value:?} is not a name of Google Cloud: lower-case letters, digits and hyphens")]
    Name {
        /// `project` or `region`.
        field: &'static str,
        value: String,
    },
    /// An endpoint that isn't a URL.
    #[error("endpoint: {0:?} must be https://HOST, or http:// with a loopback address")]
    Endpoint(String),
}

/// Addresses and gateways in one region of a project.
pub struct Gcp {
    client: Arc<Client>,
}

impl fmt::Debug for Gcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gcp { .. }")
    }
}

impl Gcp {
    /// A provider.
    ///
    /// # Errors
    /// When the configuration asks for what isn't possible.
    pub fn new(config: &Config, meter: Arc<CallMeter>) -> Result<Self, ConfigError> {
        if config.associate != Associate::Instance {
            return Err(ConfigError::Associate);
        }
        for (field, value) in [("project", &config.project), ("region", &config.region)] {
            if !name::is_plain(value) {
                return Err(ConfigError::Name { field, value: value.clone() });
            }
        }
        let endpoint = config.endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
        if !is_trusted_url(endpoint) {
            return Err(ConfigError::Endpoint(endpoint.to_owned()));
        }
        Ok(Self { client: Arc::new(Client::new(config, endpoint, meter)) })
    }
}

impl Provider for Gcp {
    async fn observe(&self, scope: &Scope) -> Result<Observation, CloudError> {
        observe::observe(&self.client, scope).await
    }

    async fn claim(&self, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
        claim::claim(&self.client, address, claim).await
    }

    async fn unclaim(&self, address: &PublicAddress) -> Result<(), CloudError> {
        claim::unclaim(&self.client, address).await
    }

    /// Only checks: a NIC's primary address needs no preparation.
    async fn prepare(&self, nic: &Nic, addresses: &[PublicAddress], candidates: &[IpNet]) -> Result<(), CloudError> {
        attach::check_nic(&self.client, nic, addresses, candidates).await
    }

    /// Nothing was given.
    async fn unprepare(&self, _nic: &Nic, _bindings: &[Binding]) -> Result<(), CloudError> {
        Ok(())
    }

    async fn attach(&self, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        attach::attach(&self.client, None, nic, bindings).await
    }

    async fn move_from_dead(&self, from: &NicId, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        attach::attach(&self.client, Some(from), nic, bindings).await
    }

    async fn detach(&self, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
        attach::detach(&self.client, from, addresses).await
    }

    async fn allocate(&self, allocation: &Allocation) -> Result<PublicAddress, CloudError> {
        allocate::allocate(&self.client, allocation).await
    }

    async fn release(&self, address: &PublicAddress) -> Result<(), CloudError> {
        allocate::release(&self.client, address).await
    }
}
