//! Access tokens of Microsoft Entra ID: for a federated token in a file (workload identity), for a client secret, or of the
//! machine's managed identity. <https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow>

mod source;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use serde::{Deserialize, Deserializer};

pub use self::source::CredentialSource;
pub(super) use self::source::management_of;
use crate::api::Authorize;
use crate::error::CloudError;
use crate::http::HttpClient;
use crate::oauth::{FORM, Issuer, Token, TokenCache, default_lifetime, form, read_token};

const ISSUER: Issuer = Issuer {
    operation: "GetToken",
    renew_before: Duration::from_mins(5),
    // The metadata server is being updated.
    unavailable: &[404, 410],
};
/// Time that a request for a token may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same at the metadata server, which is one hop away or nowhere.
const METADATA_TIMEOUT: Duration = Duration::from_secs(3);
/// Version of the metadata server's API for tokens.
const METADATA: &str = "2018-02-01";
/// Type of a federated token (RFC 7523 section 2.2).
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";

/// Credentials with the token that they have now.
pub(super) struct Credentials {
    source: CredentialSource,
    /// What tokens are for: the URL of Azure Resource Manager.
    audience: String,
    http: HttpClient,
    token: TokenCache,
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
        Self { source, audience, http, token: TokenCache::default() }
    }

    async fn fetch(&self) -> Result<Token, CloudError> {
        let response = match &self.source {
            CredentialSource::Federated { authority, tenant, client, token_file } => {
                let assertion = read_token(ISSUER.operation, token_file).await?;
                let proof = [("client_assertion_type", ASSERTION_TYPE), ("client_assertion", &assertion)];
                self.exchange(authority, tenant, client, &proof).await?
            }
            CredentialSource::Secret { authority, tenant, client, secret } => {
                self.exchange(authority, tenant, client, &[("client_secret", secret)]).await?
            }
            CredentialSource::Managed { imds, client } => self.of_machine(imds, client.as_deref()).await?,
        };
        ISSUER.token(&response.access_token, Duration::from_secs(response.expires_in))
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
        let scope = format!("{}/.default", self.audience);
        let grant = [("grant_type", "client_credentials"), ("client_id", client), ("scope", &scope)];
        let request = ISSUER.post(&url, FORM, form(&[&grant, proof].concat()))?;
        ISSUER.exchange(&self.http, request).await
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
        let request = request.map_err(|_| ISSUER.refused("Url", "the metadata server's URL is malformed"))?;
        ISSUER.exchange(&self.http, request).await
    }
}

impl Authorize for Credentials {
    async fn authorize(&self, request: &mut Request<Bytes>, is_refused: bool) -> Result<(), CloudError> {
        self.token.authorize(request, is_refused, async || self.fetch().await).await
    }
}

/// A response with a token (RFC 6749 section 5.1).
#[derive(Deserialize)]
struct TokenResponse {
    access_token: String,
    #[serde(default = "default_lifetime", deserialize_with = "seconds")]
    expires_in: u64,
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

    #[test]
    fn a_lifetime_is_a_number_or_a_text() {
        let seconds = |text: &str| serde_json::from_str::<TokenResponse>(text).map(|response| response.expires_in);
        assert_eq!(seconds(r#"{"access_token": "secret", "expires_in": 3599}"#).expect("a response"), 3599);
        assert_eq!(seconds(r#"{"access_token": "secret", "expires_in": "8"}"#).expect("a response"), 8);
        assert_eq!(seconds(r#"{"access_token": "secret"}"#).expect("a response"), default_lifetime());
        assert!(seconds(r#"{"access_token": "a", "expires_in": "soon"}"#).is_err());
    }
}
