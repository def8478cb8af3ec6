//! Requests of the Compute Engine API v1 (<https://cloud.google.com/compute/docs/reference/rest/v1>).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use vipgate_common::Backoff;

use super::credentials::Credentials;
use super::name::{InstanceName, NicName, is_plain};
use super::resource::{self, Address, AddressList, Instance};
use super::{Config, error, label};
use crate::CallMeter;
use crate::api::{Api, Operation, decode, pages};
use crate::credential::form;
use crate::error::{CloudError, ErrorKind};
use crate::rest::{find, finish, get, request};

const LIST: Operation = Operation::read("addresses.list");
const GET: Operation = Operation::read("addresses.get");
pub(super) const SET_LABELS: Operation = Operation::write("addresses.setLabels");
pub(super) const INSERT: Operation = Operation::write("addresses.insert");
pub(super) const DELETE: Operation = Operation::write("addresses.delete");
const GET_INSTANCE: Operation = Operation::read("instances.get");
pub(super) const ADD_ACCESS_CONFIG: Operation = Operation::write("instances.addAccessConfig");
pub(super) const DELETE_ACCESS_CONFIG: Operation = Operation::write("instances.deleteAccessConfig");
const WAIT_ZONE: Operation = Operation::read("zoneOperations.wait");
const WAIT_REGION: Operation = Operation::read("regionOperations.wait");

/// Addresses of a page: the API's maximum.
const MAX_RESULTS: &str = "500";
/// Times that a change is sent.
const MAX_WRITES: u32 = 3;
/// Pause before the next wait for an operation when one ends early.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Parameters of a query.
type Query<'a> = [(&'static str, &'a str)];

/// The API, for one region of a project.
#[derive(Debug)]
pub(super) struct Client {
    api: Api<Credentials>,
    /// `https://compute.googleapis.com/compute/v1/projects/PROJECT`.
    base: String,
    project: String,
    region: String,
    /// Time that an operation may take.
    timeout: Duration,
}

impl Client {
    pub(super) fn new(config: &Config, endpoint: &str, meter: Arc<CallMeter>) -> Self {
        Self {
            api: Api::new(Credentials::new(config.credentials.clone()), meter, error::of_response),
            base: format!("{endpoint}/compute/v1/projects/{}", config.project),
            project: config.project.clone(),
            region: config.region.clone(),
            timeout: config.operation_timeout,
        }
    }

    /// Whether access configs of an instance can have addresses of this project and region.
    pub(super) fn is_reachable(&self, instance: &InstanceName) -> bool {
        let zone = instance.zone.strip_prefix(&self.region);
        instance.project == self.project && zone.is_some_and(|rest| rest.starts_with('-'))
    }

    /// Addresses with these labels, all pages.
    pub(super) async fn addresses(&self, labels: &BTreeMap<String, String>) -> Result<Vec<Address>, CloudError> {
        if let Some((key, value)) = labels.iter().find(|(key, value)| !label::is_label(key, value)) {
            let text =
                format!("{key}={value} can't be a label: lower-case letters, digits, _ and -, 63 characters at most");
            return Err(CloudError::new(ErrorKind::Invalid, LIST.name, "Label", &text));
        }
        let terms: Vec<String> = labels.iter().map(|(key, value)| format!("(labels.{key} = \"{value}\")")).collect();
        let filter = &terms.join(" AND ");
        pages(LIST, |token| async move {
            let mut query = vec![("maxResults", MAX_RESULTS)];
            query.extend(Some(("filter", filter.as_str())).filter(|(_, filter)| !filter.is_empty()));
            query.extend(token.as_deref().map(|token| ("pageToken", token)));
            let url = self.url(&format!("{}/addresses", self.place()), &query);
            let page: AddressList = get(&self.api, LIST, &url).await?;
            Ok((page.items, Some(page.next_page_token)))
        })
        .await
    }

    /// An address; `None` if there is none.
    pub(super) async fn address(&self, name: &str) -> Result<Option<Address>, CloudError> {
        let path = format!("{}/addresses/{}", self.place(), segment(GET.name, name)?);
        find(&self.api, GET, &self.url(&path, &[])).await
    }

    /// An instance; `None` if there is none.
    pub(super) async fn instance(&self, zone: &str, name: &str) -> Result<Option<Instance>, CloudError> {
        let (zone, name) = (segment(GET_INSTANCE.name, zone)?, segment(GET_INSTANCE.name, name)?);
        find(&self.api, GET_INSTANCE, &self.url(&format!("zones/{zone}/instances/{name}"), &[])).await
    }

    /// Replaces the labels of an address, if they still have this fingerprint.
    pub(super) async fn set_labels(
        &self,
        name: &str,
        labels: &BTreeMap<String, String>,
        fingerprint: &str,
    ) -> Result<(), CloudError> {
        let path = format!("addresses/{}/setLabels", segment(SET_LABELS.name, name)?);
        let body = json!({ "labels": labels, "labelFingerprint": fingerprint });
        self.write(SET_LABELS, Method::POST, &self.place(), &path, &[], Some(&body)).await
    }

