//! Access tokens of Microsoft Entra ID: for a federated token in a file (workload identity), for a client secret, or of the
//! machine's managed identity. <https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow>

mod source;

use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};

pub use self::source::CredentialSource;
pub(super) use self::source::management_of;
use crate::credential::{Authorize, FORM, form, read_file};
use crate::error::CloudError;
use crate::http::HttpClient;
use crate::oauth::{Issuer, Token};

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

pub(super) struct Credentials {
    source: CredentialSource,
    /// What tokens are for: the URL of Azure Resource Manager.
    audience: String,
    http: HttpClient,
}

impl Credentials {
    pub(super) fn new(source: CredentialSource, audience: &str) -> Self {
        let is_metadata = matches!(source, CredentialSource::Managed { .. });
        let http = HttpClient::with_timeout(if is_metadata { METADATA_TIMEOUT } else { TIMEOUT });
        let audience = audience.trim_end_matches('/').to_owned();
        Self { source, audience, http }
    }

    /// A token for a proof of identity (RFC 6749 section 4.4).
    async fn exchange(
        &self,
        authority: &str,
        tenant: &str,
        client: &str,
        proof: &[(&str, &str)],
    ) -> Result<Token, CloudError> {
        let url = format!("{}/{tenant}/oauth2/v2.0/token", authority.trim_end_matches('/'));
        let scope = format!("{}/.default", self.audience);
        let grant = [("grant_type", "client_credentials"), ("client_id", client), ("scope", &scope)];
        let request = ISSUER.post(&url, FORM, form(&[&grant, proof].concat()))?;
        ISSUER.fetch(&self.http, request).await
    }

    /// A token of the machine's managed identity.
    /// <https://learn.microsoft.com/entra/identity/managed-identities-azure-resources/how-to-use-vm-token>
    async fn of_machine(&self, imds: &str, client: Option<&str>) -> Result<Token, CloudError> {
        let resource = format!("{}/", self.audience);
        let mut query = vec![("api-version", METADATA), ("resource", &resource)];
        query.extend(client.map(|client| ("client_id", client)));
        let url = format!("{}/metadata/identity/oauth2/token?{}", imds.trim_end_matches('/'), form(&query));
        // The header keeps requests from being forged by pages and proxies.
        let request = Request::get(url).header("Metadata", "true").body(Bytes::new());
        let request = request.map_err(|_| ISSUER.refused("Url", "the metadata server's URL is malformed"))?;
        ISSUER.fetch(&self.http, request).await
    }
}

impl Authorize for Credentials {
    type Credential = HeaderValue;

    async fn fetch(&self) -> Result<Token, CloudError> {
        match &self.source {
            CredentialSource::Federated { authority, tenant, client, token_file } => {
                let assertion = read_file(ISSUER.operation, token_file).await?;
                let proof = [("client_assertion_type", ASSERTION_TYPE), ("client_assertion", &assertion)];
                self.exchange(authority, tenant, client, &proof).await
            }
            CredentialSource::Secret { authority, tenant, client, secret } => {
                self.exchange(authority, tenant, client, &[("client_secret", secret)]).await
            }
            CredentialSource::Managed { imds, client } => self.of_machine(imds, client.as_deref()).await,
        }
    }

    fn authorize(&self, token: HeaderValue, request: &mut Request<Bytes>) -> Result<(), CloudError> {
        request.headers_mut().insert(AUTHORIZATION, token);
        Ok(())
    }
}
