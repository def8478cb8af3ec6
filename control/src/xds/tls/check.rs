//! Offline checks of TLS files, for `vipgate check`.

use std::path::Path;

use x509_parser::parse_x509_certificate;
use x509_parser::time::ASN1Time;

use super::{
    CertificateNames, ClientCertificates, TlsError, certificates, client_config, private_key, roots, server_config,
};

/// The side of a connection that uses the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A client: without CAs it trusts the system's.
    Client,
    Server,
}

impl Side {
    /// Checks that the files can be used, and that certificate and key (`identity`) match.
    ///
    /// # Errors
    /// If they can't be used.
    pub fn check(self, ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<(), TlsError> {
        match (self, identity) {
            (Self::Client, _) => client_config(ca, identity).map(drop),
            (Self::Server, Some((cert, key))) => server_config(ca, ClientCertificates::Required, cert, key).map(drop),
            (Self::Server, None) => Ok(()),
        }
    }
}

/// Validity period of a certificate.
#[derive(Clone, Debug)]
pub struct Validity {
    file: String,
    from: ASN1Time,
    until: ASN1Time,
}

impl Validity {
    /// Its first and last second, since 1970.
    pub(super) fn period(&self) -> (u64, u64) {
        let seconds = |time: &ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        (seconds(&self.from), seconds(&self.until))
    }

    /// Why the certificate isn't valid now; `None`: it is.
    pub fn error(&self) -> Option<String> {
        let (now, Self { file, from, until }) = (ASN1Time::now(), self);
        if now > *until {
            Some(format!("{file}: expired at {until}"))
        } else if now < *from {
            Some(format!("{file}: isn't valid before {from}"))
        } else {
            None
        }
    }
}

/// Checks a file of CA certificates; returns their validity periods.
///
/// # Errors
/// If they can't be used.
pub fn check_authorities(path: &Path) -> Result<Vec<Validity>, TlsError> {
    roots(path)?;
    check_certificates(path)
}

/// Checks a file of certificates; returns their validity periods.
///
/// # Errors
/// If one can't be parsed.
pub fn check_certificates(path: &Path) -> Result<Vec<Validity>, TlsError> {
    let invalid = |reason: String| TlsError::Invalid { path: path.to_owned(), reason };
    let validity = |certificate: &_| {
        let (_, parsed) = parse_x509_certificate(certificate)
            .map_err(|error| invalid(format!("holds an invalid certificate: {error}")))?;
        let (from, until) = (parsed.validity().not_before, parsed.validity().not_after);
        Ok(Validity { file: path.display().to_string(), from, until })
    };
    certificates(path)?.iter().map(|it| validity(it.as_ref())).collect()
}

/// Checks that a file holds a private key.
///
/// # Errors
/// If it can't be parsed.
pub fn check_key(path: &Path) -> Result<(), TlsError> {
    private_key(path).map(drop)
}

impl CertificateNames {
    /// The names in the first certificate of a file.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn from_file(path: &Path) -> Result<Self, TlsError> {
        Ok(certificates(path)?.first().map(Self::from_certificate).unwrap_or_default())
    }
}
