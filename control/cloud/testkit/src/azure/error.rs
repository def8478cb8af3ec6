//! Errors as Azure Resource Manager writes them.

use serde_json::json;

use crate::request::Reply;

#[derive(Clone, Debug)]
pub(super) struct Error {
    status: u16,
    code: String,
    message: String,
}

impl Error {
    pub(super) fn new(status: u16, code: &str, message: &str) -> Self {
        Self { status, code: code.to_owned(), message: message.to_owned() }
    }

    pub(super) fn bad(code: &str, message: &str) -> Self {
        Self::new(400, code, message)
    }

    pub(super) fn not_found(id: &str) -> Self {
        Self::new(404, "ResourceNotFound", &format!("The Resource '{id}' was not found."))
    }

    pub(super) fn reply(&self) -> Reply {
        let error = json!({ "code": self.code, "message": self.message, "details": [] });
        Reply::json(self.status, &json!({ "error": error }))
    }
}

/// An error's reply, for faults.
pub fn error_reply(status: u16, code: &str) -> Reply {
    Error::new(status, code, "A fault of the test.").reply()
}
