//! What errors of the API mean: of responses (`error.errors[].reason`) and of operations (`error.errors[].code`).

use bytes::Bytes;
use hyper::Response;
use serde::Deserialize;

use super::resource::Operation;
use crate::error::{CloudError, ErrorKind};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Body {
    error: BodyError,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BodyError {
    message: String,
    errors: Vec<BodyReason>,
    /// Canonical code, such as `RESOURCE_EXHAUSTED`.
    status: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BodyReason {
    reason: String,
}

/// The error of a response.
pub(super) fn of_response(operation: &'static str, response: &Response<Bytes>) -> CloudError {
    let status = response.status().as_u16();
    let Body { error } = serde_json::from_slice(response.body()).unwrap_or_default();
    let reason = error.errors.first().map_or(error.status.as_str(), |first| first.reason.as_str());
    let kind = of_code(reason).unwrap_or_else(|| ErrorKind::of_status(status));
    let code = if reason.is_empty() { status.to_string() } else { reason.to_owned() };
    CloudError::new(kind, operation, &code, &error.message)
}

/// The error of an operation that is done, if it failed.
pub(super) fn of_operation(name: &'static str, operation: &Operation) -> Option<CloudError> {
    let first = operation.error.as_ref().map(|errors| errors.errors.first());
    match (first, operation.http_error_status_code) {
        (None, None) => None,
        (Some(Some(error)), _) => {
            let kind = of_code(&error.code).unwrap_or(ErrorKind::Invalid);
            Some(CloudError::new(kind, name, &error.code, &error.message))
        }
        (Some(None) | None, code) => {
            let code = code.map_or_else(|| "OperationFailed".to_owned(), |code| code.to_string());
            Some(CloudError::new(ErrorKind::Unknown, name, &code, &operation.http_error_message))
        }
    }
}

/// What a reason or code means. A reason is in camel case, an operation's code in upper snake case: they are the same words.
/// <https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation>,
/// <https://cloud.google.com/compute/docs/api/rate-limits>
fn of_code(code: &str) -> Option<ErrorKind> {
    let words: String = code.chars().filter(|it| *it != '_').map(|it| it.to_ascii_lowercase()).collect();
    let kind = match words.as_str() {
        "ratelimitexceeded" | "userratelimitexceeded" | "concurrentlimitexceeded" | "resourceoperationrateexceeded" => {
            ErrorKind::Throttled
        }
        "autherror" | "unauthorized" | "unauthenticated" => ErrorKind::Credentials,
        "forbidden" | "insufficientpermissions" | "permissionserror" | "permissiondenied" | "accessnotconfigured" => {
            ErrorKind::Denied
        }
        "resourceinusebyanotherresource" | "ipinusebyanotherresource" | "inusebyanotherresource" => ErrorKind::InUse,
        "quotaexceeded" | "limitexceeded" | "dailylimitexceeded" => ErrorKind::Quota,
        "notfound" | "resourcenotfound" => ErrorKind::NotFound,
        "conditionnotmet" | "alreadyexists" | "resourcealreadyexists" | "duplicate" => ErrorKind::Conflict,
        "resourcenotready" | "operationinprogress" => ErrorKind::Busy,
        "backenderror" | "unavailable" => ErrorKind::Unavailable,
        "internalerror" => ErrorKind::Unknown,
        "invalid" | "badrequest" | "invalidargument" | "parseerror" | "invalidparameter" => ErrorKind::Invalid,
        _ => return None,
    };
    Some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(status: u16, body: &str) -> Response<Bytes> {
        Response::builder().status(status).body(Bytes::from(body.to_owned())).expect("a response")
    }

    #[test]
    fn a_reason_counts_more_than_the_status() {
        for (status, reason, kind) in [
            (403, "rateLimitExceeded", ErrorKind::Throttled),
            (403, "quotaExceeded", ErrorKind::Quota),
            (403, "forbidden", ErrorKind::Denied),
            (401, "authError", ErrorKind::Credentials),
            (401, "required", ErrorKind::Credentials),
            (400, "required", ErrorKind::Invalid),
            (400, "resourceInUseByAnotherResource", ErrorKind::InUse),
            (400, "resourceNotReady", ErrorKind::Busy),
            (400, "invalid", ErrorKind::Invalid),
            (404, "notFound", ErrorKind::NotFound),
            (409, "alreadyExists", ErrorKind::Conflict),
            (412, "conditionNotMet", ErrorKind::Conflict),
            (429, "somethingNew", ErrorKind::Throttled),
            (503, "backendError", ErrorKind::Unavailable),
            (500, "internalError", ErrorKind::Unknown),
        ] {
            let body = format!(r#"{{"error": {{"message": "m", "errors": [{{"reason": "{reason}"}}]}}}}"#);
            let error = of_response("x", &response(status, &body));
            assert_eq!((error.kind, error.code.as_str(), error.message.as_str()), (kind, reason, "m"));
        }
    }

    #[test]
    fn a_response_that_is_not_json_is_judged_by_its_status() {
        for (status, kind) in [(502, ErrorKind::Unknown), (503, ErrorKind::Unavailable), (429, ErrorKind::Throttled)] {
            let error = of_response("x", &response(status, "<html>"));
            assert_eq!((error.kind, error.code), (kind, status.to_string()));
        }
    }
}
