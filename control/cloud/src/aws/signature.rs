//! Signature version 4 of requests.

use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{SignableBody, SignableRequest, SigningSettings, sign as signed};
use aws_sigv4::sign::v4;
use bytes::Bytes;
use hyper::Request;

use crate::error::{CloudError, ErrorKind};

/// Signs a request to EC2 in a region.
pub(super) fn sign(region: &str, keys: Credentials, request: &mut Request<Bytes>) -> Result<(), CloudError> {
    let failed = |error: &dyn std::fmt::Display| {
        CloudError::new(ErrorKind::Credentials, "Sign", "Signature", &error.to_string())
    };
    let identity = keys.into();
    let parameters = v4::SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name("ec2")
        .time(SystemTime::now())
        .settings(SigningSettings::default())
        .build()
        .map_err(|error| failed(&error))?
        .into();
    let headers = request.headers().iter();
    let headers = headers.filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
    let uri = request.uri().to_string();
    let signable = SignableRequest::new(request.method().as_str(), uri, headers, SignableBody::Bytes(request.body()))
        .map_err(|error| failed(&error))?;
    let (instructions, _) = signed(signable, &parameters).map_err(|error| failed(&error))?.into_parts();
    instructions.apply_to_request_http1x(request);
    Ok(())
}
