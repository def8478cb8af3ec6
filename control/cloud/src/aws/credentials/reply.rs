//! Replies with keys: JSON of metadata servers, XML of STS.

use std::time::Duration;

use serde::Deserialize;

use super::{Expiring, Keys, error, keys};
use crate::credential::time_until;
use crate::error::CloudError;

/// Of a metadata server.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct SecurityCredentials {
    access_key_id: String,
    secret_access_key: String,
    token: Option<String>,
    expiration: Option<String>,
}

impl SecurityCredentials {
    pub(super) fn read(body: &[u8]) -> Result<Self, CloudError> {
        serde_json::from_slice(body).map_err(|_| unreadable())
    }

    pub(super) fn keys(self) -> Result<Expiring<Keys>, CloudError> {
        let lifetime = self.expiration.as_deref().map(lifetime).transpose()?;
        Ok(keys(&self.access_key_id, &self.secret_access_key, self.token.as_deref(), lifetime))
    }
}

/// Of STS.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct AssumeRole {
    #[serde(rename = "AssumeRoleWithWebIdentityResult")]
    result: AssumeRoleResult,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AssumeRoleResult {
    credentials: StsCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct StsCredentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    expiration: String,
}

impl AssumeRole {
    pub(super) fn read(body: &[u8]) -> Result<Self, CloudError> {
        quick_xml::de::from_reader(body).map_err(|_| unreadable())
    }

    pub(super) fn keys(self) -> Result<Expiring<Keys>, CloudError> {
        let StsCredentials { access_key_id, secret_access_key, session_token, expiration } = self.result.credentials;
        Ok(keys(&access_key_id, &secret_access_key, Some(&session_token), Some(lifetime(&expiration)?)))
    }
}

/// What is wrong isn't said: the text has keys in it.
fn unreadable() -> CloudError {
    error("UnreadableReply", "the reply has no credentials")
}

fn lifetime(end: &str) -> Result<Duration, CloudError> {
    time_until(end).ok_or_else(unreadable)
}
