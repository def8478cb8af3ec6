//! HTTP/1.1 client with limits: a request has a deadline, and a response a maximum size.

use std::error::Error;
use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, Response};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use thiserror::Error;
use tokio::time::timeout;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::error::ConfigError;

/// Timeout of a connection, TLS handshake not included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a request, from connecting to the last byte of the response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of a response, bytes: a page of addresses has at most 1000 of them.
const MAX_RESPONSE: usize = 8 << 20;

/// Why there is no response.
#[derive(Debug, Error)]
pub(crate) enum HttpError {
    /// The request was not sent.
    #[error("{0}")]
    NotSent(String),
    /// The request may have been carried out.
    #[error("{0}")]
    NoResponse(String),
}

/// A client; connections are kept open and shared.
#[derive(Clone, Debug)]
pub(crate) struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    timeout: Duration,
}

impl HttpClient {
    /// A client that trusts the certificates of the system.
    pub(crate) fn new() -> Self {
        Self::with_timeout(REQUEST_TIMEOUT)
    }

    /// A client with another timeout of requests, for metadata servers, which are one hop away or nowhere.
    pub(crate) fn with_timeout(timeout: Duration) -> Self {
        let mut roots = RootCertStore::empty();
        // A certificate that can't be read is one authority less, not none.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let tls = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT.min(timeout)));
        connector.enforce_http(false);
        connector.set_nodelay(true);
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new()).pool_idle_timeout(Duration::from_secs(20)).build(connector);
        Self { client, timeout }
    }

    /// Sends a request and reads the whole response.
    pub(crate) async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let exchange = async {
            let response = self.client.request(request.map(Full::new)).await.map_err(|error| {
                let text = describe(&error);
                if error.is_connect() { HttpError::NotSent(text) } else { HttpError::NoResponse(text) }
            })?;
            let (parts, body) = response.into_parts();
            let body = Limited::new(body, MAX_RESPONSE).collect().await;
            let body = body.map_err(|error| HttpError::NoResponse(format!("the response breaks off: {error}")))?;
            Ok(Response::from_parts(parts, body.to_bytes()))
        };
        let late = || HttpError::NoResponse(format!("no response within {:?}", self.timeout));
        timeout(self.timeout, exchange).await.unwrap_or_else(|_| Err(late()))
    }
}

/// An error with its causes; neither has a header of the request in it.
fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// Whether credentials may be sent to a URL: HTTPS, or HTTP to a loopback address (tests, local proxies).
pub(crate) fn is_trusted_url(url: &str) -> bool {
    let Ok(uri) = url.parse::<hyper::Uri>() else { return false };
    let Some(host) = uri.host() else { return false };
    let is_loopback = || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    match uri.scheme_str() {
        Some("https") => true,
        Some("http") => is_loopback(),
        _ => false,
    }
}

/// Base URL of an API, without a slash at its end.
pub(crate) fn checked_endpoint(url: &str) -> Result<&str, ConfigError> {
    let url = url.trim_end_matches('/');
    if is_trusted_url(url) { Ok(url) } else { Err(ConfigError::Endpoint(url.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_sent_by_https_or_to_the_loopback_address() {
        for (url, is_trusted) in [
            ("https://oauth2.googleapis.com/token", true),
            ("http://127.0.0.1:8080/token", true),
            ("http://[::1]:8080", true),
            ("http://oauth2.googleapis.com/token", false),
            ("http://127.0.0.1.example.com/", false),
            ("file:///etc/passwd", false),
            ("", false),
        ] {
            assert_eq!(is_trusted_url(url), is_trusted, "{url}");
        }
    }
}
