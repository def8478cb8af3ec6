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

/// Why a configuration is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A subscription or resource group that can't be one.
    #[error(
        "{field}: {value:?} is not supported: ASCII letters, digits, hyphens, underscores, periods and parentheses"
    )]
    Name {
        /// `subscription` or `resourceGroup`.
        field: &'static str,
        value: String,
    },
    /// An endpoint that isn't a URL.
    #[error("endpoint: {0:?} must be https://HOST, or http:// with a loopback address")]
    Endpoint(String),
}

/// Addresses in one resource group.
pub struct Azure {
    client: Arc<Client>,
}

impl fmt::Debug for Azure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Azure { .. }")
    }
}

impl Azure {
    /// A provider.
    ///
    /// # Errors
    /// When the configuration asks for what isn't possible.
    pub fn new(config: &Config, meter: Arc<CallMeter>) -> Result<Self, ConfigError> {
        for (field, value) in [("subscription", &config.subscription), ("resourceGroup", &config.resource_group)] {
            if !resource_id::is_name(value) {
                return Err(ConfigError::Name { field, value: value.clone() });
            }
        }
        let endpoint = config.endpoint.as_deref().unwrap_or(&config.audience).trim_end_matches('/');
        if !is_trusted_url(endpoint) {
            return Err(ConfigError::Endpoint(endpoint.to_owned()));
        }
        Ok(Self { client: Arc::new(Client::new(config, endpoint, meter)) })
    }
}

impl Provider for Azure {
    async fn observe(&self, scope: &Scope) -> Result<Observation, CloudError> {
        observe::observe(&self.client, scope).await
    }

    async fn claim(&self, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
        claim::claim(&self.client, address, claim).await
    }

    async fn unclaim(&self, address: &PublicAddress) -> Result<(), CloudError> {
        claim::unclaim(&self.client, address).await
    }

    async fn prepare(&self, nic: &Nic, addresses: &[PublicAddress], candidates: &[IpNet]) -> Result<(), CloudError> {
        prepare::prepare(&self.client, nic, addresses, candidates).await
    }

    async fn unprepare(&self, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        prepare::unprepare(&self.client, nic, bindings).await
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
