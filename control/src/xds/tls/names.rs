//! The names in a certificate.

use std::fmt;

use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

/// Before the name in a URI: `spiffe://example.org/gateway/gw-a`.
const URI_PATH: &str = "/gateway/";

/// Names that messages list.
const SHOWN: usize = 8;

/// The names of gateways that a certificate is good for: its DNS names, the ends of its URIs, its common names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl Names {
    /// The names in a certificate; one that can't be read has none.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
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

    /// These.
    #[cfg(test)]
    pub(crate) fn named(names: &[&str]) -> Self {
        Self(names.iter().map(ToString::to_string).collect())
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Whether this is one of them, letter by letter: no wildcards.
    pub fn include(&self, name: &str) -> bool {
        self.0.iter().any(|own| own == name)
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            0 => f.write_str("nobody (no DNS name, no common name)"),
            count @ ..=SHOWN => f.write_str(&self.0[..count].join(", ")),
            count => write!(f, "{} and {} more", self.0[..SHOWN].join(", "), count - SHOWN),
        }
    }
}