    /// Reserves an address. Labels can't be set here.
    pub(super) async fn insert(&self, name: &str, description: &str) -> Result<(), CloudError> {
        let body = json!({ "name": name, "description": description, "addressType": "EXTERNAL" });
        self.write(INSERT, Method::POST, &self.place(), "addresses", &[], Some(&body)).await
    }

    /// Releases an address.
    pub(super) async fn delete(&self, name: &str) -> Result<(), CloudError> {
        let path = format!("addresses/{}", segment(DELETE.name, name)?);
        self.write(DELETE, Method::DELETE, &self.place(), &path, &[], None).await
    }

    /// Attaches an address to a NIC.
    pub(super) async fn add_access_config(
        &self,
        nic: &NicName,
        name: &str,
        address: &Address,
    ) -> Result<(), CloudError> {
        let mut body = json!({ "type": "ONE_TO_ONE_NAT", "name": name, "natIP": address.address });
        if !address.network_tier.is_empty() {
            // Of an address with a tier, the access config must have the same one.
            body["networkTier"] = json!(address.network_tier);
        }
        self.change_nic(ADD_ACCESS_CONFIG, nic, "addAccessConfig", &[], Some(&body)).await
    }

    /// Removes an access config from a NIC.
    pub(super) async fn delete_access_config(&self, nic: &NicName, name: &str) -> Result<(), CloudError> {
        self.change_nic(DELETE_ACCESS_CONFIG, nic, "deleteAccessConfig", &[("accessConfig", name)], None).await
    }

    async fn change_nic(
        &self,
        operation: Operation,
        nic: &NicName,
        action: &str,
        query: &Query<'_>,
        body: Option<&Value>,
    ) -> Result<(), CloudError> {
        let (place, path) = (format!("zones/{}", nic.zone), format!("instances/{}/{action}", nic.instance));
        let query = [query, &[("networkInterface", nic.nic.as_str())]].concat();
        self.write(operation, Method::POST, &place, &path, &query, body).await
    }

    /// Where the addresses are.
    fn place(&self) -> String {
        format!("regions/{}", self.region)
    }

    /// Changes something in a place (a region or zone), and waits until it is done. When no answer comes, the same request is sent
    /// again: its request id keeps the API from carrying it out twice.
    async fn write(
        &self,
        operation: Operation,
        method: Method,
        place: &str,
        path: &str,
        query: &Query<'_>,
        body: Option<&Value>,
    ) -> Result<(), CloudError> {
        let id = request_id(operation.name)?;
        let url = self.url(&format!("{place}/{path}"), &[query, &[("requestId", id.as_str())]].concat());
        let request = request(&method, &url, None, body)?;
        let mut sent = 1;
        let response = loop {
            match self.api.call(operation, &request).await {
                Err(error) if error.kind == ErrorKind::Unknown && sent < MAX_WRITES => sent += 1,
                result => break result?,
            }
        };
        let accepted: resource::Operation = decode(operation.name, &response)?;
        if is_done(operation.name, &accepted)? {
            return Ok(());
        }
        let pauses = Backoff::new(PAUSES);
        finish(operation.name, self.timeout, pauses, || self.wait(operation.name, place, &accepted.name)).await
    }

    /// Waits for an operation, and says whether it is done. A wait of the API takes up to two minutes, longer than a request may
    /// here, and can end at any time: then it is sent again, since it changes nothing.
    async fn wait(&self, name: &'static str, place: &str, operation: &str) -> Result<bool, CloudError> {
        let call = if place.starts_with("zones/") { WAIT_ZONE } else { WAIT_REGION };
        let url = self.url(&format!("{place}/operations/{operation}/wait"), &[]);
        let request = request(&Method::POST, &url, None, None)?;
        let response = self.api.call(call, &request).await.and_then(|response| decode(call.name, &response));
        is_done(name, &response.map_err(CloudError::of_accepted_change)?)
    }

    fn url(&self, path: &str, query: &Query<'_>) -> String {
        let separator = if query.is_empty() { "" } else { "?" };
        format!("{}/{path}{separator}{}", self.base, form(query))
    }
}

/// Whether an operation is done; an error if it failed.
fn is_done(name: &'static str, operation: &resource::Operation) -> Result<bool, CloudError> {
    if operation.status != "DONE" {
        return Ok(false);
    }
    error::of_operation(name, operation).map_or(Ok(true), Err)
}

/// A name as part of a path.
fn segment<'a>(operation: &'static str, name: &'a str) -> Result<&'a str, CloudError> {
    let error = || CloudError::new(ErrorKind::Invalid, operation, "Name", &format!("{name:?} can't be a name"));
    is_plain(name).then_some(name).ok_or_else(error)
}

/// A random UUID (RFC 9562 section 5.4).
fn request_id(operation: &'static str) -> Result<String, CloudError> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| CloudError::new(ErrorKind::Unavailable, operation, "Random", &error.to_string()))?;
    let bits = u128::from_be_bytes(bytes) & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_random_uuids() {
        let (id, other) = (request_id("x").expect("random"), request_id("x").expect("random"));
        assert_ne!(id, other);
        assert_eq!(id.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert_eq!(&id[14..15], "4", "version");
        assert!("89ab".contains(&id[19..20]), "variant");
    }
}
