//! Errors of the API, in its form.

use serde_json::json;

use crate::request::Reply;

pub(super) struct Error {
    status: u16,
    /// In camel case.
    reason: &'static str,
    pub(super) message: String,
}

impl Error {
    pub(super) fn new(status: u16, reason: &'static str, message: &str) -> Self {
        Self { status, reason, message: message.to_owned() }
    }

    pub(super) fn not_found(kind: &str, name: &str) -> Self {
        Self::new(404, "notFound", &format!("The resource '{kind}/{name}' was not found"))
    }

    pub(super) fn invalid(field: &str, value: &str, message: &str) -> Self {
        Self::new(400, "invalid", &format!("Invalid value for field '{field}': '{value}'. {message}"))
    }

    /// The code that an operation has for it: the same words in upper snake case.
    pub(super) fn operation_code(&self) -> String {
        if self.message.ends_with("already in-use.") {
            return "IP_IN_USE_BY_ANOTHER_RESOURCE".to_owned();
        }
        let mut code = if self.reason == "notFound" { "RESOURCE_".to_owned() } else { String::new() };
        for letter in self.reason.chars() {
            if letter.is_ascii_uppercase() {
                code.push('_');
            }
            code.push(letter.to_ascii_uppercase());
        }
        code
    }

    pub(super) fn reply(&self) -> Reply {
        let (code, reason, message) = (self.status, self.reason, &self.message);
        let error = json!({ "message": message, "domain": "global", "reason": reason });
        Reply::json(code, &json!({ "error": { "code": code, "message": message, "errors": [error] } }))
    }
}

/// An error's reply, for faults.
pub fn error_reply(status: u16, reason: &'static str) -> Reply {
    Error::new(status, reason, "A fault of the test.").reply()
}
