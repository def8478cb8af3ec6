//! TLS configuration of policy clients and servers. Certificates are read for each new connection: a renewed file takes
//! effect with the next one, and established connections continue.

mod check;
mod names;
mod validity;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokio_rustls::rustls;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

pub use self::check::{Side, Validity, check_authorities, check_certificates, check_key};
pub use self::names::CertificateNames;
pub(crate) use self::validity::CERTIFICATE_METRICS;
pub use self::validity::{CertificateFiles, CertificateValidity};
use crate::text_file::read_regular;

/// ALPN protocol (RFC 7301): HTTP/2.
const H2: &[u8] = b"h2";

/// Why certificates or keys can't be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file can't be read.
    #[error("{}: can't be read: {error}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        #[source]
        error: io::Error,
    },
    /// A file has no valid PEM content of the expected type.
    #[error("{}: {reason}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        reason: String,
    },
    /// rustls rejects a certificate, e.g. because the key doesn't match.
    #[error("{}: can't be used: {error}", .path.display())]
    Unusable {
        /// The certificate.
        path: PathBuf,
        /// The TLS error.
        #[source]
        error: rustls::Error,
    },
    /// The system has no CA certificates.
    #[error("this system has no CA certificates ({0}); configure `ca`")]
    NoRoots(String),
}

/// TLS configuration of a client. Without `ca` it trusts the system's CAs; `identity` is its certificate and key.
///
/// # Errors
/// If a file can't be used.
pub fn client_config(ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<ClientConfig, TlsError> {
    let roots = match ca {
        Some(path) => roots(path)?,
        None => system_roots()?,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Unusable { path: PathBuf::new(), error })?
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|error| TlsError::Unusable { path: cert.to_owned(), error })?,
    };
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(config)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Each client must show one.
    Required,
    /// A client may show none.
    Optional,
}

/// TLS configuration of a server. With `ca`, clients present a certificate signed by it (mutual TLS).
///
/// # Errors
/// If a file can't be used.
pub fn server_config(
    ca: Option<&Path>,
    presence: ClientCertificates,
    cert: &Path,
    key: &Path,
) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Unusable { path: cert.to_owned(), error })?;
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path)?), provider);
            let verifier = match presence {
                ClientCertificates::Required => verifier,
                ClientCertificates::Optional => verifier.allow_unauthenticated(),
            };
            let verifier = verifier
                .build()
                .map_err(|error| TlsError::Invalid { path: path.to_owned(), reason: error.to_string() })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(certificates(cert)?, private_key(key)?)
        .map_err(|error| TlsError::Unusable { path: cert.to_owned(), error })?;
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(config)
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    read_regular(path).map_err(|error| TlsError::Unreadable { path: path.to_owned(), error })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let invalid = |reason: String| TlsError::Invalid { path: path.to_owned(), reason };
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read_file(path)?).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => Err(invalid("holds no certificate (PEM)".to_owned())),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(invalid(format!("holds an invalid certificate (PEM): {error}"))),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let invalid =
        |error| TlsError::Invalid { path: path.to_owned(), reason: format!("holds no private key (PEM): {error}") };
    PrivateKeyDer::from_pem_slice(&read_file(path)?).map_err(invalid)
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| TlsError::Unusable { path: path.to_owned(), error })?;
    }
    Ok(roots)
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let native = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        let errors: Vec<_> = native.errors.iter().map(ToString::to_string).collect();
        return Err(TlsError::NoRoots(if errors.is_empty() { "none found".to_owned() } else { errors.join("; ") }));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests;
