//! Key of a service account: a signed assertion is exchanged for a token (RFC 7523).
//! <https://developers.google.com/identity/protocols/oauth2/service-account#httprest>

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jiff::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use serde::Deserialize;
use serde_json::json;

use super::{ISSUER, SCOPE, Token};
use crate::credential::{FORM, form};
use crate::error::CloudError;
use crate::http::HttpClient;

/// Seconds that an assertion is valid: the maximum.
const LIFETIME: i64 = 3600;

/// A file of type `service_account`.
#[derive(Deserialize)]
pub(super) struct Key {
    client_email: String,
    #[serde(default)]
    private_key_id: String,
    /// PKCS #8 in PEM.
    #[serde(rename = "private_key")]
    pem: String,
    token_uri: String,
}

impl Key {
    pub(super) async fn token(&self, http: &HttpClient) -> Result<Token, CloudError> {
        let assertion = self.assertion(Timestamp::now())?;
        let body = form(&[("grant_type", "urn:ietf:params:oauth:grant-type:jwt-bearer"), ("assertion", &assertion)]);
        let request = ISSUER.post(&self.token_uri, FORM, body)?;
        ISSUER.fetch(http, request).await
    }

    /// A JSON Web Token with RS256 (RFC 7519, RFC 7518 section 3.3).
    fn assertion(&self, now: Timestamp) -> Result<String, CloudError> {
        let issued = now.as_second();
        let header = json!({ "alg": "RS256", "typ": "JWT", "kid": self.private_key_id });
        let claims = json!({
            "iss": self.client_email,
            "scope": SCOPE,
            "aud": self.token_uri,
            "iat": issued,
            "exp": issued + LIFETIME,
        });
        let part = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&header), part(&claims));
        let key = self.key_pair()?;
        let mut signature = vec![0; key.public().modulus_len()];
        key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature)
            .map_err(|_| ISSUER.refused("Key", "private_key can't sign"))?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    fn key_pair(&self) -> Result<RsaKeyPair, CloudError> {
        let error = || ISSUER.refused("Key", "private_key isn't an RSA key (PKCS #8, PEM)");
        let pem = self.pem.trim();
        let pem = pem.strip_prefix("-----BEGIN PRIVATE KEY-----").ok_or_else(error)?;
        let pem = pem.strip_suffix("-----END PRIVATE KEY-----").ok_or_else(error)?;
        let base64: String = pem.split_whitespace().collect();
        let der = STANDARD.decode(base64).map_err(|_| error())?;
        RsaKeyPair::from_pkcs8(&der).map_err(|_| error())
    }
}
