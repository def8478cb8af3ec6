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
mod resource;

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use self::client::Client;
pub use self::credentials::CredentialSource;
use crate::execute::Provider;
use crate::http::checked_endpoint;
use crate::plan::Action;
use crate::provider::{Associate, Observation, Scope};
use crate::{CallMeter, CloudError, ConfigError};

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

/// Addresses and gateways in one region of a project.
#[derive(Debug)]
pub struct Gcp {
    client: Client,
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
                let allowed = "lower-case letters, digits and hyphens";
                return Err(ConfigError::Name { field, value: value.clone(), allowed });
            }
        }
        let endpoint = checked_endpoint(config.endpoint.as_deref().unwrap_or(ENDPOINT))?;
        Ok(Self { client: Client::new(config, endpoint, meter) })
    }
}

impl Provider for Gcp {
    async fn observe(&self, scope: &Scope) -> Result<Observation, CloudError> {
        observe::observe(&self.client, scope).await
    }

    async fn execute(&self, action: &Action, candidates: &[IpNet]) -> Result<(), CloudError> {
        match action {
            Action::Claim(address, claim) => claim::claim(&self.client, address, claim).await,
            // Only checks: a NIC's primary address needs no preparation.
            Action::Prepare(nic, addresses) => attach::check_nic(&self.client, nic, addresses, candidates).await,
            Action::Attach(nic, bindings) => attach::attach(&self.client, None, nic, bindings).await,
            Action::Move(from, nic, bindings) => attach::attach(&self.client, Some(from), nic, bindings).await,
            Action::Detach(from, addresses) => attach::detach(&self.client, from, addresses).await,
            // Nothing was given.
            Action::Unprepare(..) => Ok(()),
            Action::Unclaim(address) => claim::unclaim(&self.client, address).await,
            Action::Allocate(allocation) => allocate::allocate(&self.client, allocation).await,
            Action::Release(address) => allocate::release(&self.client, address).await,
        }
    }
}
