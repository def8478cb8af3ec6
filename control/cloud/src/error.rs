//! Errors of a provider's API, by what follows from them.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

/// What follows from an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorKind {
    /// The provider limits requests; nothing was done. Later.
    Throttled,
    /// Credentials can't be had or are refused.
    Credentials,
    /// The account has no right to do this.
    Denied,
    /// The address, or the private address, is in use elsewhere: it is never taken away.
    InUse,
    /// A limit of the account or of the NIC.
    Quota,
    /// The address, NIC or instance doesn't exist.
    NotFound,
    /// The object has changed since it was read (ETag, fingerprint); nothing was done. Read it again.
    Conflict,
    /// Another operation on the object is under way; nothing was done. Later.
    Busy,
    /// The provider doesn't accept the request: a fault of the configuration, or of ours.
    Invalid,
    /// Not reachable or out of order; nothing was done.
    Unavailable,
    /// No answer to a change, or one that doesn't say whether it was made. Read again.
    Unknown,
}

impl ErrorKind {
    /// Its name in metrics, logs and conditions.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Throttled => "throttled",
            Self::Credentials => "credentials",
            Self::Denied => "denied",
            Self::InUse => "in_use",
            Self::Quota => "quota",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Busy => "busy",
            Self::Invalid => "invalid",
            Self::Unavailable => "unavailable",
            Self::Unknown => "unknown",
        }
    }

    /// What the status of a response means whose code says nothing.
    pub(crate) fn of_status(status: u16) -> Self {
        match status {
            401 => Self::Credentials,
            403 => Self::Denied,
            404 | 410 => Self::NotFound,
            409 | 412 => Self::Conflict,
            429 => Self::Throttled,
            503 => Self::Unavailable,
            // An internal error, or one of an intermediary: the request may have been carried out.
            408 | 500.. => Self::Unknown,
            _ => Self::Invalid,
        }
    }

    /// Whether a request that failed so can be sent again as it is, later.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Throttled | Self::Busy | Self::Unavailable)
    }
}

/// An error of a provider's API. Never has a credential in it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct CloudError {
    /// What follows from it.
    pub kind: ErrorKind,
    /// The operation, as the provider names it.
    pub operation: &'static str,
    /// The provider's code, such as `RequestLimitExceeded`; else the HTTP status, or what failed before there was one.
    pub code: String,
    /// The provider's message, cut off.
    pub message: String,
    /// When the provider wants the next request at the earliest (`Retry-After`).
    pub retry_after: Option<Duration>,
}

/// Why a configuration is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// `associate: nic` in Google Cloud.
    #[error(
        "associate: nic is not possible in Google Cloud: an external address belongs to the primary address of a NIC; \
         use associate: instance"
    )]
    Associate,
    /// What can't be a name at the provider.
    #[error("{field}: {value:?} is not supported: {allowed}")]
    Name {
        field: &'static str,
        value: String,
        /// What can be.
        allowed: &'static str,
    },
    /// An endpoint that credentials can't be sent to.
    #[error("endpoint: {0:?} must be https://HOST, or http:// with a loopback address")]
    Endpoint(String),
}

/// Maximum length of a message, characters.
const MAX_MESSAGE: usize = 300;
/// Maximum length of a code, characters.
const MAX_CODE: usize = 64;

impl CloudError {
    /// An error; code and message are cut off and cleared of control characters.
    pub fn new(kind: ErrorKind, operation: &'static str, code: &str, message: &str) -> Self {
        let is_plain = |character: &char| character.is_ascii_alphanumeric() || "._-".contains(*character);
        Self {
            kind,
            operation,
            code: code.chars().filter(is_plain).take(MAX_CODE).collect(),
            message: message.chars().map(|it| if it.is_control() { ' ' } else { it }).take(MAX_MESSAGE).collect(),
            retry_after: None,
        }
    }

    /// The same of a request about a change that was accepted: whatever keeps us from seeing its end, it may be carried out.
    pub(crate) fn of_accepted_change(mut self) -> Self {
        if !matches!(self.kind, ErrorKind::Denied | ErrorKind::Credentials) {
            self.kind = ErrorKind::Unknown;
        }
        self
    }

    /// With the time that the provider wants to pass.
    pub fn with_retry_after(mut self, after: Option<Duration>) -> Self {
        self.retry_after = after;
        self
    }
}

impl fmt::Display for CloudError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.code)?;
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        Ok(())
    }
}
