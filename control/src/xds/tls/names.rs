//! Gateway names in a certificate.

use std::fmt;

use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

/// Path before the name in a URI SAN: `spiffe://example.org/gateway/gw-a`.
const URI_PATH: &str = "/gateway/";

/// Maximum number of names in messages.
const MAX_LISTED: usize = 8;

/// Names of gateways that a certificate authenticates: DNS SANs, last path segments of URI SANs, common names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateNames(Vec<String>);

impl CertificateNames {
    /// The names in a certificate; none if it can't be parsed.
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Self {
        let Ok((_, certificate)) = parse_x509_certificate(certificate) else { return Self::default() };
        let mut names = Vec::new();
        let alternative = certificate.subject_alternative_name().ok().flatten();
        for name in alternative.iter().flat_map(|it| &it.value.general_names) {
            match name {
                GeneralName::DNSName(name) => names.push((*name).to_owned()),
                GeneralName::URI(uri) => {
                    let name = uri.rsplit_once(URI_PATH).map(|(_, name)| name);
                    names.extend(name.filter(|name| !name.contains(['/', '?', '#'])).map(str::to_owned));
                }
                _ => {}
            }
        }
        let common = certificate.subject().iter_common_name().filter_map(|it| it.as_str().ok());
        names.extend(common.map(str::to_owned));
        names.retain(|name| !name.is_empty());
        let mut seen = std::collections::BTreeSet::new();
        names.retain(|name| seen.insert(name.clone()));
        Self(names)
    }

    /// The given names.
    #[cfg(test)]
    pub(crate) fn from_names(names: &[&str]) -> Self {
        Self(names.iter().map(ToString::to_string).collect())
    }

    /// All names.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Whether this is one of the names. Exact match, no wildcards.
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|known| known == name)
    }
}

impl fmt::Display for CertificateNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            0 => f.write_str("none (no DNS name, no gateway URI, no common name)"),
            count @ ..=MAX_LISTED => f.write_str(&self.0[..count].join(", ")),
            count => write!(f, "{} and {} more", self.0[..MAX_LISTED].join(", "), count - MAX_LISTED),
        }
    }
}
