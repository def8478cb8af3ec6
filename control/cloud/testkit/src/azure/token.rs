//! Tokens: the token endpoint of Microsoft Entra ID, and the metadata server of a machine.
//!
//! The signature of a federated token isn't verified.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::error::Error;
use crate::request::{RecordedRequest, Reply};

/// What tokens are for.
const RESOURCE: &str = "https://management.azure.com/";

/// Tokens that were issued, and whom they are issued to.
pub struct Tokens {
    /// Federated tokens that are accepted.
    pub assertions: BTreeSet<String>,
    /// The client secret that is accepted.
    pub secret: String,
    /// Client id of the identity.
    pub client: String,
    /// Seconds that tokens are said to be valid.
    pub lifetime: u64,
    /// Whether API requests need a token.
    pub is_required: bool,
    valid: BTreeSet<String>,
    issued: usize,
}

impl Default for Tokens {
    fn default() -> Self {
        Self {
            assertions: BTreeSet::from(["assertion-1".to_owned()]),
            secret: "hidden".to_owned(),
            client: "client-1".to_owned(),
            lifetime: 3600,
            is_required: true,
            valid: BTreeSet::new(),
            issued: 0,
        }
    }
}

impl Tokens {
    /// Tokens issued until now.
    pub fn issued(&self) -> usize {
        self.issued
    }

    /// Ends all tokens.
    pub fn expire(&mut self) {
        self.valid.clear();
    }

    /// Carries out a request for a token; `None`: it isn't one.
    pub(super) fn handle(&mut self, request: &RecordedRequest) -> Option<Reply> {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/metadata/identity/oauth2/token") => Some(self.of_machine(request)),
            ("POST", "/tenant-1/oauth2/v2.0/token") => Some(self.of_client(request)),
            _ => None,
        }
    }

    /// Checks that a request of the API has a valid token.
    pub(super) fn check(&self, request: &RecordedRequest) -> Result<(), Error> {
        if !self.is_required {
            return Ok(());
        }
        let unauthorized = |code: &str, text: &str| Err(Error::new(401, code, text));
        let header = request.header("authorization");
        let Some(token) = header.and_then(|value| value.strip_prefix("Bearer ")) else {
            return unauthorized(
                "AuthenticationFailed",
                "Authentication failed. The 'Authorization' header is missing.",
            );
        };
        if self.valid.contains(token) {
            return Ok(());
        }
        if token.starts_with("token-") {
            return unauthorized("ExpiredAuthenticationToken", "The access token expiry UTC time is earlier than now.");
        }
        unauthorized("InvalidAuthenticationToken", "The access token is invalid.")
    }

    fn issue(&mut self, lifetime: &Value) -> Reply {
        self.issued += 1;
        let token = format!("token-{}", self.issued);
        self.valid.insert(token.clone());
        let body = json!({ "access_token": token, "expires_in": lifetime, "token_type": "Bearer" });
        Reply::json(200, &body)
    }

    fn of_machine(&mut self, request: &RecordedRequest) -> Reply {
        if request.header("metadata") != Some("true") {
            return refusal("invalid_request", &[]);
        }
        let is_known = |(name, value): &(String, String)| match name.as_str() {
            "api-version" => value == "2018-02-01",
            "resource" => value == RESOURCE,
            "client_id" => *value == self.client,
            _ => false,
        };
        if request.parameter("resource").is_none() || !request.query.iter().all(is_known) {
            return refusal("invalid_request", &[]);
        }
        // Here it is a number in a string.
        self.issue(&json!(self.lifetime.to_string()))
    }

    fn of_client(&mut self, request: &RecordedRequest) -> Reply {
        let form = request.form();
        let get = |name: &str| form.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        if get("grant_type") != Some("client_credentials") {
            return refusal("unsupported_grant_type", &[70003]);
        }
        if get("scope") != Some("https://management.azure.com/.default") {
            return refusal("invalid_scope", &[70011]);
        }
        if get("client_id") != Some(self.client.as_str()) {
            return refusal("unauthorized_client", &[700_016]);
        }
        let is_assertion = get("client_assertion_type")
            == Some("urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
            && get("client_assertion").is_some_and(|it| self.assertions.contains(it));
        match get("client_secret") {
            Some(secret) if secret == self.secret && form.len() == 4 => {}
            None if is_assertion && form.len() == 5 => {}
            Some(_) => return refusal("invalid_client", &[7_000_215]),
            None => return refusal("invalid_client", &[700_024]),
        }
        self.issue(&json!(self.lifetime))
    }
}

fn refusal(code: &str, numbers: &[u64]) -> Reply {
    let text = "what was sent is quoted here";
    Reply::json(400, &json!({ "error": code, "error_description": text, "error_codes": numbers }))
}
