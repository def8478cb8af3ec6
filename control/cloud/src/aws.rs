//! AWS: Elastic IP addresses, each associated with a private address of a gateway's ENI.
//!
//! A claim is two tags. Tags have no compare-and-swap: who claims reads, writes, and reads again, so of two clusters that claim the same
//! address within a fraction of a second both may believe that they have it; then one can't attach it, since it is attached. Private
//! addresses have no tags, so which ones belong to a VIP are tags of its address, one for each ENI, written before they are assigned and
//! deleted after they are unassigned: a process that dies in between leaves nothing that isn't known to be vipgate's.
//!
//! IPv6 addresses have no objects and no tags: those of a pool are listed, and are their own private addresses.

mod addresses;
mod capacity;
mod credentials;
mod ipv6;
mod observe;
mod prepare;
mod query;
mod reply;
mod signature;
mod tags;
mod unmodifiable;
mod unprepare;

use std::sync::Arc;

use hyper::Uri;
use ipnet::IpNet;
use tokio::sync::Mutex;

use self::capacity::InstanceTypes;
pub use self::credentials::{ContainerToken, CredentialSource};
use self::query::Query;
use self::unmodifiable::Unmodifiable;
use crate::api::{CallMeter, Operation};
use crate::error::CloudError;
use crate::provider::{Allocation, Associate, Binding, Claim, Nic, NicId, Observation, Provider, PublicAddress, Scope};

const DESCRIBE_ADDRESSES: Operation = Operation::read("DescribeAddresses");
const DESCRIBE_INTERFACES: Operation = Operation::read("DescribeNetworkInterfaces");
const DESCRIBE_INSTANCES: Operation = Operation::read("DescribeInstances");
const DESCRIBE_TYPES: Operation = Operation::read("DescribeInstanceTypes");
const DESCRIBE_SUBNETS: Operation = Operation::read("DescribeSubnets");
const CREATE_TAGS: Operation = Operation::write("CreateTags");
const DELETE_TAGS: Operation = Operation::write("DeleteTags");
const ASSIGN_PRIVATE: Operation = Operation::write("AssignPrivateIpAddresses");
const UNASSIGN_PRIVATE: Operation = Operation::write("UnassignPrivateIpAddresses");
const ASSIGN_IPV6: Operation = Operation::write("AssignIpv6Addresses");
const UNASSIGN_IPV6: Operation = Operation::write("UnassignIpv6Addresses");
const MODIFY_INTERFACE: Operation = Operation::write("ModifyNetworkInterfaceAttribute");
const ASSOCIATE: Operation = Operation::write("AssociateAddress");
const DISASSOCIATE: Operation = Operation::write("DisassociateAddress");
const ALLOCATE: Operation = Operation::write("AllocateAddress");
const RELEASE: Operation = Operation::write("ReleaseAddress");

/// Where and how.
#[derive(Clone, Debug)]
pub struct Config {
    pub region: String,
    /// What addresses are associated with.
    pub associate: Associate,
    /// Name of the cluster, in claims.
    pub cluster: String,
    /// URL of the API; `None`: that of the region.
    pub endpoint: Option<String>,
    /// Where credentials come from.
    pub credentials: CredentialSource,
}

pub struct Aws {
    config: Config,
    query: Query,
    types: Mutex<InstanceTypes>,
    unmodifiable: Unmodifiable,
}

impl Aws {
    /// A client of a region.
    ///
    /// # Errors
    /// If the endpoint is no URL.
    pub fn new(config: Config, meter: Arc<CallMeter>) -> Result<Self, hyper::http::uri::InvalidUri> {
        let url = config.endpoint.clone().unwrap_or_else(|| endpoint("ec2", &config.region));
        let endpoint: Uri = format!("{}/", url.trim_end_matches('/')).parse()?;
        let credentials = credentials::Credentials::new(config.credentials.clone());
        let query = Query::new(endpoint, &config.region, credentials, meter);
        Ok(Self { config, query, types: Mutex::default(), unmodifiable: Unmodifiable::default() })
    }
}

/// URL of a service in a region.
fn endpoint(service: &str, region: &str) -> String {
    let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    format!("https://{service}.{region}.{domain}")
}

impl Provider for Aws {
    async fn observe(&self, scope: &Scope) -> Result<Observation, CloudError> {
        observe::observe(self, scope).await
    }

    async fn claim(&self, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
        addresses::claim(self, address, claim).await
    }

    async fn unclaim(&self, address: &PublicAddress) -> Result<(), CloudError> {
        addresses::unclaim(self, address).await
    }

    async fn prepare(&self, nic: &Nic, addresses: &[PublicAddress], candidates: &[IpNet]) -> Result<(), CloudError> {
        prepare::prepare(self, nic, addresses, candidates).await
    }

    async fn unprepare(&self, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        unprepare::unprepare(self, nic, bindings).await
    }

    async fn attach(&self, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        addresses::attach(self, nic, None, bindings).await
    }

    async fn move_from_dead(&self, from: &NicId, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        addresses::attach(self, nic, Some(from), bindings).await
    }

    async fn detach(&self, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
        addresses::detach(self, from, addresses).await
    }

    async fn allocate(&self, allocation: &Allocation) -> Result<PublicAddress, CloudError> {
        addresses::allocate(self, allocation).await
    }

    async fn release(&self, address: &PublicAddress) -> Result<(), CloudError> {
        addresses::release(self, address).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_partition_has_its_domain() {
        assert_eq!(endpoint("ec2", "eu-west-1"), "https://ec2.eu-west-1.amazonaws.com");
        assert_eq!(endpoint("ec2", "cn-northwest-1"), "https://ec2.cn-northwest-1.amazonaws.com.cn");
    }
}
