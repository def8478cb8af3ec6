//! The EC2 query API: a form with the action and its parameters, signed; the reply is XML.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Response, StatusCode, Uri};
use serde::de::DeserializeOwned;

use super::credentials::Credentials;
use super::reply;
use crate::api::{Api, CallMeter, Operation};
use crate::credential::FORM;
use crate::error::{CloudError, ErrorKind};

/// Version of the API.
const VERSION: &str = "2016-11-15";

/// Client of the API.
pub(super) struct Query {
    api: Api<Credentials>,
    endpoint: Uri,
}

/// Parameters of a request.
pub(super) type Parameters = Vec<(String, String)>;

impl Query {
    pub(super) fn new(endpoint: Uri, credentials: Credentials, meter: Arc<CallMeter>) -> Self {
        Self { api: Api::new(credentials, meter, error_of), endpoint }
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
            .header(CONTENT_TYPE, FORM)
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
        _ => ErrorKind::of_status(status.as_u16()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_counts_more_than_the_status() {
        for (status, code, kind) in [
            (400, "InvalidAllocationID.NotFound", ErrorKind::NotFound),
            (400, "PrivateIpAddressLimitExceeded", ErrorKind::Quota),
            (401, "AuthFailure", ErrorKind::Credentials),
            (403, "AuthFailure", ErrorKind::Denied),
            (503, "RequestLimitExceeded", ErrorKind::Throttled),
            (400, "SomethingNew", ErrorKind::Invalid),
            (401, "SomethingNew", ErrorKind::Credentials),
            (403, "SomethingNew", ErrorKind::Denied),
            (429, "SomethingNew", ErrorKind::Throttled),
            (500, "InternalError", ErrorKind::Unknown),
            (503, "SomethingNew", ErrorKind::Unavailable),
        ] {
            let body =
                format!("<Response><Errors><Error><Code>{code}</Code><Message>m</Message></Error></Errors></Response>");
            let response = Response::builder().status(status).body(Bytes::from(body)).expect("a response");
            let error = error_of("x", &response);
            assert_eq!((error.kind, error.code.as_str(), error.message.as_str()), (kind, code, "m"));
        }
    }
}
