//! Requests of the API: paths, parameters and bodies.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tokio::time::Instant;

use super::change::Change;
use super::error::Error;
use super::state::{GcpAccessConfig, GcpAddress};
use super::{FakeGcp, Operation};
use crate::request::{RecordedRequest, Reply};

/// Parameters that every method has.
const COMMON: [&str; 3] = ["alt", "prettyPrint", "fields"];

impl FakeGcp {
    pub(super) fn route(&mut self, request: &RecordedRequest) -> Result<Reply, Error> {
        let prefix = format!("/compute/v1/projects/{}/", self.project);
        let path = request.path.strip_prefix(&prefix).ok_or_else(|| Error::not_found("projects", &request.path))?;
        let parts: Vec<&str> = path.split('/').collect();
        let region = self.region.clone();
        match (request.method.as_str(), &parts[..]) {
            ("GET", ["regions", at, "addresses"]) if *at == region => self.list(request),
            ("POST", ["regions", at, "addresses"]) if *at == region => self.insert(request),
            ("GET", ["regions", at, "addresses", name]) if *at == region => {
                check_request(request, &[], &[])?;
                let address = self.visible().addresses.get(*name).ok_or_else(|| Error::not_found("addresses", name))?;
                Ok(Reply::json(200, &self.address_json(name, address)))
            }
            ("DELETE", ["regions", at, "addresses", name]) if *at == region => {
                check_request(request, &["requestId"], &[])?;
                self.begin(request, Change::Delete { name: (*name).to_owned() })
            }
            ("POST", ["regions", at, "addresses", name, "setLabels"]) if *at == region => {
                self.set_labels(request, name)
            }
            ("GET", ["zones", zone, "instances", name]) => {
                check_request(request, &[], &[])?;
                let found = self.visible().instances.get(*name).filter(|it| it.zone == *zone);
                Ok(Reply::json(
                    200,
                    &self.instance_json(name, found.ok_or_else(|| Error::not_found("instances", name))?),
                ))
            }
            ("POST", ["zones", zone, "instances", name, "addAccessConfig"]) => {
                self.add_access_config(request, zone, name)
            }
            ("POST", ["zones", zone, "instances", name, "deleteAccessConfig"]) => {
                check_request(request, &["accessConfig", "networkInterface", "requestId"], &[])?;
                let change = Change::DeleteAccessConfig {
                    instance: (*name).to_owned(),
                    zone: (*zone).to_owned(),
                    nic: required(request, "networkInterface")?,
                    name: required(request, "accessConfig")?,
                };
                self.begin(request, change)
            }
            ("POST", [kind, place, "operations", name, "wait"]) => {
                check_request(request, &[], &[])?;
                let is_here = |operation: &&Operation| {
                    let at = operation.change.zone().map_or(("regions", region.as_str()), |zone| ("zones", zone));
                    operation.name == *name && at == (*kind, *place)
                };
                let operation =
                    self.operations.iter().find(is_here).ok_or_else(|| Error::not_found("operations", name))?;
                Ok(Reply::json(200, &self.operation_json(operation)))
            }
            _ => Err(Error::not_found("path", path)),
        }
    }

    fn list(&self, request: &RecordedRequest) -> Result<Reply, Error> {
        check_request(request, &["filter", "maxResults", "pageToken"], &[])?;
        let filter = parse_filter(request.parameter("filter").unwrap_or_default())?;
        let number = |name: &str, default: usize| match request.parameter(name) {
            Some(text) => text.parse().map_err(|_| Error::invalid(name, text, "Not a number.")),
            None => Ok(default),
        };
        let (max, start) = (number("maxResults", 500)?, number("pageToken", 0)?);
        if !(1..=500).contains(&max) {
            return Err(Error::invalid("maxResults", &max.to_string(), "Must be 0 to 500."));
        }
        let matches = |address: &GcpAddress| filter.iter().all(|(key, value)| address.labels.get(key) == Some(value));
        let addresses: Vec<_> = self.visible().addresses.iter().filter(|(_, it)| matches(it)).collect();
        let end = addresses.len().min(start + max.min(self.page_size));
        let page = addresses.get(start..end).ok_or_else(|| Error::invalid("pageToken", "", "Unknown."))?;
        let items: Vec<Value> = page.iter().map(|(name, address)| self.address_json(name, address)).collect();
        let next = (end < addresses.len()).then(|| end.to_string());
        Ok(Reply::json(200, &self.addresses_json(&items, next)))
    }

    fn insert(&mut self, request: &RecordedRequest) -> Result<Reply, Error> {
        // Labels of an address can't be set when it is created.
        let body = check_request(request, &["requestId"], &["name", "description", "addressType", "networkTier"])?;
        let name = text(&body, "name")?.unwrap_or_default();
        let is_allowed = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
        let starts = name.starts_with(|letter: char| letter.is_ascii_lowercase());
        if !starts || name.len() > 63 || name.ends_with('-') || !name.chars().all(is_allowed) {
            return Err(Error::invalid(
                "resource.name",
                &name,
                "Must be a match of regex '[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?'",
            ));
        }
        self.begin(request, Change::Insert { name, description: text(&body, "description")?.unwrap_or_default() })
    }

    fn set_labels(&mut self, request: &RecordedRequest, name: &str) -> Result<Reply, Error> {
        let body = check_request(request, &["requestId"], &["labels", "labelFingerprint"])?;
        let labels: Option<BTreeMap<String, String>> =
            body.get("labels").map_or(Some(BTreeMap::new()), |labels| serde_json::from_value(labels.clone()).ok());
        let labels = labels.ok_or_else(|| Error::invalid("labels", "", "Not a map of strings."))?;
        let fingerprint = text(&body, "labelFingerprint")?.unwrap_or_default();
        self.begin(request, Change::SetLabels { name: name.to_owned(), labels, fingerprint })
    }

