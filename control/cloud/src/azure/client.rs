//! Requests of Azure Resource Manager (<https://learn.microsoft.com/rest/api/virtualnetwork>).

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hyper::Method;
use hyper::header::{HeaderName, IF_MATCH};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::sleep;

use super::credentials::Credentials;
use super::interface::{Interface, etag, is_busy};
use super::operation::{Poll, path_of, pauses, poll_of};
use super::resource_id::{ResourceId, Type};
use super::{Config, error};
use crate::CallMeter;
use crate::api::{Api, Operation, pages};
use crate::error::{CloudError, ErrorKind};
use crate::provider::Associate;
use crate::rest::{find, finish, get, request};

/// Version of Microsoft.Network.
const NETWORK: &str = "2026-03-01";
/// Version of Microsoft.Compute.
const COMPUTE: &str = "2024-07-01";

const LIST: Operation = Operation::read("PublicIPAddresses_List");
const GET_ADDRESS: Operation = Operation::read("PublicIPAddresses_Get");
pub(super) const PUT_ADDRESS: Operation = Operation::write("PublicIPAddresses_CreateOrUpdate");
pub(super) const DELETE_ADDRESS: Operation = Operation::write("PublicIPAddresses_Delete");
const GET_INTERFACE: Operation = Operation::read("NetworkInterfaces_Get");
pub(super) const PUT_INTERFACE: Operation = Operation::write("NetworkInterfaces_CreateOrUpdate");
const GET_SUBNET: Operation = Operation::read("Subnets_Get");
const GET_MACHINE: Operation = Operation::read("VirtualMachines_Get");
const STATUS: Operation = Operation::read("Operations_Get");

/// Times that a change is made of what was read, when somebody else's change was first or no answer came.
const MAX_CHANGES: usize = 2;

/// A page of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Page {
    value: Vec<Value>,
    next_link: Option<String>,
}

/// The API, for the addresses of one resource group.
#[derive(Debug)]
pub(super) struct Client {
    api: Api<Credentials>,
    endpoint: String,
    pub(super) subscription: String,
    pub(super) group: String,
    /// Region of addresses that are allocated: the configured one, or that of the first NIC that is observed.
    pub(super) location: OnceLock<String>,
    pub(super) cluster: String,
    pub(super) associate: Associate,
    /// Time that an operation may take.
    timeout: Duration,
}

impl Client {
    pub(super) fn new(config: &Config, endpoint: &str, meter: Arc<CallMeter>) -> Self {
        let credentials = Credentials::new(config.credentials.clone(), &config.audience);
        Self {
            api: Api::new(credentials, meter, error::of_response),
            endpoint: endpoint.to_owned(),
            subscription: config.subscription.clone(),
            group: config.resource_group.clone(),
            location: config.location.clone().map(OnceLock::from).unwrap_or_default(),
            cluster: config.cluster.clone(),
            associate: config.associate,
            timeout: config.operation_timeout,
        }
    }

    /// The addresses of the resource group, all pages.
    pub(super) async fn addresses(&self) -> Result<Vec<Value>, CloudError> {
        let first = &format!(
            "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Network/publicIPAddresses?api-version={NETWORK}",
            self.subscription, self.group
        );
        pages(LIST, |link| async move {
            let path = link.map_or_else(|| Ok(first.clone()), |link| path_of(LIST.name, &link))?;
            let page: Page = get(&self.api, LIST, &self.url(&path)).await?;
            Ok((page.value, page.next_link))
        })
        .await
    }

    pub(super) async fn address(&self, id: &ResourceId) -> Result<Option<Value>, CloudError> {
        self.find(GET_ADDRESS, &network(id)).await
    }

    pub(super) async fn interface(&self, id: &ResourceId) -> Result<Option<Interface>, CloudError> {
        Ok(self.find(GET_INTERFACE, &network(id)).await?.map(Interface))
    }

    pub(super) async fn machine(&self, id: &ResourceId) -> Result<Option<Value>, CloudError> {
        self.find(GET_MACHINE, &format!("{id}?api-version={COMPUTE}")).await
    }

