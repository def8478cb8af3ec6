//! Access tokens: of a service account's key, of workload identity federation, or of the metadata server.
//! <https://cloud.google.com/docs/authentication/application-default-credentials>

mod external_account;
mod metadata;
mod service_account;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use serde::Deserialize;
use vipgate_common::spawn_blocking;

use crate::api::Authorize;
use crate::error::CloudError;
use crate::http::HttpClient;
use crate::oauth::{Issuer, Token, TokenCache, default_lifetime};

const ISSUER: Issuer = Issuer {
    operation: "credentials",
    // The metadata server gives a new one only in the last minutes of the former.
    renew_before: Duration::from_secs(225),
    unavailable: &[],
};
/// What tokens are for.
const SCOPE: &str = "https://www.googleapis.com/auth/compute";
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

/// Credentials with the token that they have now.
pub(super) struct Credentials {
    source: CredentialSource,
    http: HttpClient,
    token: TokenCache,
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
        Self { source, http: HttpClient::with_timeout(TIMEOUT), token: TokenCache::default() }
    }

    async fn fetch(&self) -> Result<Token, CloudError> {
        let path = match &self.source {
            CredentialSource::Metadata(host) => return metadata::token(&self.http, host).await,
            CredentialSource::File(path) => path,
        };
        let text = read_file(path).await?;
        // The parser's error could quote the file.
        let file = serde_json::from_slice(&text);
        match file.map_err(|_| ISSUER.refused("File", &format!("{} isn't a file of credentials", path.display())))? {
            File::ServiceAccount(key) => key.token(&self.http).await,
            File::ExternalAccount(account) => account.token(&self.http).await,
        }
    }
}

impl Authorize for Credentials {
    async fn authorize(&self, request: &mut Request<Bytes>, is_refused: bool) -> Result<(), CloudError> {
        self.token.authorize(request, is_refused, async || self.fetch().await).await
    }
}

async fn read_file(path: &std::path::Path) -> Result<Vec<u8>, CloudError> {
    let path = path.to_owned();
    let name = path.display().to_string();
    let read = spawn_blocking(move || std::fs::read(path)).await;
    read.map_err(|error| ISSUER.refused("File", &format!("{name}: {error}")))
}

/// A response with a token (RFC 6749 section 5.1).
#[derive(Deserialize)]
struct TokenResponse {
    access_token: String,
    #[serde(default = "default_lifetime")]
    expires_in: u64,
}

impl TokenResponse {
    fn token(&self) -> Result<Token, CloudError> {
        ISSUER.token(&self.access_token, Duration::from_secs(self.expires_in))
    }
}
