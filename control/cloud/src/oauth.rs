//! Access tokens (OAuth 2.0, RFC 6749): got for a proof of identity.

use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::credential::Expiring;
use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, HttpError, is_trusted_url};

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

/// An access token, as the value of a header.
pub(crate) type Token = Expiring<HeaderValue>;

/// A response with a token (RFC 6749 section 5.1).
#[derive(Deserialize)]
struct TokenResponse {
    access_token: String,
    /// Only recommended.
    #[serde(default = "default_lifetime", deserialize_with = "seconds")]
    expires_in: u64,
}

/// Lifetime of a token that doesn't say it, seconds.
fn default_lifetime() -> u64 {
    3600
}

/// A number, or a number in a string, as Azure's metadata server has it.
fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.ok_or_else(|| serde::de::Error::custom("not a number of seconds"))
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
        Ok(Expiring::new(value, lifetime, self.renew_before))
    }

    /// A `POST` with this body; only to where credentials may be sent.
    pub(crate) fn post(&self, url: &str, content_type: &str, body: String) -> Result<Request<Bytes>, CloudError> {
        if !is_trusted_url(url) {
            return Err(self.refused("Url", "the URL for tokens must be https://, or http:// with a loopback address"));
        }
        let request = Request::post(url).header(CONTENT_TYPE, content_type).body(Bytes::from(body));
        request.map_err(|_| self.refused("Url", "the URL for tokens is malformed"))
    }

    /// Sends a request for a token, and returns the one of the response.
    pub(crate) async fn fetch(&self, http: &HttpClient, request: Request<Bytes>) -> Result<Token, CloudError> {
        let response: TokenResponse = self.exchange(http, request).await?;
        self.token(&response.access_token, Duration::from_secs(response.expires_in))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_printed() {
        let issuer = Issuer { operation: "x", renew_before: Duration::from_mins(5), unavailable: &[] };
        let token = issuer.token("secret", Duration::from_hours(1)).expect("a token");
        assert_eq!(format!("{:?}", token.value), "Sensitive");
        assert!(issuer.token("line\nbreak", Duration::from_secs(8)).is_err());
    }

    #[test]
    fn a_lifetime_is_a_number_or_a_text() {
        let seconds = |text: &str| serde_json::from_str::<TokenResponse>(text).map(|response| response.expires_in);
        assert_eq!(seconds(r#"{"access_token": "secret", "expires_in": 3599}"#).expect("a response"), 3599);
        assert_eq!(seconds(r#"{"access_token": "secret", "expires_in": "8"}"#).expect("a response"), 8);
        assert_eq!(seconds(r#"{"access_token": "secret"}"#).expect("a response"), default_lifetime());
        assert!(seconds(r#"{"access_token": "a", "expires_in": "soon"}"#).is_err());
    }
}