    /// A subnet, by the id that an IP configuration has.
    pub(super) async fn subnet(&self, id: &str) -> Result<Option<Value>, CloudError> {
        self.find(GET_SUBNET, &format!("{id}?api-version={NETWORK}")).await
    }

    async fn find(&self, operation: Operation, path: &str) -> Result<Option<Value>, CloudError> {
        find(&self.api, operation, &self.url(path)).await
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint)
    }

    /// Creates, replaces or deletes a resource of Microsoft.Network under a condition, and waits until that is done.
    pub(super) async fn write(
        &self,
        operation: Operation,
        id: &ResourceId,
        body: Option<&Value>,
        condition: (HeaderName, &str),
    ) -> Result<(), CloudError> {
        let (path, method) = (network(id), if body.is_some() { Method::PUT } else { Method::DELETE });
        let request = request(&method, &self.url(&path), Some(condition), body)?;
        let accepted = self.api.call(operation, &request).await?;
        let Some(poll) = poll_of(operation.name, &path, &accepted)? else { return Ok(()) };
        let mut pauses = pauses(&accepted);
        sleep(pauses.next_delay()).await;
        finish(operation.name, self.timeout, pauses, || self.is_done(operation.name, &poll)).await
    }

    async fn is_done(&self, name: &'static str, poll: &Poll) -> Result<bool, CloudError> {
        let request = request(&Method::GET, &self.url(poll.path()), None, None)?;
        let response = self.api.call(STATUS, &request).await.map_err(CloudError::of_accepted_change)?;
        poll.is_done(name, &response)
    }

    /// Reads an interface or an address, and replaces it by what `change` makes of it, if that returns `true`. `read`: what was read
    /// already. `None`: there is no such resource.
    pub(super) async fn change<R: From<Value> + Into<Value>>(
        &self,
        id: &ResourceId,
        mut read: Option<R>,
        change: impl Fn(&mut R) -> Result<bool, CloudError>,
    ) -> Result<Option<()>, CloudError> {
        let is_interface = id.resource == Type::Interface;
        let (get, put) = if is_interface { (GET_INTERFACE, PUT_INTERFACE) } else { (GET_ADDRESS, PUT_ADDRESS) };
        let mut left = MAX_CHANGES;
        loop {
            let current = match read.take() {
                Some(read) => Some(read),
                None => self.find(get, &network(id)).await?.map(R::from),
            };
            let Some(mut resource) = current else { return Ok(None) };
            if !change(&mut resource)? {
                return Ok(Some(()));
            }
            left -= 1;
            match self.replace(put, id, &resource.into()).await {
                Err(error) if is_repeatable(&error) && left > 0 => {}
                result => return result.map(Some),
            }
        }
    }

    async fn replace(&self, operation: Operation, id: &ResourceId, resource: &Value) -> Result<(), CloudError> {
        if is_busy(resource) {
            let text = format!("another operation on {} is under way", id.name);
            return Err(CloudError::new(ErrorKind::Busy, operation.name, "Updating", &text));
        }
        let version = etag(resource);
        if version.is_empty() {
            // Without one, a change could undo somebody else's.
            let text = format!("{} has no etag", id.name);
            return Err(CloudError::new(ErrorKind::Invalid, operation.name, "NoEtag", &text));
        }
        self.write(operation, id, Some(resource), (IF_MATCH, version)).await
    }
}

/// Path of a resource of Microsoft.Network.
fn network(id: &ResourceId) -> String {
    format!("{id}?api-version={NETWORK}")
}

/// Whether what an error leaves behind shows when the resource is read again. Every change has the version that was read: one that
/// is carried out late doesn't undo the next one.
pub(super) fn is_repeatable(error: &CloudError) -> bool {
    match error.kind {
        ErrorKind::Conflict => true,
        // After a timeout there is no time for another attempt.
        ErrorKind::Unknown => error.code != "OperationTimeout",
        _ => false,
    }
}
