//! Workload identity federation: a token of another issuer is exchanged for one of Google's (RFC 8693), and that, if so
//! configured, for one of a service account. <https://google.aip.dev/auth/4117>

use std::collections::BTreeMap;
use std::path::PathBuf;

use bytes::Bytes;
use hyper::Request;
use hyper::header::AUTHORIZATION;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ISSUER, SCOPE, Token};
use crate::credential::{FORM, form, read_file, time_until};
use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, HttpError};

/// What the first token may do when it is only used to get a service account's.
const IMPERSONATION_SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";

/// A file of type `external_account`.
#[derive(Deserialize)]
pub(super) struct Account {
    audience: String,
    subject_token_type: String,
    token_url: String,
    credential_source: Source,
    service_account_impersonation_url: Option<String>,
    #[serde(default)]
    service_account_impersonation: Impersonation,
}

/// Where the other issuer's token is.
#[derive(Deserialize)]
struct Source {
    /// Of AWS: its `url` gives no token, but what requests are signed with.
    environment_id: Option<String>,
    file: Option<PathBuf>,
    url: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    format: Format,
}

#[derive(Default, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Format {
    #[default]
    Text,
    Json {
        subject_token_field_name: String,
    },
}

#[derive(Deserialize)]
#[serde(default)]
struct Impersonation {
    token_lifetime_seconds: u64,
}

impl Default for Impersonation {
    fn default() -> Self {
        Self { token_lifetime_seconds: 3600 }
    }
}

/// A service account's token.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Impersonated {
    access_token: String,
    /// RFC 3339.
    expire_time: String,
}

impl Account {
    pub(super) async fn token(&self, http: &HttpClient) -> Result<Token, CloudError> {
        let subject = self.credential_source.subject_token(http).await?;
        let scope = if self.service_account_impersonation_url.is_some() { IMPERSONATION_SCOPE } else { SCOPE };
        let body = form(&[
            ("grant_type", "urn:ietf:params:oauth:grant-type:token-exchange"),
            ("audience", &self.audience),
            ("scope", scope),
            ("requested_token_type", "urn:ietf:params:oauth:token-type:access_token"),
            ("subject_token_type", &self.subject_token_type),
            ("subject_token", &subject),
        ]);
        let request = ISSUER.post(&self.token_url, FORM, body)?;
        let federated = ISSUER.fetch(http, request).await?;
        let Some(url) = &self.service_account_impersonation_url else { return Ok(federated) };
        let lifetime = format!("{}s", self.service_account_impersonation.token_lifetime_seconds);
        let body = json!({ "scope": [SCOPE], "lifetime": lifetime }).to_string();
        let mut request = ISSUER.post(url, "application/json", body)?;
        request.headers_mut().insert(AUTHORIZATION, federated.value);
        let token: Impersonated = ISSUER.exchange(http, request).await?;
        let left = time_until(&token.expire_time);
        ISSUER.token(&token.access_token, left.ok_or_else(|| ISSUER.refused("Malformed", "expireTime isn't a time"))?)
    }
}

impl Source {
    async fn subject_token(&self, http: &HttpClient) -> Result<String, CloudError> {
        if self.environment_id.is_some() {
            return Err(ISSUER.refused("Source", "credential_source with environment_id (AWS) is not supported"));
        }
        let content = match (&self.file, &self.url) {
            (Some(file), _) => Bytes::from(read_file(ISSUER.operation, file).await?),
            (None, Some(url)) => self.get(http, url).await?,
            (None, None) => return Err(ISSUER.refused("Source", "credential_source has neither file nor url")),
        };
        let token = match &self.format {
            Format::Text => String::from_utf8(content.to_vec()).ok(),
            Format::Json { subject_token_field_name: field } => {
                let content: Value = serde_json::from_slice(&content).unwrap_or_default();
                content[field].as_str().map(str::to_owned)
            }
        };
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        token.ok_or_else(|| ISSUER.refused("Source", "credential_source has no token in the format that it says"))
    }

    /// Plain HTTP is allowed: sources are often servers of the same machine, such as 169.254.169.254.
    async fn get(&self, http: &HttpClient, url: &str) -> Result<Bytes, CloudError> {
        let request = self.headers.iter().fold(Request::builder().uri(url), |it, (key, value)| it.header(key, value));
        let request = request
            .body(Bytes::new())
            .map_err(|_| ISSUER.refused("Source", "the url of credential_source is malformed"))?;
        match http.send(request).await {
            Ok(response) if response.status().is_success() => Ok(response.into_body()),
            Ok(response) => {
                let text = format!("credential_source gives no token: HTTP status {}", response.status().as_u16());
                Err(ISSUER.refused("Source", &text))
            }
            Err(HttpError::NotSent(text) | HttpError::NoResponse(text)) => {
                Err(CloudError::new(ErrorKind::Unavailable, ISSUER.operation, "NotReachable", &text))
            }
        }
    }
}
