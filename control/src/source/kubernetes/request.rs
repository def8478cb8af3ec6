//! Single requests to the API server, outside of watches.

use std::time::Duration;

use kube::Client;
use kube::core::Status;
use thiserror::Error;
use tokio::time::timeout;

use super::client::{ConnectError, client};
use super::collection::describe;
use crate::config::KubernetesSource;

/// Why a request has failed.
#[derive(Debug, Error)]
pub(crate) enum RequestError {
    /// The server has refused it, or the connection has failed.
    #[error("{}", describe(.0))]
    Failed(Box<kube::Error>),
    /// There was no response in this time: it may have been done.
    #[error("no response within {} s", .0.as_secs())]
    NoResponse(Duration),
}

impl RequestError {
    /// The server's refusal.
    pub(crate) fn refusal(&self) -> Option<&Status> {
        match self {
            Self::Failed(error) => match &**error {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            Self::NoResponse(_) => None,
        }
    }

    /// The HTTP status of the server's refusal.
    pub(crate) fn code(&self) -> Option<u16> {
        self.refusal().map(|status| status.code)
    }
}

/// Waits for a response for this time at most.
///
/// # Errors
/// If the request fails, or there is no response.
pub(crate) async fn request<T>(
    limit: Duration,
    response: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, RequestError> {
    match timeout(limit, response).await {
        Ok(response) => response.map_err(|error| RequestError::Failed(Box::new(error))),
        Err(_) => Err(RequestError::NoResponse(limit)),
    }
}

/// A client that is made when it is needed first, and again once it was discarded: its credentials may be others by
/// then.
pub(crate) struct ReusedClient {
    source: KubernetesSource,
    client: Option<Client>,
}

impl ReusedClient {
    pub(crate) fn new(source: KubernetesSource) -> Self {
        Self { source, client: None }
    }

    /// The client.
    ///
    /// # Errors
    /// If it can't be made.
    pub(crate) async fn get(&mut self) -> Result<Client, ConnectError> {
        let client = match self.client.clone() {
            Some(client) => client,
            None => client(&self.source).await?,
        };
        self.client = Some(client.clone());
        Ok(client)
    }

    /// Discards the client.
    pub(crate) fn discard(&mut self) {
        self.client = None;
    }
}
