//! Access tokens: of a service account's key, of workload identity federation, or of the metadata server.
//! <https://cloud.google.com/docs/authentication/application-default-credentials>

mod external_account;
mod metadata;
mod service_account;

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use serde::Deserialize;

use crate::credential::{Authorize, read_file};
use crate::error::CloudError;
use crate::http::HttpClient;
use crate::oauth::{Issuer, Token};

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

pub(super) struct Credentials {
    source: CredentialSource,
    http: HttpClient,
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
        Self { source, http: HttpClient::with_timeout(TIMEOUT) }
    }
}

impl Authorize for Credentials {
    type Credential = HeaderValue;

    async fn fetch(&self) -> Result<Token, CloudError> {
        let path = match &self.source {
            CredentialSource::Metadata(host) => return metadata::token(&self.http, host).await,
            CredentialSource::File(path) => path,
        };
        let text = read_file(ISSUER.operation, path).await?;
        // The parser's error could quote the file.
        let file = serde_json::from_str(&text);
        match file.map_err(|_| ISSUER.refused("File", &format!("{} isn't a file of credentials", path.display())))? {
            File::ServiceAccount(key) => key.token(&self.http).await,
            File::ExternalAccount(account) => account.token(&self.http).await,
        }
    }

    fn authorize(&self, token: HeaderValue, request: &mut Request<Bytes>) -> Result<(), CloudError> {
        request.headers_mut().insert(AUTHORIZATION, token);
        Ok(())
    }
}
