//! Access tokens (OAuth 2.0) of a fake: issued, and checked in requests of its API.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::request::{RecordedRequest, Reply};

/// Tokens that were issued, and whom they are issued to.
pub struct Tokens {
    /// Tokens that are valid.
    pub valid: BTreeSet<String>,
    /// Tokens of another issuer that are accepted.
    pub subjects: BTreeSet<String>,
    /// Seconds that tokens are said to be valid.
    pub lifetime: u64,
    /// Whether API requests need a token.
    pub is_required: bool,
    issued: usize,
}

impl Default for Tokens {
    fn default() -> Self {
        let subjects = BTreeSet::from(["subject-1".to_owned()]);
        Self { valid: BTreeSet::new(), subjects, lifetime: 3600, is_required: true, issued: 0 }
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

    /// Whether a request of the API has a valid token, or needs none.
    pub(crate) fn permit(&self, request: &RecordedRequest) -> bool {
        !self.is_required || token_of(request).is_some_and(|token| self.valid.contains(token))
    }

    pub(crate) fn next(&mut self) -> String {
        self.issued += 1;
        let token = format!("token-{}", self.issued);
        self.valid.insert(token.clone());
        token
    }

    /// Issues a token; `lifetime`: as the server writes it.
    pub(crate) fn issue(&mut self, lifetime: &Value) -> Reply {
        Reply::json(200, &json!({ "access_token": self.next(), "expires_in": lifetime, "token_type": "Bearer" }))
    }
}

/// The token of a request.
pub(crate) fn token_of(request: &RecordedRequest) -> Option<&str> {
    request.header("authorization")?.strip_prefix("Bearer ")
}

/// An error of a token endpoint; `numbers`: Microsoft's.
pub(crate) fn refusal(code: &str, numbers: &[u64]) -> Reply {
    let mut error = json!({ "error": code, "error_description": "what was sent is quoted here" });
    if !numbers.is_empty() {
        error["error_codes"] = json!(numbers);
    }
    Reply::json(400, &error)
}
