//! Access tokens (OAuth 2.0, RFC 6749): got for a proof of identity, and kept until they end.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, HttpError, is_trusted_url};

/// Type of a form in a request.
pub(crate) const FORM: &str = "application/x-www-form-urlencoded";

/// Who gives tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issuer {
    /// Operation in errors.
    pub(crate) operation: &'static str,
    /// Time before its end when a token is renewed.
    pub(crate) renew_before: Duration,
    /// Statuses below 500 by which it says that it is out of order.
    pub(crate) unavailable: &'static [u16],
}

/// An access token.
pub(crate) struct Token {
    pub(crate) value: HeaderValue,
    renew_at: Instant,
    ends_at: Instant,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token { .. }")
    }
}

/// An error of the token endpoint (RFC 6749 section 5.2). Its description can quote what was sent, so it is left out.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenError {
    error: serde_json::Value,
    /// Microsoft's: the numbers of `AADSTS` in the documentation.
    error_codes: Vec<u64>,
}

impl Issuer {
    /// An error of credentials.
    pub(crate) fn refused(&self, code: &str, text: &str) -> CloudError {
        CloudError::new(ErrorKind::Credentials, self.operation, code, text)
    }

    /// A token that is valid for this time from now on.
    pub(crate) fn token(&self, text: &str, lifetime: Duration) -> Result<Token, CloudError> {
        let value = HeaderValue::from_str(&format!("Bearer {text}"));
        let mut value =
            value.map_err(|_| self.refused("Malformed", "the token has characters that can't be in a header"))?;
        value.set_sensitive(true);
        let now = Instant::now();
        let renew_at = now + lifetime.saturating_sub(self.renew_before.min(lifetime / 4));
        Ok(Token { value, renew_at, ends_at: now + lifetime })
    }

    /// A `POST` with this body; only to where credentials may be sent.
    pub(crate) fn post(&self, url: &str, content_type: &str, body: String) -> Result<Request<Bytes>, CloudError> {
        if !is_trusted_url(url) {
            return Err(self.refused("Url", "the URL for tokens must be https://, or http:// with a loopback address"));
        }
        let request = Request::post(url).header(CONTENT_TYPE, content_type).body(Bytes::from(body));
        request.map_err(|_| self.refused("Url", "the URL for tokens is malformed"))
    }

    /// Sends a request for a token. Neither errors nor logs have its body or that of the response.
    pub(crate) async fn exchange<T: DeserializeOwned>(
        &self,
        http: &HttpClient,
        request: Request<Bytes>,
    ) -> Result<T, CloudError> {
        let host = request.uri().host().unwrap_or_default().to_owned();
        let response = http.send(request).await.map_err(|error| {
            let (HttpError::NotSent(text) | HttpError::NoResponse(text)) = error;
            CloudError::new(ErrorKind::Unavailable, self.operation, "NotReachable", &format!("{host}: {text}"))
        })?;
        let status = response.status().as_u16();
        if response.status().is_success() {
            return serde_json::from_slice(response.body())
                .map_err(|_| self.refused("Malformed", &format!("the response of {host} isn't a token")));
        }
        let TokenError { error, error_codes } = serde_json::from_slice(response.body()).unwrap_or_default();
        let mut code = error.as_str().map_or_else(|| status.to_string(), str::to_owned);
        if let Some(number) = error_codes.first() {
            code = format!("{code}.AADSTS{number}");
        }
        let kind = match status {
            429 => ErrorKind::Throttled,
            500.. => ErrorKind::Unavailable,
            _ if self.unavailable.contains(&status) => ErrorKind::Unavailable,
            _ => ErrorKind::Credentials,
        };
        Err(CloudError::new(kind, self.operation, &code, &format!("{host} gives no token: HTTP status {status}")))
    }
}

/// A token in a file that somebody else renews, as Kubernetes does for service accounts.
pub(crate) async fn read_token(operation: &'static str, file: &Path) -> Result<String, CloudError> {
    let token = tokio::fs::read_to_string(file).await.map_err(|error| {
        CloudError::new(ErrorKind::Credentials, operation, "TokenFile", &format!("{}: {error}", file.display()))
    })?;
    Ok(token.trim().to_owned())
}

/// Lifetime of a token that doesn't say it, seconds: `expires_in` is only recommended (RFC 6749 section 5.1).
pub(crate) fn default_lifetime() -> u64 {
    3600
}

/// A form, encoded.
pub(crate) fn form(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

/// The token that there is now.
#[derive(Debug, Default)]
pub(crate) struct TokenCache(Mutex<Option<Token>>);

impl TokenCache {
    /// Adds the token to a request; `fetch` gets a new one if it ends soon, or was refused.
    pub(crate) async fn authorize(
        &self,
        request: &mut Request<Bytes>,
        is_refused: bool,
        fetch: impl AsyncFnOnce() -> Result<Token, CloudError>,
    ) -> Result<(), CloudError> {
        // One renewal at a time: the others wait for it, and find the new token.
        let mut token = self.0.lock().await;
        let now = Instant::now();
        if is_refused || token.as_ref().is_none_or(|token| token.renew_at <= now) {
            match fetch().await {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_printed() {
        for renew_before in [Duration::from_mins(5), Duration::from_secs(225)] {
            let issuer = Issuer { operation: "x", renew_before, unavailable: &[] };
            let token = issuer.token("secret", Duration::from_hours(1)).expect("a token");
            assert_eq!(format!("{token:?} {:?}", token.value), "Token { .. } Sensitive");
            assert_eq!(token.ends_at - token.renew_at, renew_before);
            let short = issuer.token("secret", Duration::from_secs(8)).expect("a token");
            assert_eq!(short.ends_at - short.renew_at, Duration::from_secs(2));
            assert!(issuer.token("line\nbreak", Duration::from_secs(8)).is_err());
        }
    }
}
