//! Access tokens of Microsoft Entra ID: for a federated token in a file (workload identity), for a client secret, or of the
//! machine's managed identity. <https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow>

mod source;

use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::{Deserialize, Deserializer};
use tokio::sync::Mutex;

pub use self::source::CredentialSource;
pub(super) use self::source::management_of;
use crate::api::Authorize;
use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, HttpError, is_trusted_url};

/// Operation in errors of credentials.
const NAME: &str = "GetToken";
/// Time before its end when a token is renewed.
const RENEW_BEFORE: Duration = Duration::from_mins(5);
/// Time that a request for a token may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same at the metadata server, which is one hop away or nowhere.
const METADATA_TIMEOUT: Duration = Duration::from_secs(3);
/// Version of the metadata server's API for tokens.
const METADATA: &str = "2018-02-01";
/// Type of a federated token (RFC 7523 section 2.2).
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";

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
    fn new(response: &TokenResponse) -> Result<Self, CloudError> {
        let value = HeaderValue::from_str(&format!("Bearer {}", response.access_token));
        let mut value =
            value.map_err(|_| refused("Malformed", "the token has characters that can't be in a header"))?;
        value.set_sensitive(true);
        let (now, lifetime) = (Instant::now(), Duration::from_secs(response.expires_in));
        let renew_at = now + lifetime.saturating_sub(RENEW_BEFORE.min(lifetime / 4));
        Ok(Self { value, renew_at, ends_at: now + lifetime })
    }
}

/// Credentials with the token that they have now.
pub(super) struct Credentials {
    source: CredentialSource,
    /// What tokens are for: the URL of Azure Resource Manager.
    audience: String,
    http: HttpClient,
    token: Mutex<Option<Token>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials { .. }")
    }
}

impl Credentials {
    pub(super) fn new(source: CredentialSource, audience: &str) -> Self {
        let is_metadata = matches!(source, CredentialSource::Managed { .. });
        let http = HttpClient::with_timeout(if is_metadata { METADATA_TIMEOUT } else { TIMEOUT });
        let audience = audience.trim_end_matches('/').to_owned();
        Self { source, audience, http, token: Mutex::new(None) }
    }

    async fn fetch(&self) -> Result<Token, CloudError> {
        let response = match &self.source {
            CredentialSource::Federated { authority, tenant, client, token_file } => {
                let assertion = read_token(token_file).await?;
                let proof = [("client_assertion_type", ASSERTION_TYPE), ("client_assertion", &assertion)];
                self.exchange(authority, tenant, client, &proof).await?
            }
            CredentialSource::Secret { authority, tenant, client, secret } => {
                self.exchange(authority, tenant, client, &[("client_secret", secret)]).await?
            }
            CredentialSource::Managed { imds, client } => self.of_machine(imds, client.as_deref()).await?,
        };
        Token::new(&response)
    }

    /// A token for a proof of identity (RFC 6749 section 4.4).
    async fn exchange(
        &self,
        authority: &str,
        tenant: &str,
        client: &str,
        proof: &[(&str, &str)],
    ) -> Result<TokenResponse, CloudError> {
        let url = format!("{}/{tenant}/oauth2/v2.0/token", authority.trim_end_matches('/'));
        if !is_trusted_url(&url) {
            return Err(refused("Url", "the URL for tokens must be https://, or http:// with a loopback address"));
        }
        let scope = format!("{}/.default", self.audience);
        let grant = [("grant_type", "client_credentials"), ("client_id", client), ("scope", &scope)];
        let form = form(&[&grant, proof].concat());
        let request = Request::post(url).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        let request = request.body(Bytes::from(form)).map_err(|_| refused("Url", "the URL for tokens is malformed"))?;
        send(&self.http, request).await
    }

