//! Validity of the certificates that a process uses, as metrics.

use std::path::PathBuf;

use super::check::{Validity, check_certificates};
use crate::metric::{Family, Label, metrics};

const CERTIFICATE: Label = Label::one_of("certificate", &["own", "ca"]);

metrics! {
    /// Certificates of connections between gateways and policy servers, where they have TLS.
    pub(crate) CERTIFICATE_METRICS:
    CERTIFICATE_NOT_BEFORE = Gauge("certificate_not_before_timestamp_seconds", [CERTIFICATE]):
        "Start of the validity of this process's certificate and of its trusted CA, in seconds since 1970";
    CERTIFICATE_NOT_AFTER = Gauge("certificate_not_after_timestamp_seconds", [CERTIFICATE]):
        "End of the validity of this process's certificate and of its trusted CA, in seconds since 1970; absent: there \
         is none, or it can't be read";
}

/// The files of certificates in PEM.
#[derive(Clone, Debug, Default)]
pub struct CertificateFiles {
    /// The certificate chain of this process.
    pub own: Option<PathBuf>,
    /// The trusted CAs.
    pub ca: Option<PathBuf>,
}

/// The validity of certificates; `None`: there is none, or it can't be read.
#[derive(Clone, Debug, Default)]
pub struct CertificateValidity {
    /// Of the chain, the certificate that ends first: without it, the others are of no use.
    own: Option<Validity>,
    /// Of the CAs, the certificate that ends last: a file may have the next CA beside the present one.
    ca: Option<Validity>,
}

impl CertificateValidity {
    /// Reads the files.
    pub fn read(files: &CertificateFiles) -> Self {
        let all = |path: &Option<PathBuf>| path.as_deref().map(check_certificates).and_then(Result::ok);
        let until = |validity: &Validity| validity.period().1;
        Self {
            own: all(&files.own).into_iter().flatten().min_by_key(until),
            ca: all(&files.ca).into_iter().flatten().max_by_key(until),
        }
    }

    /// Its metrics.
    pub(crate) fn families(&self) -> [Family; 2] {
        let named = [("own", &self.own), ("ca", &self.ca)];
        let periods = named.map(|(name, validity)| Some((name, validity.as_ref()?.period())));
        let periods = periods.iter().flatten();
        [
            CERTIFICATE_NOT_BEFORE.by_label(periods.clone().map(|(name, (from, _))| (*name, *from))),
            CERTIFICATE_NOT_AFTER.by_label(periods.map(|(name, (_, until))| (*name, *until))),
        ]
    }
}
