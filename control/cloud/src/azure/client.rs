//! Requests of Azure Resource Manager (<https://learn.microsoft.com/rest/api/virtualnetwork>).

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{ACCEPT, CONTENT_TYPE, IF_MATCH, IF_NONE_MATCH};
use hyper::{Method, Request};
use serde::Deserialize;
use serde_json::Value;

use super::credentials::Credentials;
use super::interface::{Interface, etag, is_busy};
use super::operation::path_of;
use super::resource_id::ResourceId;
use super::{Config, error};
use crate::CallMeter;
use crate::api::{Api, Operation, decode};
use crate::error::{CloudError, ErrorKind};
use crate::provider::Associate;

/// Version of Microsoft.Network.
const NETWORK: &str = "2026-03-01";
/// Version of Microsoft.Compute.
const COMPUTE: &str = "2024-07-01";

pub(super) const LIST: Operation = Operation::read("PublicIPAddresses_List");
pub(super) const GET_ADDRESS: Operation = Operation::read("PublicIPAddresses_Get");
pub(super) const PUT_ADDRESS: Operation = Operation::write("PublicIPAddresses_CreateOrUpdate");
pub(super) const DELETE_ADDRESS: Operation = Operation::write("PublicIPAddresses_Delete");
const GET_INTERFACE: Operation = Operation::read("NetworkInterfaces_Get");
pub(super) const PUT_INTERFACE: Operation = Operation::write("NetworkInterfaces_CreateOrUpdate");
const GET_SUBNET: Operation = Operation::read("Subnets_Get");
const GET_MACHINE: Operation = Operation::read("VirtualMachines_Get");

/// Pages of a list at most.
const MAX_PAGES: usize = 100;
/// Times that a change is made of what was read, when somebody else's change was first or no answer came.
const MAX_CHANGES: usize = 2;

/// A page of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Page {
    value: Vec<Value>,
    next_link: Option<String>,
}

/// Condition of a change.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition<'a> {
    /// The resource is still as it was read.
    IfMatch(&'a str),
    /// There is no such resource.
    IfNoneMatch,
}