    /// A token of the machine's managed identity.
    /// <https://learn.microsoft.com/entra/identity/managed-identities-azure-resources/how-to-use-vm-token>
    async fn of_machine(&self, imds: &str, client: Option<&str>) -> Result<TokenResponse, CloudError> {
        let resource = format!("{}/", self.audience);
        let mut query = vec![("api-version", METADATA), ("resource", &resource)];
        query.extend(client.map(|client| ("client_id", client)));
        let url = format!("{}/metadata/identity/oauth2/token?{}", imds.trim_end_matches('/'), form(&query));
        // The header keeps requests from being forged by pages and proxies.
        let request = Request::get(url).header("Metadata", "true").body(Bytes::new());
        let request = request.map_err(|_| refused("Url", "the metadata server's URL is malformed"))?;
        send(&self.http, request).await
    }
}

impl Authorize for Credentials {
    async fn authorize(&self, request: &mut Request<Bytes>, is_refused: bool) -> Result<(), CloudError> {
        // One renewal at a time: the others wait for it, and find the new token.
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

async fn read_token(file: &std::path::Path) -> Result<String, CloudError> {
    let token = tokio::fs::read_to_string(file).await;
    let token = token.map_err(|error| refused("TokenFile", &format!("{}: {error}", file.display())))?;
    Ok(token.trim().to_owned())
}

fn form(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

/// An error of the token endpoint (RFC 6749 section 5.2). Its description can quote what was sent, so it is left out; its numbers
/// are those of `AADSTS` in the documentation.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenError {
    error: serde_json::Value,
    error_codes: Vec<u64>,
}

/// Sends a request for a token. Neither errors nor logs have its body or that of the response.
async fn send(http: &HttpClient, request: Request<Bytes>) -> Result<TokenResponse, CloudError> {
    let host = request.uri().host().unwrap_or_default().to_owned();
    let response = http.send(request).await.map_err(|error| {
        let (HttpError::NotSent(text) | HttpError::NoResponse(text)) = error;
        CloudError::new(ErrorKind::Unavailable, NAME, "NotReachable", &format!("{host}: {text}"))
    })?;
    let status = response.status().as_u16();
    if response.status().is_success() {
        return serde_json::from_slice(response.body())
            .map_err(|_| refused("Malformed", &format!("the response of {host} isn't a token")));
    }
    let TokenError { error, error_codes } = serde_json::from_slice(response.body()).unwrap_or_default();
    let mut code = error.as_str().map_or_else(|| status.to_string(), str::to_owned);
    if let Some(number) = error_codes.first() {
        code = format!("{code}.AADSTS{number}");
    }
    let kind = match status {
        429 => ErrorKind::Throttled,
        // 404 and 410: the metadata server is being updated.
        404 | 410 | 500.. => ErrorKind::Unavailable,
        _ => ErrorKind::Credentials,
    };
    Err(CloudError::new(kind, NAME, &code, &format!("{host} gives no token: HTTP status {status}")))
}

/// A response with a token (RFC 6749 section 5.1).
#[derive(Deserialize)]
struct TokenResponse {
    access_token: String,
    #[serde(default = "default_lifetime", deserialize_with = "seconds")]
    expires_in: u64,
}

/// Seconds; `expires_in` is only recommended.
fn default_lifetime() -> u64 {
    3600
}

/// A number, or a number in a string, as the metadata server has it.
fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.ok_or_else(|| serde::de::Error::custom("not a number of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(text: &str) -> TokenResponse {
        serde_json::from_str(text).expect("a response")
    }

    #[test]
    fn a_token_is_not_printed() {
        let token = Token::new(&response(r#"{"access_token": "secret", "expires_in": 3600}"#)).expect("a token");
        assert_eq!(format!("{token:?} {:?}", token.value), "Token { .. } Sensitive");
        assert_eq!(token.ends_at - token.renew_at, RENEW_BEFORE);
        let short = Token::new(&response(r#"{"access_token": "secret", "expires_in": "8"}"#)).expect("a token");
        assert_eq!(short.ends_at - short.renew_at, Duration::from_secs(2));
        assert!(Token::new(&response(r#"{"access_token": "line\nbreak"}"#)).is_err());
        assert!(serde_json::from_str::<TokenResponse>(r#"{"access_token": "a", "expires_in": "soon"}"#).is_err());
    }
}
