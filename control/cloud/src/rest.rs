//! What REST APIs (Azure, Google Cloud) have alike: JSON in requests and responses, and changes that are accepted first and
//! carried out later.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderName};
use hyper::{Method, Request};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{sleep, timeout};
use vipgate_common::Backoff;

use crate::api::{Api, Operation, decode};
use crate::credential::Authorize;
use crate::error::{CloudError, ErrorKind};

/// A request; `condition`: the header that says when it is to be carried out.
pub(crate) fn request(
    method: &Method,
    url: &str,
    condition: Option<(HeaderName, &str)>,
    body: Option<&Value>,
) -> Result<Request<Bytes>, CloudError> {
    let mut request = Request::builder().method(method).uri(url).header(ACCEPT, "application/json");
    if let Some((name, value)) = condition {
        request = request.header(name, value);
    }
    if body.is_some() {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
    let error =
        |error: hyper::http::Error| CloudError::new(ErrorKind::Invalid, "request", "Request", &error.to_string());
    request.body(body).map_err(error)
}

/// Reads what there must be.
pub(crate) async fn get<T: DeserializeOwned>(
    api: &Api<impl Authorize>,
    operation: Operation,
    url: &str,
) -> Result<T, CloudError> {
    decode(operation.name, &api.call(operation, &request(&Method::GET, url, None, None)?).await?)
}

/// Reads a resource; `None`: there is none.
pub(crate) async fn find<T: DeserializeOwned>(
    api: &Api<impl Authorize>,
    operation: Operation,
    url: &str,
) -> Result<Option<T>, CloudError> {
    match get(api, operation, url).await {
        Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Waits until a change that was accepted is done: asks at once, and after each pause.
pub(crate) async fn finish<F: Future<Output = Result<bool, CloudError>>>(
    name: &'static str,
    limit: Duration,
    mut pauses: Backoff,
    is_done: impl Fn() -> F,
) -> Result<(), CloudError> {
    let wait = async {
        while !is_done().await? {
            sleep(pauses.next_delay()).await;
        }
        Ok(())
    };
    let late = || CloudError::new(ErrorKind::Unknown, name, "OperationTimeout", "accepted, but not done in time");
    timeout(limit, wait).await.unwrap_or_else(|_| Err(late()))
}
