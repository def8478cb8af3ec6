//! Long operations: the API accepts a change, carries it out later, and says where its state is read.
//! <https://learn.microsoft.com/azure/azure-resource-manager/management/async-operations>

use std::time::Duration;

use bytes::Bytes;
use hyper::{Response, StatusCode, Uri};
use serde::Deserialize;
use serde_json::Value;
use vipgate_common::Backoff;

use super::error::{self, of_operation};
use super::interface::is_busy;
use crate::api::{decode, retry_after};
use crate::error::{CloudError, ErrorKind};

/// Pause before the first poll; each next one is twice as long, up to the maximum. Azure asks for 10 s between polls, whatever the
/// operation: a shorter `Retry-After` is followed, a longer one isn't, since a VIP is unreachable meanwhile and a poll is one of
/// some thousand reads that a subscription has in a minute.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// What the URL of `Azure-AsyncOperation` has.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct State {
    status: String,
    error: Option<error::Detail>,
}

/// What is polled.
pub(super) enum Poll {
    /// `Azure-AsyncOperation`: a state.
    Operation(String),
    /// `Location`: 202 until it is done.
    Location(String),
    /// The resource itself.
    Resource(String),
}

impl Poll {
    pub(super) fn path(&self) -> &str {
        let (Self::Operation(path) | Self::Location(path) | Self::Resource(path)) = self;
        path
    }

    /// Whether the change is done, by the response to a poll.
    pub(super) fn is_done(&self, name: &'static str, response: &Response<Bytes>) -> Result<bool, CloudError> {
        match self {
            Self::Location(_) => Ok(response.status() != StatusCode::ACCEPTED),
            Self::Resource(_) => Ok(!is_busy(&decode::<Value>(name, response)?)),
            Self::Operation(_) => {
                let state: State = decode(name, response)?;
                match state.status.as_str() {
                    "Succeeded" => Ok(true),
                    "Failed" | "Canceled" => Err(of_operation(name, &state.status, state.error)),
                    _ => Ok(false),
                }
            }
        }
    }
}

/// Pauses before polls.
pub(super) fn pauses(accepted: &Response<Bytes>) -> Backoff {
    Backoff::new((MIN_PAUSE, retry_after(accepted).unwrap_or(MAX_PAUSE).min(MAX_PAUSE)))
}

/// What is to be polled; `None`: the change is done.
pub(super) fn poll_of(name: &'static str, path: &str, accepted: &Response<Bytes>) -> Result<Option<Poll>, CloudError> {
    let header = |header: &str| accepted.headers().get(header).map(|it| it.to_str().unwrap_or_default());
    if let Some(url) = header("azure-asyncoperation") {
        return Ok(Some(Poll::Operation(path_of(name, url)?)));
    }
    if accepted.status() == StatusCode::ACCEPTED {
        let url = header("location").unwrap_or_default();
        return Ok(Some(Poll::Location(path_of(name, url)?)));
    }
    let body: Value = serde_json::from_slice(accepted.body()).unwrap_or_default();
    Ok(is_busy(&body).then(|| Poll::Resource(path.to_owned())))
}

/// Path and query of a URL in a response. Its host doesn't matter: tokens are sent to the endpoint alone.
pub(super) fn path_of(name: &'static str, url: &str) -> Result<String, CloudError> {
    let path = url.parse::<Uri>().ok().and_then(|uri| uri.path_and_query().map(ToString::to_string));
    path.filter(|path| path.starts_with('/'))
        .ok_or_else(|| CloudError::new(ErrorKind::Unknown, name, "Malformed", "a URL of the response can't be read"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_responses_are_read_at_the_endpoint() {
        let url = "https://elsewhere.example.com/subscriptions/s/operations/1?api-version=2026-03-01";
        assert_eq!(path_of("x", url).as_deref(), Ok("/subscriptions/s/operations/1?api-version=2026-03-01"));
        assert!(path_of("x", "").is_err());
        assert!(path_of("x", "ftp//:").is_err());
    }

    #[test]
    fn a_change_is_polled_where_the_response_says() {
        let response = |status: u16, header: Option<(&str, &str)>, body: &str| {
            let mut response = Response::builder().status(status);
            if let Some((name, value)) = header {
                response = response.header(name, value);
            }
            response.body(Bytes::from(body.to_owned())).expect("a response")
        };
        let poll = |response| poll_of("x", "/r", &response).expect("a poll");
        let operation = response(200, Some(("Azure-AsyncOperation", "https://h/o")), "{}");
        assert!(matches!(poll(operation), Some(Poll::Operation(path)) if path == "/o"));
        let location = response(202, Some(("Location", "https://h/l")), "");
        assert!(matches!(poll(location), Some(Poll::Location(path)) if path == "/l"));
        let busy = response(200, None, r#"{"properties": {"provisioningState": "Updating"}}"#);
        assert!(matches!(poll(busy), Some(Poll::Resource(path)) if path == "/r"));
        assert!(poll(response(200, None, r#"{"properties": {"provisioningState": "Succeeded"}}"#)).is_none());
        assert!(poll(response(204, None, "")).is_none());
        assert!(poll_of("x", "/r", &response(202, None, "")).is_err(), "there is nothing to poll");
    }
}
