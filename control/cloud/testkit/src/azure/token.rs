//! Tokens: the token endpoint of Microsoft Entra ID, and the metadata server of a machine.
//!
//! The signature of a federated token isn't verified.

use serde_json::json;

use super::error::Error;
use crate::request::{RecordedRequest, Reply};
use crate::token::{Tokens, refusal, token_of};

/// What tokens are for.
const RESOURCE: &str = "https://management.azure.com/";
/// Client id of the identity, and its secret.
const CLIENT: (&str, &str) = ("client-1", "hidden");

/// Carries out a request for a token; `None`: it isn't one.
pub(super) fn handle(tokens: &mut Tokens, request: &RecordedRequest) -> Option<Reply> {
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "/metadata/identity/oauth2/token") => Some(of_machine(tokens, request)),
        ("POST", "/tenant-1/oauth2/v2.0/token") => Some(of_client(tokens, request)),
        _ => None,
    }
}

/// Checks that a request of the API has a valid token.
pub(super) fn check(tokens: &Tokens, request: &RecordedRequest) -> Result<(), Error> {
    if tokens.permit(request) {
        return Ok(());
    }
    let unauthorized = |code: &str, text: &str| Err(Error::new(401, code, text));
    let Some(token) = token_of(request) else {
        return unauthorized("AuthenticationFailed", "Authentication failed. The 'Authorization' header is missing.");
    };
    if token.starts_with("token-") {
        return unauthorized("ExpiredAuthenticationToken", "The access token expiry UTC time is earlier than now.");
    }
    unauthorized("InvalidAuthenticationToken", "The access token is invalid.")
}

fn of_machine(tokens: &mut Tokens, request: &RecordedRequest) -> Reply {
    if request.header("metadata") != Some("true") {
        return refusal("invalid_request", &[]);
    }
    let is_known = |(name, value): &(String, String)| match name.as_str() {
        "api-version" => value == "2018-02-01",
        "resource" => value == RESOURCE,
        "client_id" => value == CLIENT.0,
        _ => false,
    };
    if request.parameter("resource").is_none() || !request.query.iter().all(is_known) {
        return refusal("invalid_request", &[]);
    }
    // Here it is a number in a string.
    tokens.issue(&json!(tokens.lifetime.to_string()))
}

fn of_client(tokens: &mut Tokens, request: &RecordedRequest) -> Reply {
    let form = request.form();
    let get = |name: &str| form.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    if get("grant_type") != Some("client_credentials") {
        return refusal("unsupported_grant_type", &[70003]);
    }
    if get("scope") != Some("https://management.azure.com/.default") {
        return refusal("invalid_scope", &[70011]);
    }
    if get("client_id") != Some(CLIENT.0) {
        return refusal("unauthorized_client", &[700_016]);
    }
    let is_assertion = get("client_assertion_type") == Some("urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
        && get("client_assertion").is_some_and(|it| tokens.subjects.contains(it));
    match get("client_secret") {
        Some(secret) if secret == CLIENT.1 && form.len() == 4 => {}
        None if is_assertion && form.len() == 5 => {}
        Some(_) => return refusal("invalid_client", &[7_000_215]),
        None => return refusal("invalid_client", &[700_024]),
    }
    tokens.issue(&json!(tokens.lifetime))
}
