//! Requests of the Compute Engine API v1 (<https://cloud.google.com/compute/docs/reference/rest/v1>).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::credentials::Credentials;
use super::name::{InstanceName, NicName, is_plain};
use super::operation::Location;
use super::resource::{Address, AddressList, Instance};
use super::{Config, error, label};
use crate::CallMeter;
use crate::api::{Api, Operation, decode};
use crate::error::{CloudError, ErrorKind};

const LIST: Operation = Operation::read("addresses.list");
const GET: Operation = Operation::read("addresses.get");
pub(super) const SET_LABELS: Operation = Operation::write("addresses.setLabels");
pub(super) const INSERT: Operation = Operation::write("addresses.insert");
pub(super) const DELETE: Operation = Operation::write("addresses.delete");
const GET_INSTANCE: Operation = Operation::read("instances.get");
pub(super) const ADD_ACCESS_CONFIG: Operation = Operation::write("instances.addAccessConfig");
pub(super) const DELETE_ACCESS_CONFIG: Operation = Operation::write("instances.deleteAccessConfig");

/// Addresses of a page: the API's maximum.
const MAX_RESULTS: &str = "500";
/// Pages at most; more than an external address quota can be.
const MAX_PAGES: usize = 100;

/// Times that a change is sent.
const MAX_WRITES: u32 = 3;

/// Parameters of a query.
type Query<'a> = [(&'static str, &'a str)];

/// The API, for one region of a project.
pub(super) struct Client {
    pub(super) api: Api<Credentials>,
    /// `https://compute.googleapis.com/compute/v1/projects/PROJECT`.
    base: String,
    pub(super) project: String,
    pub(super) region: String,
    /// Time that an operation may take.
    pub(super) timeout: Duration,
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
        let filter = terms.join(" AND ");
        let (mut addresses, mut token) = (Vec::new(), String::new());
        for _ in 0..MAX_PAGES {
            let mut query = vec![("maxResults", MAX_RESULTS)];
            if !filter.is_empty() {
                query.push(("filter", &filter));
            }
            if !token.is_empty() {
                query.push(("pageToken", &token));
            }
            let request = self.request(&Method::GET, &format!("regions/{}/addresses", self.region), &query, None)?;
            let page: AddressList = decode(LIST.name, &self.api.call(LIST, &request).await?)?;
            addresses.extend(page.items);
            token = page.next_page_token;
            if token.is_empty() {
                return Ok(addresses);
            }
        }
        Err(CloudError::new(ErrorKind::Invalid, LIST.name, "TooManyPages", "the list of addresses doesn't end"))
    }

    /// An address; `None` if there is none.
    pub(super) async fn address(&self, name: &str) -> Result<Option<Address>, CloudError> {
        let path = format!("regions/{}/addresses/{}", self.region, segment(GET.name, name)?);
        self.get(GET, &path).await
    }

    /// An instance; `None` if there is none.
    pub(super) async fn instance(&self, zone: &str, name: &str) -> Result<Option<Instance>, CloudError> {
        let (zone, name) = (segment(GET_INSTANCE.name, zone)?, segment(GET_INSTANCE.name, name)?);
        self.get(GET_INSTANCE, &format!("zones/{zone}/instances/{name}")).await
    }

    /// Replaces the labels of an address, if they still have this fingerprint.
    pub(super) async fn set_labels(
        &self,
        name: &str,
        labels: &BTreeMap<String, String>,
        fingerprint: &str,
    ) -> Result<(), CloudError> {
        let path = format!("regions/{}/addresses/{}/setLabels", self.region, segment(SET_LABELS.name, name)?);
        let body = json!({ "labels": labels, "labelFingerprint": fingerprint });
        self.write(SET_LABELS, Method::POST, &path, &[], Some(&body), Location::Region).await
    }

    /// Reserves an address. Labels can't be set here.
    pub(super) async fn insert(&self, name: &str, description: &str) -> Result<(), CloudError> {
        let path = format!("regions/{}/addresses", self.region);
        let body = json!({ "name": name, "description": description, "addressType": "EXTERNAL" });
        self.write(INSERT, Method::POST, &path, &[], Some(&body), Location::Region).await
    }

    /// Releases an address.
    pub(super) async fn delete(&self, name: &str) -> Result<(), CloudError> {
        let path = format!("regions/{}/addresses/{}", self.region, segment(DELETE.name, name)?);
        self.write(DELETE, Method::DELETE, &path, &[], None, Location::Region).await
    }

    /// Attaches an address to a NIC.
    pub(super) async fn add_access_config(
        &self,
        nic: &NicName,
        name: &str,
        address: &Address,
    ) -> Result<(), CloudError> {
        let path = format!("zones/{}/instances/{}/addAccessConfig", nic.zone, nic.instance);
        let mut body = json!({ "type": "ONE_TO_ONE_NAT", "name": name, "natIP": address.address });
        if !address.network_tier.is_empty() {
            // Of an address with a tier, the access config must have the same one.
            body["networkTier"] = json!(address.network_tier);
        }
        let query = [("networkInterface", nic.nic.as_str())];
        self.write(ADD_ACCESS_CONFIG, Method::POST, &path, &query, Some(&body), Location::Zone(&nic.zone)).await
    }

    /// Removes an access config from a NIC.
    pub(super) async fn delete_access_config(&self, nic: &NicName, name: &str) -> Result<(), CloudError> {
        let path = format!("zones/{}/instances/{}/deleteAccessConfig", nic.zone, nic.instance);
        let query = [("accessConfig", name), ("networkInterface", nic.nic.as_str())];
        self.write(DELETE_ACCESS_CONFIG, Method::POST, &path, &query, None, Location::Zone(&nic.zone)).await
    }

    async fn get<T: DeserializeOwned>(&self, operation: Operation, path: &str) -> Result<Option<T>, CloudError> {
        let request = self.request(&Method::GET, path, &[], None)?;
        match self.api.call(operation, &request).await {
            Ok(response) => decode(operation.name, &response).map(Some),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Changes something and waits until it is done. When no answer comes, the same request is sent again: its request id
    /// keeps the API from carrying it out twice.
    async fn write(
        &self,
        operation: Operation,
        method: Method,
        path: &str,
        query: &Query<'_>,
        body: Option<&Value>,
        location: Location<'_>,
    ) -> Result<(), CloudError> {
        let id = request_id(operation.name)?;
        let query = [query, &[("requestId", id.as_str())]].concat();
        let request = self.request(&method, path, &query, body)?;
        let mut sent = 1;
        let response = loop {
            match self.api.call(operation, &request).await {
                Err(error) if error.kind == ErrorKind::Unknown && sent < MAX_WRITES => sent += 1,
                result => break result?,
            }
        };
        self.finish(operation.name, location, decode(operation.name, &response)?).await
    }

    pub(super) fn request(
        &self,
        method: &Method,
        path: &str,
        query: &Query<'_>,
        body: Option<&Value>,
    ) -> Result<Request<Bytes>, CloudError> {
        let mut encoded = form_urlencoded::Serializer::new(String::new());
        encoded.extend_pairs(query);
        let query = encoded.finish();
        let separator = if query.is_empty() { "" } else { "?" };
        let mut request = Request::builder().method(method).uri(format!("{}/{path}{separator}{query}", self.base));
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        request
            .body(body)
            .map_err(|error| CloudError::new(ErrorKind::Invalid, "request", "Request", &error.to_string()))
    }
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
