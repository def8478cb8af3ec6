//! Tokens: the metadata server, the endpoint of service accounts' keys, the Security Token Service, and impersonation.
//!
//! The signature of an assertion isn't verified here; its test does.

use std::collections::BTreeSet;

use serde_json::json;

use super::error::Error;
use crate::request::{RecordedRequest, Reply};

/// Path of the metadata server's tokens.
const METADATA: &str = "/computeMetadata/v1/instance/service-accounts/default/token";
/// End of the path of impersonation.
const IMPERSONATE: &str = ":generateAccessToken";

/// Tokens that were issued, and whom they are issued to.
pub struct Tokens {
    /// Tokens that are valid.
    pub valid: BTreeSet<String>,
    /// Tokens of another issuer that are accepted.
    pub subjects: BTreeSet<String>,
    /// Seconds that tokens are said to be valid.
    pub lifetime: u64,
    /// Time that an impersonated token is said to end.
    pub ends: String,
    /// Whether API requests need a token.
    pub is_required: bool,
    issued: usize,
}

impl Default for Tokens {
    fn default() -> Self {
        Self {
            valid: BTreeSet::new(),
            subjects: BTreeSet::from(["subject-1".to_owned()]),
            lifetime: 3600,
            ends: "2099-01-01T00:00:00Z".to_owned(),
            is_required: true,
            issued: 0,
        }
    }
}

impl Tokens {
    /// Tokens issued until now.
    pub fn issued(&self) -> usize {
        self.issued
    }

    /// Carries out a request for a token; `None`: it isn't one.
    pub(super) fn handle(&mut self, request: &RecordedRequest) -> Option<Reply> {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", METADATA) => Some(match request.header("metadata-flavor") {
                Some("Google") => self.issue(),
                _ => Reply::text(403, "text/html", "Missing Metadata-Flavor:Google header.".to_owned()),
            }),
            ("POST", "/token") => Some(self.of_key(request)),
            ("POST", "/sts/v1/token") => Some(self.exchange(request)),
            ("POST", path) if path.ends_with(IMPERSONATE) => Some(self.impersonate(request)),
            ("GET", "/subject") => Some(match request.header("x-source") {
                Some("test") => Reply::json(200, &json!({ "token": "subject-1" })),
                _ => Reply::text(403, "text/plain", "no header".to_owned()),
            }),
            _ => None,
        }
    }

    /// Whether a request of the API has a valid token.
    pub(super) fn check(&self, request: &RecordedRequest) -> Result<(), Error> {
        let token = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let is_valid = token.is_some_and(|token| self.valid.contains(token));
        let error = || Error::new(401, "authError", "Request had invalid authentication credentials.");
        if is_valid || !self.is_required { Ok(()) } else { Err(error()) }
    }

    fn next(&mut self) -> String {
        self.issued += 1;
        let token = format!("token-{}", self.issued);
        self.valid.insert(token.clone());
        token
    }

    fn issue(&mut self) -> Reply {
        let lifetime = self.lifetime;
        Reply::json(200, &json!({ "access_token": self.next(), "expires_in": lifetime, "token_type": "Bearer" }))
    }

    fn of_key(&mut self, request: &RecordedRequest) -> Reply {
        let form = request.form();
        let [(grant_type, grant), (assertion, token)] = &form[..] else { return oauth_error("invalid_request") };
        if grant_type != "grant_type"
            || grant != "urn:ietf:params:oauth:grant-type:jwt-bearer"
            || assertion != "assertion"
        {
            return oauth_error("unsupported_grant_type");
        }
        if token.split('.').count() == 3 { self.issue() } else { oauth_error("invalid_grant") }
    }

    fn exchange(&mut self, request: &RecordedRequest) -> Reply {
        let form = request.form();
        let mut names: Vec<&str> = form.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        let expected =
            ["audience", "grant_type", "requested_token_type", "scope", "subject_token", "subject_token_type"];
        if names != expected {
            return oauth_error("invalid_request");
        }
        let is_known = form.iter().any(|(name, value)| name == "subject_token" && self.subjects.contains(value));
        if is_known { self.issue() } else { oauth_error("invalid_grant") }
    }

    fn impersonate(&mut self, request: &RecordedRequest) -> Reply {
        if let Err(error) = self.check(request) {
            return error.reply();
        }
        let body = request.json();
        if body["scope"].as_array().is_none_or(Vec::is_empty) || body["lifetime"] != "3600s" {
            return Error::invalid("scope", "", "Required.").reply();
        }
        let ends = self.ends.clone();
        Reply::json(200, &json!({ "accessToken": self.next(), "expireTime": ends }))
    }
}

fn oauth_error(code: &str) -> Reply {
    Reply::json(400, &json!({ "error": code, "error_description": "what was sent is quoted here" }))
}
