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
mod describe;
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
use crate::execute::Provider;
use crate::plan::Action;
use crate::provider::{Associate, Observation, Scope};

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
        let credentials = credentials::Credentials::new(config.credentials.clone(), &config.region);
        let query = Query::new(endpoint, credentials, meter);
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

    async fn execute(&self, action: &Action, candidates: &[IpNet]) -> Result<(), CloudError> {
        match action {
            Action::Claim(address, claim) => addresses::claim(self, address, claim).await,
            Action::Prepare(nic, addresses) => prepare::prepare(self, nic, addresses, candidates).await,
            Action::Attach(nic, bindings) => addresses::attach(self, nic, None, bindings).await,
            Action::Move(from, nic, bindings) => addresses::attach(self, nic, Some(from), bindings).await,
            Action::Detach(from, addresses) => addresses::detach(self, from, addresses).await,
            Action::Unprepare(nic, bindings) => unprepare::unprepare(self, nic, bindings).await,
            Action::Unclaim(address) => addresses::unclaim(self, address).await,
            Action::Allocate(allocation) => addresses::allocate(self, allocation).await,
            Action::Release(address) => addresses::release(self, address).await,
        }
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