    fn add_access_config(&mut self, request: &RecordedRequest, zone: &str, instance: &str) -> Result<Reply, Error> {
        let fields = ["type", "name", "natIP", "networkTier"];
        let body = check_request(request, &["networkInterface", "requestId"], &fields)?;
        let kind = text(&body, "type")?.unwrap_or_else(|| "ONE_TO_ONE_NAT".to_owned());
        if kind != "ONE_TO_ONE_NAT" {
            return Err(Error::invalid("resource.type", &kind, "Only ONE_TO_ONE_NAT is supported."));
        }
        let change = Change::AddAccessConfig {
            instance: instance.to_owned(),
            zone: zone.to_owned(),
            nic: required(request, "networkInterface")?,
            config: GcpAccessConfig {
                name: text(&body, "name")?.unwrap_or_else(|| "External NAT".to_owned()),
                nat_ip: text(&body, "natIP")?.unwrap_or_default(),
            },
            tier: text(&body, "networkTier")?,
        };
        self.begin(request, change)
    }

    /// Accepts a change. One with the request id of a former one is that one.
    fn begin(&mut self, request: &RecordedRequest, change: Change) -> Result<Reply, Error> {
        let id = request.parameter("requestId");
        if id.is_some_and(|id| !is_uuid(id)) {
            return Err(Error::invalid("requestId", id.unwrap_or_default(), "Must be a UUID."));
        }
        let same = |operation: &&Operation| id.is_some() && operation.request_id.as_deref() == id;
        if let Some(operation) = self.operations.iter().find(same) {
            return Ok(Reply::json(200, &self.operation_json(operation)));
        }
        let target = change.target(&self.region);
        let is_busy =
            |operation: &Operation| operation.outcome.is_none() && operation.change.target(&self.region) == target;
        if self.operations.iter().any(is_busy) {
            return Err(Error::new(400, "resourceNotReady", &format!("The resource '{target}' is not ready")));
        }
        change.check(&self.state, !self.finds_use_late)?;
        self.operations.push(Operation {
            name: format!("operation-{}", self.operations.len()),
            request_id: id.map(str::to_owned),
            change,
            due: Instant::now() + self.operation_time,
            outcome: None,
        });
        // What takes no time is done at once, but the answer to the request doesn't say so yet.
        let reply = self.operations.last().map(|operation| Reply::json(200, &self.operation_json(operation)));
        self.run_operations();
        reply.ok_or_else(|| Error::new(500, "internalError", "no operation"))
    }
}

/// Rejects parameters and fields that a method doesn't have; returns the body.
fn check_request(request: &RecordedRequest, parameters: &[&str], fields: &[&str]) -> Result<Map<String, Value>, Error> {
    let unknown = |name: &str| {
        Error::new(
            400,
            "badRequest",
            &format!("Invalid JSON payload received. Unknown name \"{name}\": Cannot find field."),
        )
    };
    let mut seen = Vec::new();
    for (name, _) in &request.query {
        let is_known = parameters.contains(&name.as_str()) || COMMON.contains(&name.as_str());
        if !is_known || seen.contains(&name) {
            return Err(unknown(name));
        }
        seen.push(name);
    }
    if request.body.is_empty() {
        return if fields.is_empty() {
            Ok(Map::new())
        } else {
            Err(Error::new(400, "required", "Required body is missing"))
        };
    }
    let malformed = || Error::new(400, "parseError", "Parse Error");
    if request.header("content-type").is_none_or(|kind| !kind.starts_with("application/json")) {
        return Err(malformed());
    }
    let Value::Object(body) = request.json() else { return Err(malformed()) };
    match body.keys().find(|key| !fields.contains(&key.as_str())) {
        Some(key) => Err(unknown(key)),
        None => Ok(body),
    }
}

fn required(request: &RecordedRequest, name: &str) -> Result<String, Error> {
    let value = request.parameter(name).map(str::to_owned);
    value.ok_or_else(|| Error::new(400, "required", &format!("Required field '{name}' not specified")))
}

fn text(body: &Map<String, Value>, field: &str) -> Result<Option<String>, Error> {
    match body.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(value) => Err(Error::invalid(field, &value.to_string(), "Not a string.")),
    }
}

/// `(labels.K = "V") AND (labels.K = "V")`, of AIP-160 what is needed here.
fn parse_filter(filter: &str) -> Result<Vec<(String, String)>, Error> {
    let mut terms = Vec::new();
    for term in filter.split(" AND ").filter(|term| !term.is_empty()) {
        let inner = term.strip_prefix('(').and_then(|term| term.strip_suffix(')')).unwrap_or(term);
        let parsed = inner.strip_prefix("labels.").and_then(|inner| inner.split_once('='));
        let (key, value) = parsed.ok_or_else(|| Error::invalid("filter", filter, "Invalid list filter expression."))?;
        terms.push((key.trim().to_owned(), value.trim().trim_matches('"').to_owned()));
    }
    Ok(terms)
}

fn is_uuid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    let is_hex = text.chars().all(|letter| letter.is_ascii_hexdigit() || letter == '-');
    lengths == [8, 4, 4, 4, 12] && is_hex && text.chars().any(|letter| letter != '0' && letter != '-')
}
