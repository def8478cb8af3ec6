//! Access tokens: of a service account's key, of workload identity federation, or of the metadata server.
//! <https://cloud.google.com/docs/authentication/application-default-credentials>

mod external_account;
mod metadata;
mod service_account;

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::{AUTHORIZATION, HeaderValue};
use hyper::{Method, Request};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;

use crate::api::Authorize;
use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, HttpError, is_trusted_url};

/// Operation in errors of credentials.
const NAME: &str = "credentials";
/// What tokens are for.
const SCOPE: &str = "https://www.googleapis.com/auth/compute";
/// Time before its end when a token is renewed. The metadata server gives a new one only in the last minutes of the former.
const RENEW_BEFORE: Duration = Duration::from_secs(225);
/// Time that a request for a token may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Where credentials come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialSource {
    /// A file of type `service_account` or `external_account`.
    File(PathBuf),
    /// The metadata server at this host, with a port if it isn't 80.
    Metadata(String),
}

impl CredentialSource {
    /// `GOOGLE_APPLICATION_CREDENTIALS`; else the metadata server, at `GCE_METADATA_HOST` if that is set.
    pub fn from_env() -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        match variable("GOOGLE_APPLICATION_CREDENTIALS") {
            Some(path) => Self::File(path.into()),
            None => {
                Self::Metadata(variable("GCE_METADATA_HOST").unwrap_or_else(|| "metadata.google.internal".to_owned()))
            }
        }
    }
}

/// An access token.
struct Token {
    value: HeaderValue,
    renew_at: Instant,
    ends_at: Instant,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token { .. }")
    }
}

impl Token {
    fn new(text: &str, lifetime: Duration) -> Result<Self, CloudError> {
        let value = HeaderValue::from_str(&format!("Bearer {text}"));
        let mut value =
            value.map_err(|_| refused("Malformed", "the token has characters that can't be in a header"))?;
        value.set_sensitive(true);
        let now = Instant::now();
        Ok(Self {
            value,
            renew_at: now + lifetime.saturating_sub(RENEW_BEFORE.min(lifetime / 4)),
            ends_at: now + lifetime,
        })
    }
}

/// Credentials with the token that they have now.
pub(super) struct Credentials {
    source: CredentialSource,
    http: HttpClient,
    token: Mutex<Option<Token>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials { .. }")
    }
}

/// The kind of a file; what else it has belongs to its kind.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum File {
    ServiceAccount(service_account::Key),
    ExternalAccount(external_account::Account),
}

impl Credentials {
    pub(super) fn new(source: CredentialSource) -> Self {
        Self { source, http: HttpClient::with_timeout(TIMEOUT), token: Mutex::new(None) }
    }

    async fn fetch(&self) -> Result<Token, CloudError> {
        let path = match &self.source {
            CredentialSource::Metadata(host) => return metadata::token(&self.http, host).await,
            CredentialSource::File(path) => path,
        };
        let text = read_file(path).await?;
        // The parser's error could quote the file.
        let file = serde_json::from_slice(&text);
        match file.map_err(|_| refused("File", &format!("{} isn't a file of credentials", path.display())))? {
            File::ServiceAccount(key) => key.token(&self.http).await,
            File::ExternalAccount(account) => account.token(&self.http).await,
        }
    }
}

impl Authorize for Credentials {
    async fn authorize(&self, request: &mut Request<Bytes>, is_refused: bool) -> Result<(), CloudError> {
        // Held over the exchange: those who wait for the same token get it from the first.
        let mut token = self.token.lock().await;
        let now = Instant::now();
        if is_refused || token.as_ref().is_none_or(|token| token.renew_at <= now) {
            match self.fetch().await {
                Ok(renewed) => *token = Some(renewed),
                // A token that is still valid is better than none.
                Err(error) if is_refused || token.as_ref().is_none_or(|token| token.ends_at <= now) => {
                    return Err(error);
                }
                Err(error) => tracing::warn!(%error, "the access token can't be renewed yet"),
            }
        }
        if let Some(token) = &*token {
            request.headers_mut().insert(AUTHORIZATION, token.value.clone());
        }
        Ok(())
    }
}

fn refused(code: &str, text: &str) -> CloudError {
    CloudError::new(ErrorKind::Credentials, NAME, code, text)
}

async fn read_file(path: &std::path::Path) -> Result<Vec<u8>, CloudError> {
    let path = path.to_owned();
    let name = path.display().to_string();
    let read = tokio::task::spawn_blocking(move || std::fs::read(path)).await;
    let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    read.map_err(|error| refused("File", &format!("{name}: {error}")))
}

/// A `POST` with this body; only to where credentials may be sent.
fn post(url: &str, content_type: &'static str, body: String) -> Result<Request<Bytes>, CloudError> {
    if !is_trusted_url(url) {
        return Err(refused("Url", "the URL for tokens must be https://, or http:// with a loopback address"));
    }
    let request = Request::builder().method(Method::POST).uri(url).header("content-type", content_type);
    request.body(Bytes::from(body)).map_err(|_| refused("Url", "the URL for tokens is malformed"))
}

fn form(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

/// `error` of an OAuth 2.0 response (RFC 6749 section 5.2). Its description can quote what was sent, so it is left out.
#[derive(Default, Deserialize)]
#[serde(default)]
struct OauthError {
    error: serde_json::Value,
}

/// Sends a request for a token. Neither errors nor logs have its body or that of the response.
async fn exchange<T: DeserializeOwned>(http: &HttpClient, request: Request<Bytes>) -> Result<T, CloudError> {
    let host = request.uri().host().unwrap_or_default().to_owned();
    let response = http.send(request).await.map_err(|error| {
        let (HttpError::NotSent(text) | HttpError::NoResponse(text)) = error;
        CloudError::new(ErrorKind::Unavailable, NAME, "NotReachable", &format!("{host}: {text}"))
    })?;
    let status = response.status().as_u16();
    if !response.status().is_success() {
        let OauthError { error } = serde_json::from_slice(response.body()).unwrap_or_default();
        let code = error.as_str().map_or_else(|| status.to_string(), str::to_owned);
        let kind = match status {
            429 => ErrorKind::Throttled,
            500.. => ErrorKind::Unavailable,
            _ => ErrorKind::Credentials,
        };
        return Err(CloudError::new(kind, NAME, &code, &format!("{host} gives no token: HTTP status {status}")));
    }
    serde_json::from_slice(response.body())
        .map_err(|_| refused("Malformed", &format!("the response of {host} isn't a token")))
}

/// A response with a token (RFC 6749 section 5.1).
#[derive(Deserialize)]
struct TokenResponse {
    access_token: String,
    #[serde(default = "default_lifetime")]
    expires_in: u64,
}

/// Seconds; `expires_in` is only recommended.
fn default_lifetime() -> u64 {
    3600
}

impl TokenResponse {
    fn token(&self) -> Result<Token, CloudError> {
        Token::new(&self.access_token, Duration::from_secs(self.expires_in))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_printed() {
        let token = Token::new("secret", Duration::from_hours(1)).expect("a token");
        assert_eq!(format!("{token:?} {:?}", token.value), "Token { .. } Sensitive");
        assert_eq!(token.ends_at - token.renew_at, RENEW_BEFORE);
        let short = Token::new("secret", Duration::from_secs(8)).expect("a token");
        assert_eq!(short.ends_at - short.renew_at, Duration::from_secs(2));
        assert!(Token::new("line\nbreak", Duration::from_secs(8)).is_err());
    }
}
