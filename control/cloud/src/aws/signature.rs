//! Signature version 4 of requests.

use std::time::SystemTime;

use aws_sigv4::http_request::{SignableBody, SignableRequest, SigningSettings, sign};
use aws_sigv4::sign::v4;
use bytes::Bytes;
use hyper::Request;

use super::credentials::Credentials;
use crate::api::Authorize;
use crate::error::{CloudError, ErrorKind};

/// Signs requests with credentials that are got when they are needed.
pub(super) struct Signer {
    region: String,
    credentials: Credentials,
}

impl Signer {
    pub(super) fn new(region: &str, credentials: Credentials) -> Self {
        Self { region: region.to_owned(), credentials }
    }
}

impl Authorize for Signer {
    async fn authorize(&self, request: &mut Request<Bytes>, is_refused: bool) -> Result<(), CloudError> {
        let keys = self.credentials.keys(is_refused).await?;
        let failed = |error: &dyn std::fmt::Display| {
            CloudError::new(ErrorKind::Credentials, "Sign", "Signature", &error.to_string())
        };
        let identity = aws_credential_types::Credentials::new(
            keys.access_key.clone(),
            keys.secret_key.clone(),
            keys.session_token.clone(),
            None,
            "vipgate",
        );
        let identity = identity.into();
        let parameters = v4::SigningParams::builder()
            .identity(&identity)
            .region(&self.region)
            .name("ec2")
            .time(SystemTime::now())
            .settings(SigningSettings::default())
            .build()
            .map_err(|error| failed(&error))?
            .into();
        let headers = request.headers().iter();
        let headers = headers.filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
        let uri = request.uri().to_string();
        let signable =
            SignableRequest::new(request.method().as_str(), uri, headers, SignableBody::Bytes(request.body()))
                .map_err(|error| failed(&error))?;
        let (instructions, _) = sign(signable, &parameters).map_err(|error| failed(&error))?.into_parts();
        instructions.apply_to_request_http1x(request);
        Ok(())
    }
}
