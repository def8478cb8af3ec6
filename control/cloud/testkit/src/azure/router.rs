//! Paths, versions and parameters of the API.

use serde_json::json;

use super::error::Error;
use super::{FakeAzure, GROUP, SUBSCRIPTION, state};
use crate::request::{RecordedRequest, Reply};

/// Versions that the fake knows, by namespace.
const VERSIONS: &[(&str, &str)] = &[("microsoft.network", "2026-03-01"), ("microsoft.compute", "2024-07-01")];

impl FakeAzure {
    pub(super) fn route(&mut self, request: &RecordedRequest) -> Result<Reply, Error> {
        let path = request.path.to_ascii_lowercase();
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        check_version(request, &parts)?;
        let method = request.method.as_str();
        match parts[..] {
            ["subscriptions", subscription, ..] if subscription != SUBSCRIPTION => {
                Err(Error::new(404, "SubscriptionNotFound", "The subscription could not be found."))
            }
            ["subscriptions", _, "providers", "microsoft.network", "locations", _, kind, name] if method == "GET" => {
                check_parameters(request, &[])?;
                self.operation(kind, name)
            }
            ["subscriptions", _, "resourcegroups", group, ..] if group != GROUP => {
                Err(Error::new(404, "ResourceGroupNotFound", "Resource group could not be found."))
            }
            ["subscriptions", _, "resourcegroups", _, "providers", "microsoft.network", "publicipaddresses"] => {
                check_parameters(request, &["$skiptoken"])?;
                self.list(request)
            }
            ["subscriptions", _, "resourcegroups", _, ref rest @ ..] => {
                check_parameters(request, &[])?;
                match (method, rest) {
                    ("GET", _) => self.get(request),
                    ("PUT", ["providers", "microsoft.network", "networkinterfaces", _]) => self.put_interface(request),
                    ("PUT", ["providers", "microsoft.network", "publicipaddresses", _]) => self.put_address(request),
                    ("DELETE", ["providers", "microsoft.network", "publicipaddresses", _]) => {
                        self.delete_address(request)
                    }
                    _ => Err(Error::new(405, "MethodNotAllowed", "The fake doesn't know this.")),
                }
            }
            _ => Err(Error::new(404, "InvalidResourceType", "The fake doesn't know this path.")),
        }
    }

    fn list(&self, request: &RecordedRequest) -> Result<Reply, Error> {
        let skip = request.parameter("$skiptoken").map_or(Ok(0), str::parse::<usize>);
        let skip = skip.map_err(|_| Error::bad("InvalidSkipToken", "The skip token is invalid."))?;
        let visible = self.visible();
        let all: Vec<_> = visible.addresses().collect();
        let page: Vec<_> = all.iter().skip(skip).take(self.page_size).map(|it| self.shown(it)).collect();
        let mut body = json!({ "value": page });
        if skip + self.page_size < all.len() {
            let version = request.parameter("api-version").unwrap_or_default();
            let (base, next) = (self.base(request), skip + self.page_size);
            let link = format!("{base}{}?api-version={version}&%24skiptoken={next}", request.path);
            body["nextLink"] = json!(link);
        }
        Ok(Reply::json(200, &body))
    }

    fn get(&self, request: &RecordedRequest) -> Result<Reply, Error> {
        let found = self.visible().get(&request.path).ok_or_else(|| Error::not_found(&request.path))?;
        let mut reply = Reply::json(200, &self.shown(found));
        reply.headers.extend(found["etag"].as_str().map(|etag| ("etag".to_owned(), etag.to_owned())));
        Ok(reply)
    }

    /// A resource as the API shows it.
    pub(super) fn shown(&self, resource: &serde_json::Value) -> serde_json::Value {
        let is_address = resource["type"] == "Microsoft.Network/publicIPAddresses";
        let mut shown = if is_address { self.visible().shown(resource) } else { resource.clone() };
        if self.is_busy(resource["id"].as_str().unwrap_or_default()) {
            shown["properties"]["provisioningState"] = json!("Updating");
        }
        shown
    }

    /// Checks the conditions of a change.
    pub(super) fn check_conditions(&self, request: &RecordedRequest) -> Result<(), Error> {
        let found = self.state.get(&request.path);
        let failed = |text: &str| Err(Error::new(412, "PreconditionFailed", text));
        if request.header("if-none-match") == Some("*") && found.is_some() {
            return failed("The resource exists.");
        }
        match (request.header("if-match"), found) {
            (None, _) => Ok(()),
            (Some(etag), Some(found)) if found["etag"] == etag || etag == "*" => Ok(()),
            (Some(etag), _) => {
                failed(&format!("Precondition failed. Etag provided in if-match header {etag} does not match."))
            }
        }
    }

    /// Checks that no other operation on a resource is under way.
    pub(super) fn check_idle(&self, request: &RecordedRequest) -> Result<(), Error> {
        if self.is_busy(&request.path) {
            let text = "Another operation on this or dependent resource is in progress.";
            return Err(Error::new(409, "AnotherOperationInProgress", text));
        }
        Ok(())
    }
}

fn check_version(request: &RecordedRequest, parts: &[&str]) -> Result<(), Error> {
    let namespace = parts.iter().position(|it| *it == "providers").and_then(|at| parts.get(at + 1)).unwrap_or(&"");
    let Some(found) = request.parameter("api-version") else {
        let text = "The api-version query parameter (?api-version=) is required for all requests.";
        return Err(Error::bad("MissingApiVersionParameter", text));
    };
    let is_known = VERSIONS.iter().any(|(of, version)| of == namespace && *version == found);
    let text = format!("The api-version '{found}' is invalid.");
    if is_known { Ok(()) } else { Err(Error::bad("InvalidApiVersionParameter", &text)) }
}

fn check_parameters(request: &RecordedRequest, known: &[&str]) -> Result<(), Error> {
    let unknown = request.query.iter().find(|(name, _)| name != "api-version" && !known.contains(&name.as_str()));
    unknown.map_or(Ok(()), |(name, _)| Err(Error::bad("InvalidParameter", &format!("{name} is not known."))))
}

/// Name of a resource in a path.
pub(super) fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Id of the public address of a path, in the case that the API writes.
pub(super) fn address_id(path: &str) -> String {
    state::id("Microsoft.Network/publicIPAddresses", name_of(path))
}
