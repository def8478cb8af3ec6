//! Replies with keys: JSON of metadata servers, XML of STS.

use std::time::SystemTime;

use jiff::Timestamp;
use serde::Deserialize;

use super::{Keys, error};
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

    pub(super) fn keys(self) -> Result<Keys, CloudError> {
        Ok(Keys {
            access_key: self.access_key_id,
            secret_key: self.secret_access_key,
            session_token: self.token,
            expires: self.expiration.as_deref().map(time).transpose()?,
        })
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

    pub(super) fn keys(self) -> Result<Keys, CloudError> {
        let StsCredentials { access_key_id, secret_access_key, session_token, expiration } = self.result.credentials;
        Ok(Keys {
            access_key: access_key_id,
            secret_key: secret_access_key,
            session_token: Some(session_token),
            expires: Some(time(&expiration)?),
        })
    }
}

/// What is wrong isn't said: the text has keys in it.
fn unreadable() -> CloudError {
    error("UnreadableReply", "the reply has no credentials")
}

/// A time, RFC 3339.
fn time(text: &str) -> Result<SystemTime, CloudError> {
    let time: Timestamp = text.parse().map_err(|_| unreadable())?;
    Ok(SystemTime::from(time))
}
