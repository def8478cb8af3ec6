//! Azure: static public IP addresses, each attached to an IP configuration of a gateway's NIC (Microsoft.Network).
//!
//! A NIC is one resource: whoever changes it reads it, and replaces it as a whole if its etag is still the same. So all addresses of
//! an action are one request per NIC, and a move is two: one takes them from the NIC of the dead gateway, one gives them to the
//! next one. Azure refuses an address that is attached elsewhere. The private address of a VIP is an IP configuration named after
//! the public address. Tags of an address hold its claim, and are replaced with its etag: of two claims one fails.

mod allocate;
mod attach;
mod claim;
mod client;
mod credentials;
mod error;
mod interface;
mod observe;
mod operation;
mod prepare;
mod resource_id;
mod subnet;
mod tag;

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

/// Time that an operation may take by default.
const OPERATION_TIMEOUT: Duration = Duration::from_mins(1);

/// Where the addresses are, and how the API is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Subscription of the addresses.
    pub subscription: String,
    /// Resource group of the addresses.
    pub resource_group: String,
    /// Region of addresses that are allocated; `None`: that of the gateways' NICs.
    pub location: Option<String>,
    /// Name of the cluster, in claims.
    pub cluster: String,
    /// What addresses are attached to.
    pub associate: Associate,
    /// Base URL of Azure Resource Manager; `None`: `audience`.
    pub endpoint: Option<String>,
    /// What tokens are for: the URL of Azure Resource Manager in this cloud.
    pub audience: String,
    /// Where tokens come from.
    pub credentials: CredentialSource,
    /// Time that an operation may take after the API accepted it.
    pub operation_timeout: Duration,
}

impl Config {
    /// Configuration with credentials and the cloud (public, China, US Government) of the environment.
    pub fn new(subscription: &str, resource_group: &str, cluster: &str) -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        Self {
            subscription: subscription.to_owned(),
            resource_group: resource_group.to_owned(),
            location: None,
            cluster: cluster.to_owned(),
            associate: Associate::Nic,
            endpoint: None,
            audience: credentials::management_of(variable("AZURE_AUTHORITY_HOST").as_deref()).to_owned(),
            credentials: CredentialSource::from_environment(variable),
            operation_timeout: OPERATION_TIMEOUT,
        }
    }
}

/// Addresses in one resource group.
#[derive(Debug)]
pub struct Azure {
    client: Client,
}

impl Azure {
    /// A provider.
    ///
    /// # Errors
    /// When the configuration asks for what isn't possible.
    pub fn new(config: &Config, meter: Arc<CallMeter>) -> Result<Self, ConfigError> {
        for (field, value) in [("subscription", &config.subscription), ("resourceGroup", &config.resource_group)] {
            if !resource_id::is_name(value) {
                let allowed = "ASCII letters, digits, hyphens, underscores, periods and parentheses";
                return Err(ConfigError::Name { field, value: value.clone(), allowed });
            }
        }
        let endpoint = checked_endpoint(config.endpoint.as_deref().unwrap_or(&config.audience))?;
        Ok(Self { client: Client::new(config, endpoint, meter) })
    }
}

impl Provider for Azure {
    async fn observe(&self, scope: &Scope) -> Result<Observation, CloudError> {
        observe::observe(&self.client, scope).await
    }

    async fn execute(&self, action: &Action, candidates: &[IpNet]) -> Result<(), CloudError> {
        match action {
            Action::Claim(address, claim) => claim::claim(&self.client, address, claim).await,
            Action::Prepare(nic, addresses) => prepare::prepare(&self.client, nic, addresses, candidates).await,
            Action::Attach(nic, bindings) => attach::attach(&self.client, None, nic, bindings).await,
            Action::Move(from, nic, bindings) => attach::attach(&self.client, Some(from), nic, bindings).await,
            Action::Detach(from, addresses) => attach::detach(&self.client, from, addresses).await,
            Action::Unprepare(nic, bindings) => prepare::unprepare(&self.client, nic, bindings).await,
            Action::Unclaim(address) => claim::unclaim(&self.client, address).await,
            Action::Allocate(allocation) => allocate::allocate(&self.client, allocation).await,
            Action::Release(address) => allocate::release(&self.client, address).await,
        }
    }
}
