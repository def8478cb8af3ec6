//! Tokens: the metadata server, the endpoint of service accounts' keys, the Security Token Service, and impersonation.
//!
//! The signature of an assertion isn't verified here; its test does.

use serde_json::json;

use super::error::Error;
use crate::request::{RecordedRequest, Reply};
use crate::token::{Tokens, refusal};

/// Path of the metadata server's tokens.
const METADATA: &str = "/computeMetadata/v1/instance/service-accounts/default/token";
/// End of the path of impersonation.
const IMPERSONATE: &str = ":generateAccessToken";
/// Time that an impersonated token is said to end.
const ENDS: &str = "2099-01-01T00:00:00Z";

/// Carries out a request for a token; `None`: it isn't one.
pub(super) fn handle(tokens: &mut Tokens, request: &RecordedRequest) -> Option<Reply> {
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", METADATA) => Some(match request.header("metadata-flavor") {
            Some("Google") => issue(tokens),
            _ => Reply::text(403, "text/html", "Missing Metadata-Flavor:Google header.".to_owned()),
        }),
        ("POST", "/token") => Some(of_key(tokens, request)),
        ("POST", "/sts/v1/token") => Some(exchange(tokens, request)),
        ("POST", path) if path.ends_with(IMPERSONATE) => Some(impersonate(tokens, request)),
        ("GET", "/subject") => Some(match request.header("x-source") {
            Some("test") => Reply::json(200, &json!({ "token": "subject-1" })),
            _ => Reply::text(403, "text/plain", "no header".to_owned()),
        }),
        _ => None,
    }
}

/// Checks that a request of the API has a valid token.
pub(super) fn check(tokens: &Tokens, request: &RecordedRequest) -> Result<(), Error> {
    let error = || Error::new(401, "authError", "Request had invalid authentication credentials.");
    tokens.permit(request).then_some(()).ok_or_else(error)
}

fn issue(tokens: &mut Tokens) -> Reply {
    let lifetime = json!(tokens.lifetime);
    tokens.issue(&lifetime)
}

fn of_key(tokens: &mut Tokens, request: &RecordedRequest) -> Reply {
    let form = request.form();
    let [(grant_type, grant), (assertion, token)] = &form[..] else { return refusal("invalid_request", &[]) };
    if grant_type != "grant_type" || grant != "urn:ietf:params:oauth:grant-type:jwt-bearer" || assertion != "assertion"
    {
        return refusal("unsupported_grant_type", &[]);
    }
    if token.split('.').count() == 3 { issue(tokens) } else { refusal("invalid_grant", &[]) }
}

fn exchange(tokens: &mut Tokens, request: &RecordedRequest) -> Reply {
    let form = request.form();
    let mut names: Vec<&str> = form.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let expected = ["audience", "grant_type", "requested_token_type", "scope", "subject_token", "subject_token_type"];
    if names != expected {
        return refusal("invalid_request", &[]);
    }
    let is_known = form.iter().any(|(name, value)| name == "subject_token" && tokens.subjects.contains(value));
    if is_known { issue(tokens) } else { refusal("invalid_grant", &[]) }
}

fn impersonate(tokens: &mut Tokens, request: &RecordedRequest) -> Reply {
    if let Err(error) = check(tokens, request) {
        return error.reply();
    }
    let body = request.json();
    if body["scope"].as_array().is_none_or(Vec::is_empty) || body["lifetime"] != "3600s" {
        return Error::invalid("scope", "", "Required.").reply();
    }
    Reply::json(200, &json!({ "accessToken": tokens.next(), "expireTime": ENDS }))
}
