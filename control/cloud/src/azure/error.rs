//! What errors of Azure Resource Manager and of Microsoft.Network mean.
//! <https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting/common-deployment-errors>

use bytes::Bytes;
use hyper::Response;
use serde::Deserialize;

use crate::error::{CloudError, ErrorKind};

/// `error` of a response, and of an operation that failed. Its `details` can have the code that says more.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Body {
    pub(super) error: Option<Detail>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Detail {
    code: String,
    message: String,
    details: Vec<Detail>,
}

impl Detail {
    /// Its most exact code that is known, with what follows from it.
    fn known(&self) -> Option<(ErrorKind, &Self)> {
        let in_details = self.details.iter().find_map(Self::known);
        in_details.or_else(|| Some((of_code(&self.code)?, self)))
    }
}

/// The error of a response.
pub(super) fn of_response(operation: &'static str, response: &Response<Bytes>) -> CloudError {
    let status = response.status().as_u16();
    let error = serde_json::from_slice::<Body>(response.body()).unwrap_or_default().error.unwrap_or_default();
    if let Some((kind, detail)) = error.known() {
        return CloudError::new(kind, operation, &detail.code, &detail.message);
    }
    // 409: of Microsoft.Network mostly another operation on the resource.
    let kind = if status == 409 { ErrorKind::Busy } else { ErrorKind::of_status(status) };
    let code = if error.code.is_empty() { status.to_string() } else { error.code };
    CloudError::new(kind, operation, &code, &error.message)
}

/// The error of an operation that ended with this status.
pub(super) fn of_operation(operation: &'static str, status: &str, error: Option<Detail>) -> CloudError {
    let error = error.unwrap_or_default();
    // Canceled: another operation took its place. What is there now can have both changes, or one.
    let (kind, detail) = match error.known() {
        Some((ErrorKind::Busy, detail)) => (ErrorKind::Unknown, detail),
        Some(known) => known,
        None => (ErrorKind::Unknown, &error),
    };
    let code = if detail.code.is_empty() { status } else { &detail.code };
    CloudError::new(kind, operation, code, &detail.message)
}

fn of_code(code: &str) -> Option<ErrorKind> {
    let kind = match code {
        "TooManyRequests"
        | "SubscriptionRequestsThrottled"
        | "ResourceCollectionRequestsThrottled"
        | "ResourceRequestsThrottled"
        | "OperationThrottled" => ErrorKind::Throttled,
        "AuthenticationFailed"
        | "ExpiredAuthenticationToken"
        | "InvalidAuthenticationToken"
        | "InvalidAuthenticationTokenTenant"
        | "InvalidAuthenticationInfo" => ErrorKind::Credentials,
        "AuthorizationFailed"
        | "LinkedAuthorizationFailed"
        | "LinkedInvalidPropertyId"
        | "RequestDisallowedByPolicy"
        | "ScopeLocked"
        | "DisallowedOperation"
        | "ReadOnlyDisabledSubscription" => ErrorKind::Denied,
        "PublicIPAddressInUse"
        | "PublicIPReferencedByMultipleIPConfigs"
        | "PublicIPAddressCannotBeDeleted"
        | "PrivateIPAddressIsAllocated"
        | "PrivateIPAddressInUse" => ErrorKind::InUse,
        "SubnetIsFull" | "QuotaExceeded" | "PublicIPPrefixExhausted" => ErrorKind::Quota,
        "ResourceNotFound"
        | "NotFound"
        | "ParentResourceNotFound"
        | "ResourceGroupNotFound"
        | "SubscriptionNotFound"
        | "InvalidResourceReference" => ErrorKind::NotFound,
        "PreconditionFailed" => ErrorKind::Conflict,
        "AnotherOperationInProgress"
        | "RetryableError"
        | "ReferencedResourceNotProvisioned"
        | "CanceledAndSupersededDueToAnotherOperation" => ErrorKind::Busy,
        "ServerTimeout" | "GatewayTimeout" | "InternalServerError" | "OperationTimedOut" => ErrorKind::Unknown,
        // PublicIPCountLimitReached, and the same of each SKU and version.
        _ if code.ends_with("LimitReached") || code.ends_with("LimitExceeded") => ErrorKind::Quota,
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
    fn a_code_counts_more_than_the_status() {
        for (status, code, kind) in [
            (429, "TooManyRequests", ErrorKind::Throttled),
            (429, "RetryableError", ErrorKind::Busy),
            (409, "AnotherOperationInProgress", ErrorKind::Busy),
            (400, "PublicIPAddressInUse", ErrorKind::InUse),
            (400, "PrivateIPAddressIsAllocated", ErrorKind::InUse),
            (400, "PublicIPCountLimitReached", ErrorKind::Quota),
            (400, "IPv4StandardSkuPublicIpCountLimitReached", ErrorKind::Quota),
            (400, "SubnetIsFull", ErrorKind::Quota),
            (400, "InvalidRequestFormat", ErrorKind::Invalid),
            (401, "ExpiredAuthenticationToken", ErrorKind::Credentials),
            (403, "LinkedAuthorizationFailed", ErrorKind::Denied),
            (404, "ResourceNotFound", ErrorKind::NotFound),
            (409, "ScopeLocked", ErrorKind::Denied),
            (412, "PreconditionFailed", ErrorKind::Conflict),
            (409, "SomethingNew", ErrorKind::Busy),
            (412, "SomethingNew", ErrorKind::Conflict),
            (429, "SomethingNew", ErrorKind::Throttled),
            (500, "InternalServerError", ErrorKind::Unknown),
        ] {
            let body = format!(r#"{{"error": {{"code": "{code}", "message": "m", "details": []}}}}"#);
            let error = of_response("x", &response(status, &body));
            assert_eq!((error.kind, error.code.as_str(), error.message.as_str()), (kind, code, "m"));
        }
    }

    #[test]
    fn a_known_code_in_the_details_says_more() {
        let body = r#"{"error": {"code": "RetryableError", "message": "m", "details":
            [{"code": "ReferencedResourceNotProvisioned", "message": "the subnet is being updated"}]}}"#;
        let error = of_response("x", &response(429, body));
        assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Busy, "ReferencedResourceNotProvisioned"));
        let body = r#"{"error": {"code": "InvalidRequest", "details": [{"code": "PublicIPAddressInUse"}]}}"#;
        assert_eq!(of_response("x", &response(400, body)).kind, ErrorKind::InUse);
    }

    #[test]
    fn a_response_that_is_not_json_is_classified_by_its_status() {
        for (status, kind) in [(502, ErrorKind::Unknown), (503, ErrorKind::Unavailable), (429, ErrorKind::Throttled)] {
            let error = of_response("x", &response(status, "<html>"));
            assert_eq!((error.kind, error.code), (kind, status.to_string()));
        }
    }

    #[test]
    fn of_an_operation_that_another_one_replaced_nothing_is_known() {
        let body: Body = serde_json::from_str(
            r#"{"error": {"code": "Canceled", "details": [{"code": "CanceledAndSupersededDueToAnotherOperation"}]}}"#,
        )
        .expect("a body");
        assert_eq!(of_operation("x", "Canceled", body.error).kind, ErrorKind::Unknown);
        assert_eq!(of_operation("x", "Failed", None).code, "Failed");
        let refused = Detail { code: "PublicIPAddressInUse".to_owned(), ..Detail::default() };
        assert_eq!(of_operation("x", "Failed", Some(refused)).kind, ErrorKind::InUse);
    }
}