/// The API, for the addresses of one resource group.
pub(super) struct Client {
    pub(super) api: Api<Credentials>,
    endpoint: String,
    pub(super) subscription: String,
    pub(super) group: String,
    /// Region of addresses that are allocated: the configured one, or that of the first NIC that is observed.
    pub(super) location: OnceLock<String>,
    pub(super) cluster: String,
    pub(super) associate: Associate,
    /// Time that an operation may take.
    pub(super) timeout: Duration,
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
        let mut path = format!(
            "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Network/publicIPAddresses?api-version={NETWORK}",
            self.subscription, self.group
        );
        let mut addresses = Vec::new();
        for _ in 0..MAX_PAGES {
            let request = self.request(&Method::GET, &path, None, None)?;
            let page: Page = decode(LIST.name, &self.api.call(LIST, &request).await?)?;
            addresses.extend(page.value);
            match page.next_link.filter(|link| !link.is_empty()) {
                Some(link) => path = path_of(LIST.name, &link)?,
                None => return Ok(addresses),
            }
        }
        Err(CloudError::new(ErrorKind::Invalid, LIST.name, "TooManyPages", "the list of addresses doesn't end"))
    }

    pub(super) async fn address(&self, id: &ResourceId) -> Result<Option<Value>, CloudError> {
        self.get(GET_ADDRESS, &network(id)).await
    }

    pub(super) async fn interface(&self, id: &ResourceId) -> Result<Option<Interface>, CloudError> {
        Ok(self.get(GET_INTERFACE, &network(id)).await?.map(Interface))
    }

    pub(super) async fn machine(&self, id: &ResourceId) -> Result<Option<Value>, CloudError> {
        self.get(GET_MACHINE, &format!("{id}?api-version={COMPUTE}")).await
    }

    /// A subnet, by the id that an IP configuration has.
    pub(super) async fn subnet(&self, id: &str) -> Result<Option<Value>, CloudError> {
        self.get(GET_SUBNET, &format!("{id}?api-version={NETWORK}")).await
    }

    async fn get(&self, operation: Operation, path: &str) -> Result<Option<Value>, CloudError> {
        let request = self.request(&Method::GET, path, None, None)?;
        match self.api.call(operation, &request).await {
            Ok(response) => decode(operation.name, &response).map(Some),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates or replaces a resource of Microsoft.Network, and waits until that is done.
    pub(super) async fn put(
        &self,
        operation: Operation,
        id: &ResourceId,
        body: &Value,
        condition: Condition<'_>,
    ) -> Result<(), CloudError> {
        let path = network(id);
        let request = self.request(&Method::PUT, &path, Some(condition), Some(body))?;
        self.finish(operation.name, &path, &self.api.call(operation, &request).await?).await
    }

    /// Deletes a resource of Microsoft.Network if it is still as it was read, and waits until that is done.
    pub(super) async fn delete(&self, operation: Operation, id: &ResourceId, version: &str) -> Result<(), CloudError> {
        let path = network(id);
        let request = self.request(&Method::DELETE, &path, Some(Condition::IfMatch(version)), None)?;
        self.finish(operation.name, &path, &self.api.call(operation, &request).await?).await
    }

    /// Reads an interface and replaces it by what `change` makes of it, if that returns `true`. `read`: what was read already.
    /// `None`: there is no such interface.
    pub(super) async fn change_interface(
        &self,
        id: &ResourceId,
        mut read: Option<Interface>,
        change: impl Fn(&mut Interface) -> Result<bool, CloudError>,
    ) -> Result<Option<()>, CloudError> {
        let mut left = MAX_CHANGES;
        loop {
            let current = match read.take() {
                Some(read) => Some(read),
                None => self.interface(id).await?,
            };
            let Some(mut interface) = current else { return Ok(None) };
            let is_changed = change(&mut interface)?;
            left -= 1;
            match self.replace(PUT_INTERFACE, id, &interface.0, is_changed).await {
                Err(error) if is_repeatable(&error) && left > 0 => {}
                result => return result.map(Some),
            }
        }
    }

    /// Reads an address and replaces it by what `change` makes of it, if that returns `true`. `None`: there is no such address.
    pub(super) async fn change_address(
        &self,
        id: &ResourceId,
        change: impl Fn(&mut Value) -> Result<bool, CloudError>,
    ) -> Result<Option<()>, CloudError> {
        let mut left = MAX_CHANGES;
        loop {
            let Some(mut address) = self.address(id).await? else { return Ok(None) };
            let is_changed = change(&mut address)?;
            left -= 1;
            match self.replace(PUT_ADDRESS, id, &address, is_changed).await {
                Err(error) if is_repeatable(&error) && left > 0 => {}
                result => return result.map(Some),
            }
        }
    }

    async fn replace(
        &self,
        operation: Operation,
        id: &ResourceId,
        resource: &Value,
        is_changed: bool,
    ) -> Result<(), CloudError> {
        if !is_changed {
            return Ok(());
        }
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
        self.put(operation, id, resource, Condition::IfMatch(version)).await
    }

    pub(super) fn request(
        &self,
        method: &Method,
        path: &str,
        condition: Option<Condition<'_>>,
        body: Option<&Value>,
    ) -> Result<Request<Bytes>, CloudError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.endpoint));
        request = request.header(ACCEPT, "application/json");
        match condition {
            Some(Condition::IfMatch(version)) => request = request.header(IF_MATCH, version),
            Some(Condition::IfNoneMatch) => request = request.header(IF_NONE_MATCH, "*"),
            None => {}
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        request
            .body(body)
            .map_err(|error| CloudError::new(ErrorKind::Invalid, "request", "Request", &error.to_string()))
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
