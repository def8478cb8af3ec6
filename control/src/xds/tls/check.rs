//! Files of TLS, looked at without any connection.

use std::path::Path;

use x509_parser::parse_x509_certificate;
use x509_parser::time::ASN1Time;

use super::{Names, TlsError, certificates, client, private_key, roots, server};

/// Who uses the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A client: without authorities it trusts those of the machine.
    Client,
    /// A server.
    Server,
}

impl Side {
    /// Whether certificate and key belong together, and all of it can be used.
    ///
    /// # Errors
    /// When it can't.
    pub fn check(self, ca: Option<&Path>, own: Option<(&Path, &Path)>) -> Result<(), TlsError> {
        match (self, own) {
            (Self::Client, _) => client(ca, own).map(drop),
            (Self::Server, Some((cert, key))) => server(ca, cert, key).map(drop),
            (Self::Server, None) => Ok(()),
        }
    }
}

/// From when until when a certificate is good.
#[derive(Clone, Debug)]
pub struct Validity {
    file: String,
    from: ASN1Time,
    until: ASN1Time,
}

impl Validity {
    /// What is wrong with it now.
    pub fn complaint(&self) -> Option<String> {
        let (now, Self { file, from, until }) = (ASN1Time::now(), self);
        if now > *until {
            Some(format!("{file}: expired at {until}"))
        } else if now < *from {
            Some(format!("{file}: isn't good before {from}"))
        } else {
            None
        }
    }
}

/// Authorities, each with its dates.
///
/// # Errors
/// When they can't be used.
pub fn check_authorities(path: &Path) -> Result<Vec<Validity>, TlsError> {
    roots(path)?;
    check_certificates(path)
}

/// A certificate and what stands behind it, each with its dates.
///
/// # Errors
/// When one can't be read.
pub fn check_certificates(path: &Path) -> Result<Vec<Validity>, TlsError> {
    let wrong = |reason: String| TlsError::Wrong { path: path.to_owned(), reason };
    let dates = |certificate: &_| {
        let (_, parsed) = parse_x509_certificate(certificate)
            .map_err(|error| wrong(format!("holds something that is no certificate: {error}")))?;
        let (from, until) = (parsed.validity().not_before, parsed.validity().not_after);
        Ok(Validity { file: path.display().to_string(), from, until })
    };
    certificates(path)?.iter().map(|it| dates(it.as_ref())).collect()
}

/// A private key.
///
/// # Errors
/// When it can't be read.
pub fn check_key(path: &Path) -> Result<(), TlsError> {
    private_key(path).map(drop)
}

impl Names {
    /// The names in the first certificate of a file.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn of_file(path: &Path) -> Result<Self, TlsError> {
        Ok(certificates(path)?.first().map(Self::of).unwrap_or_default())
    }
}
