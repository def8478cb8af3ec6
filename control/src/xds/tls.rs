//! Certificates of both sides of the policy protocol. They are read again for every new connection, so that a renewed file
//! counts from the next one on, and connections that stand go on.

mod check;
mod names;

pub use self::check::{Side, Validity, check_authorities, check_certificates, check_key};
pub use self::names::Names;

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

use crate::text_file::read_regular;

/// The protocol inside TLS (RFC 7301): HTTP/2.
const H2: &[u8] = b"h2";

/// Certificates that can't be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file can't be read.
    #[error("{}: can't be read: {error}", .path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// A file doesn't hold what it should.
    #[error("{}: {reason}", .path.display())]
    Wrong {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Certificate and key don't belong together, or nobody can check anything with them.
    #[error("{}: can't be used: {error}", .path.display())]
    Unusable {
        /// The certificate.
        path: PathBuf,
        /// Why.
        error: rustls::Error,
    },
    /// The system has no certificates.
    #[error("this machine has no certificates of authorities ({0}); name those to trust by `ca`")]
    NoRoots(String),
}

/// What a client trusts and shows: no `ca` means the system's, no certificate means none is shown.
///
/// # Errors
/// When a file can't be used.
pub fn client(ca: Option<&Path>, own: Option<(&Path, &Path)>) -> Result<ClientConfig, TlsError> {
    let roots = match ca {
        Some(path) => roots(path)?,
        None => system_roots()?,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Unusable { path: PathBuf::new(), error })?
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|error| TlsError::Unusable { path: cert.to_owned(), error })?,
    };
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(config)
}

/// What a server shows, and whom it lets in: with `ca`, clients must present a certificate that it signed.
///
/// # Errors
/// When a file can't be used.
pub fn server(ca: Option<&Path>, cert: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Unusable { path: cert.to_owned(), error })?;
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path)?), provider)
                .build()
                .map_err(|error| TlsError::Wrong { path: path.to_owned(), reason: error.to_string() })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(certificates(cert)?, private_key(key)?)
        .map_err(|error| TlsError::Unusable { path: cert.to_owned(), error })?;
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(config)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    read_regular(path).map_err(|error| TlsError::Unreadable { path: path.to_owned(), error })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |reason: String| TlsError::Wrong { path: path.to_owned(), reason };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match found {
        Ok(found) if found.is_empty() => Err(wrong("holds no certificate (PEM)".to_owned())),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong(format!("is no list of certificates (PEM): {error}"))),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let wrong =
        |error| TlsError::Wrong { path: path.to_owned(), reason: format!("holds no private key (PEM): {error}") };
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(wrong)
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| TlsError::Unusable { path: path.to_owned(), error })?;
    }
    Ok(roots)
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
        return Err(TlsError::NoRoots(if errors.is_empty() { "none found".to_owned() } else { errors.join("; ") }));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests;
