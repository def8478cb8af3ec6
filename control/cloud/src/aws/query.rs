//! The EC2 query API: a form with the action and its parameters, signed; the reply is XML.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Response, StatusCode, Uri};
use serde::de::DeserializeOwned;

use super::credentials::Credentials;
use super::reply;
use super::signature::Signer;
use crate::api::{Api, CallMeter, Operation};
use crate::error::{CloudError, ErrorKind};

/// Version of the API.
const VERSION: &str = "2016-11-15";

/// Client of the API.
pub(super) struct Query {
    api: Api<Signer>,
    endpoint: Uri,
}

/// Parameters of a request.
pub(super) type Parameters = Vec<(String, String)>;

impl Query {
    pub(super) fn new(endpoint: Uri, region: &str, credentials: Credentials, meter: Arc<CallMeter>) -> Self {
        let signer = Signer::new(region, credentials);
        Self { api: Api::new(signer, meter, error_of), endpoint }
    }

    /// Calls an action and reads its reply.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        operation: Operation,
        parameters: &[(String, String)],
    ) -> Result<T, CloudError> {
        reply::read(operation.name, &self.send(operation, parameters).await?)
    }

    /// Calls an action.
    pub(super) async fn send(
        &self,
        operation: Operation,
        parameters: &[(String, String)],
    ) -> Result<Bytes, CloudError> {
        let form = form(operation.name, parameters);
        let host = self.endpoint.authority().map(ToString::to_string).unwrap_or_default();
        let request = Request::post(self.endpoint.clone())
            .header(HOST, host)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded; charset=utf-8")
            .body(Bytes::from(form))
            .map_err(|error| CloudError::new(ErrorKind::Invalid, operation.name, "Request", &error.to_string()))?;
        Ok(self.api.call(operation, &request).await?.into_body())
    }
}

fn form(action: &str, parameters: &[(String, String)]) -> String {
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.append_pair("Action", action).append_pair("Version", VERSION).extend_pairs(parameters);
    form.finish()
}

/// What an error reply means. The codes are those of "Error codes for the Amazon EC2 API".
pub(super) fn error_of(operation: &'static str, response: &Response<Bytes>) -> CloudError {
    let status = response.status();
    let (code, message) =
        reply::error_of(response.body()).unwrap_or_else(|| (status.as_u16().to_string(), String::new()));
    let kind = match kind_of(&code, status) {
        // Of keys that it doesn't know; with another status, of rights.
        ErrorKind::Denied if status == StatusCode::UNAUTHORIZED => ErrorKind::Credentials,
        kind => kind,
    };
    CloudError::new(kind, operation, &code, &message)
}

fn kind_of(code: &str, status: StatusCode) -> ErrorKind {
    match code {
        "RequestLimitExceeded" | "Throttling" | "ThrottlingException" | "EC2ThrottledException" | "SlowDown" => {
            ErrorKind::Throttled
        }
        "InvalidClientTokenId"
        | "ExpiredToken"
        | "ExpiredTokenException"
        | "RequestExpired"
        | "IncompleteSignature"
        | "SignatureDoesNotMatch"
        | "UnrecognizedClientException"
        | "MissingAuthenticationToken"
        | "InvalidIdentityToken" => ErrorKind::Credentials,
        "UnauthorizedOperation"
        | "AuthFailure"
        | "AccessDenied"
        | "AccessDeniedException"
        | "OptInRequired"
        | "OperationNotPermitted"
        | "Blocked" => ErrorKind::Denied,
        "Resource.AlreadyAssociated" | "InvalidIPAddress.InUse" | "InvalidNetworkInterface.InUse" => ErrorKind::InUse,
        "AddressLimitExceeded"
        | "PrivateIpAddressLimitExceeded"
        | "InsufficientFreeAddressesInSubnet"
        | "InsufficientAddressCapacity"
        | "TagLimitExceeded" => ErrorKind::Quota,
        "ConcurrentTagAccess" | "IncorrectState" | "IncorrectInstanceState" | "DependencyViolation" => ErrorKind::Busy,
        "ServiceUnavailable" | "Unavailable" => ErrorKind::Unavailable,
        _ if code.ends_with(".NotFound") => ErrorKind::NotFound,
        _ if status == StatusCode::TOO_MANY_REQUESTS => ErrorKind::Throttled,
        _ if status == StatusCode::SERVICE_UNAVAILABLE => ErrorKind::Unavailable,
        // Whether it was carried out isn't said.
        _ if status.is_server_error() => ErrorKind::Unknown,
        _ => ErrorKind::Invalid,
    }
}

/// Parameters of a list: `Name.1`, `Name.2`, ..
pub(super) fn list(name: &str, values: impl IntoIterator<Item = impl Into<String>>) -> Parameters {
    values.into_iter().enumerate().map(|(i, value)| (format!("{name}.{}", i + 1), value.into())).collect()
}

/// Parameters of filters: each has a name and values, of which one must match. Values are meant as they are: `*` and `?` in them
/// aren't wildcards.
pub(super) fn filters<'a>(filters: impl IntoIterator<Item = (String, Vec<&'a str>)>) -> Parameters {
    let mut parameters = Vec::new();
    for (i, (name, values)) in filters.into_iter().enumerate() {
        let prefix = format!("Filter.{}", i + 1);
        parameters.push((format!("{prefix}.Name"), name));
        parameters.extend(list(&format!("{prefix}.Value"), values.into_iter().map(escaped)));
    }
    parameters
}

/// A value of a filter ("Filtering using the API" of the EC2 user guide).
fn escaped(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for character in value.chars() {
        if matches!(character, '*' | '?' | '\\') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// Parameters of tags.
pub(super) fn tags<'a>(prefix: &str, tags: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) -> Parameters {
    let mut parameters = Vec::new();
    for (i, (key, value)) in tags.into_iter().enumerate() {
        parameters.push((format!("{prefix}.{}.Key", i + 1), key.to_owned()));
        parameters.extend(value.map(|value| (format!("{prefix}.{}.Value", i + 1), value.to_owned())));
    }
    parameters
}

/// One parameter.
pub(super) fn one(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}
