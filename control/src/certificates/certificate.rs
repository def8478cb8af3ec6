//! The policy server's certificate and key, the defects for which another certificate is made, and that one.
//!
//! It is self-signed, and so its own CA bundle. A new one has the same key and subject, so that each of the two is
//! accepted by a peer that still trusts the other: the Secrets of server and clients needn't change at once.

use std::fmt;
use std::time::{Duration, SystemTime};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, SanType, SerialNumber, date_time_ymd,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;
use x509_parser::time::ASN1Time;

use super::error::CertificatesError;
use super::names::DnsName;

/// Certificates are valid from so long ago, for clocks that are slow.
const CLOCK_TOLERANCE: Duration = Duration::from_hours(1);
/// The subject, an organization: no gateway's name, as a common name would be.
const ORGANIZATION: &str = "vipgate";

/// A certificate and its key, both in PEM.
pub(super) struct CertificatePair {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// Why a certificate is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// There is none, or no key.
    Missing,
    /// It or its key can't be parsed.
    Unreadable,
    /// The key is another certificate's.
    OtherKey,
    /// Somebody else has signed it.
    OtherIssuer,
    /// It has other names.
    OtherNames,
    /// It is valid from this time on, which is later than now.
    NotYetValid(SystemTime),
    /// It ends at this time, which is soon or over.
    Ending(SystemTime),
}

/// What the certificate is to be.
#[derive(Clone, Copy)]
pub(super) struct Requirements<'a> {
    pub(super) names: &'a [DnsName],
    pub(super) now: SystemTime,
    pub(super) validity: Duration,
    pub(super) renew_before: Duration,
}

impl Requirements<'_> {
    /// When a certificate ends that is made now.
    pub(super) fn until(&self) -> SystemTime {
        self.now + self.validity
    }

    /// Examines a certificate and its key, both in PEM; returns its end.
    pub(super) fn examine(&self, certificate: Option<&[u8]>, key: Option<&[u8]>) -> Result<SystemTime, Defect> {
        let (Some(certificate), Some(key)) = (certificate, key) else { return Err(Defect::Missing) };
        let (_, decoded) = parse_x509_pem(certificate).map_err(|_| Defect::Unreadable)?;
        let certificate = decoded.parse_x509().map_err(|_| Defect::Unreadable)?;
        let key = read_key(key).ok_or(Defect::Unreadable)?;
        if key.public_key_raw() != &*certificate.public_key().subject_public_key.data {
            return Err(Defect::OtherKey);
        }
        if !has_signed_itself(&certificate, &key) {
            return Err(Defect::OtherIssuer);
        }
        if !self.are_names_of(&certificate) {
            return Err(Defect::OtherNames);
        }
        let validity = certificate.validity();
        let (from, until) = (system_time(validity.not_before), system_time(validity.not_after));
        if from > self.now {
            return Err(Defect::NotYetValid(from));
        }
        if until < self.now + self.renew_before {
            return Err(Defect::Ending(until));
        }
        Ok(until)
    }

    /// A new certificate of this key, or of a new one if this can't be used.
    pub(super) fn certify(&self, key: Option<&[u8]>) -> Result<CertificatePair, CertificatesError> {
        let (key, pem) = if let Some(kept) = key.and_then(|pem| Some((read_key(pem)?, pem.to_vec()))) {
            kept
        } else {
            let key = KeyPair::generate()?;
            let pem = key.serialize_pem().into_bytes();
            (key, pem)
        };
        let mut params = CertificateParams::default();
        let alternative = self.names.iter().map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)));
        params.subject_alt_names = alternative.collect::<Result<_, rcgen::Error>>()?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, ORGANIZATION);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A client's, too: of the server's own command line.
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        // One derived from the key would be that of the certificate before.
        params.serial_number = Some(serial_number()?);
        params.not_before = date_time_ymd(1970, 1, 1) + since_1970(self.now - CLOCK_TOLERANCE);
        params.not_after = date_time_ymd(1970, 1, 1) + since_1970(self.until());
        let certificate = params.self_signed(&key)?.pem().into_bytes();
        Ok(CertificatePair { certificate, key: pem })
    }

    /// Whether a certificate has these DNS names and no other name.
    fn are_names_of(&self, certificate: &X509Certificate<'_>) -> bool {
        let Ok(Some(alternative)) = certificate.subject_alternative_name() else { return false };
        let found = alternative.value.general_names.iter().map(|name| match name {
            GeneralName::DNSName(name) => Some(*name),
            _ => None,
        });
        let Some(mut found) = found.collect::<Option<Vec<&str>>>() else { return false };
        let mut wanted: Vec<&str> = self.names.iter().map(DnsName::as_str).collect();
        found.sort_unstable();
        wanted.sort_unstable();
        // Common names authenticate gateways, too.
        found == wanted && certificate.subject().iter_common_name().next().is_none()
    }
}

/// A key of the only kind that is made here.
fn read_key(pem: &[u8]) -> Option<KeyPair> {
    KeyPair::from_pkcs8_pem_and_sign_algo(str::from_utf8(pem).ok()?, &PKCS_ECDSA_P256_SHA256).ok()
}

fn has_signed_itself(certificate: &X509Certificate<'_>, key: &KeyPair) -> bool {
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key.public_key_raw());
    certificate.issuer().as_raw() == certificate.subject().as_raw()
        && key.verify(certificate.tbs_certificate.as_ref(), &certificate.signature_value.data).is_ok()
}

fn system_time(time: ASN1Time) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0))
}

/// A positive number of 127 bits.
fn serial_number() -> Result<SerialNumber, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    // Neither negative nor of fewer bytes.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

/// Whole seconds.
fn since_1970(time: SystemTime) -> Duration {
    Duration::from_secs(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// The day of a time, in UTC: `2027-02-25`.
pub(super) fn day(time: SystemTime) -> String {
    (date_time_ymd(1970, 1, 1) + since_1970(time)).date().to_string()
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there was none"),
            Self::Unreadable => f.write_str("the one before was unreadable"),
            Self::OtherKey => f.write_str("the one before had another key"),
            Self::OtherIssuer => f.write_str("somebody else signed the one before"),
            Self::OtherNames => f.write_str("the one before had other names"),
            Self::NotYetValid(from) => write!(f, "the one before is not valid before {}", day(*from)),
            Self::Ending(until) => write!(f, "the one before ends on {}", day(*until)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::Issuer;
    use tokio_rustls::rustls::RootCertStore;
    use tokio_rustls::rustls::client::WebPkiServerVerifier;
    use tokio_rustls::rustls::client::danger::ServerCertVerifier;
    use tokio_rustls::rustls::crypto::ring::default_provider;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};

    use super::super::fixtures::{DAY, names, now};
    use super::*;

    fn requirements(names: &[DnsName], now: SystemTime) -> Requirements<'_> {
        Requirements { names, now, validity: 90 * DAY, renew_before: 30 * DAY }
    }

    /// Whether a client with this bundle accepts a server's certificate for a name.
    fn accepts(bundle: &CertificatePair, server: &CertificatePair, name: &str, now: SystemTime) -> bool {
        let certificate = |pair: &CertificatePair| CertificateDer::from_pem_slice(&pair.certificate).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate(bundle)).unwrap();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), default_provider().into());
        let (name, now) = (ServerName::try_from(name.to_owned()).unwrap(), UnixTime::since_unix_epoch(since_1970(now)));
        verifier.build().unwrap().verify_server_cert(&certificate(server), &[], &name, &[], now).is_ok()
    }

    #[test]
    fn what_is_made_has_no_defect_until_shortly_before_its_end() {
        for set in [&["node-1"][..], &["a.b", "localhost", "a.b.c"], &["10.0.0.1"]] {
            let names = names(set);
            let pair = requirements(&names, now()).certify(None).unwrap();
            let examine = |now| requirements(&names, now).examine(Some(&pair.certificate), Some(&pair.key));
            let until = now() + 90 * DAY;
            assert_eq!(examine(now()), Ok(until));
            assert_eq!(examine(now() + 60 * DAY), Ok(until));
            assert_eq!(examine(now() + 60 * DAY + Duration::from_secs(1)), Err(Defect::Ending(until)));
            assert_eq!(examine(now() + 400 * DAY), Err(Defect::Ending(until)));
            assert!(matches!(examine(now() - DAY), Err(Defect::NotYetValid(_))));
        }
    }

    #[test]
    fn a_renewed_certificate_and_the_one_before_are_accepted_by_those_who_have_either() {
        let names = names(&["policyd.vipgate.svc", "localhost"]);
        let before = requirements(&names, now()).certify(None).unwrap();
        let later = now() + 70 * DAY;
        let renewed = requirements(&names, later).certify(Some(&before.key)).unwrap();
        assert!(renewed.key == before.key && renewed.certificate != before.certificate);
        for (bundle, server) in [(&before, &before), (&before, &renewed), (&renewed, &before), (&renewed, &renewed)] {
            for name in ["policyd.vipgate.svc", "localhost"] {
                assert!(accepts(bundle, server, name, later));
            }
            assert!(!accepts(bundle, server, "other.vipgate.svc", later));
        }
        // Also when the bundle's own time is over.
        let much_later = now() + 140 * DAY;
        assert!(accepts(&before, &renewed, "localhost", much_later));
        assert!(!accepts(&before, &before, "localhost", much_later));
        let other = requirements(&names, later).certify(None).unwrap();
        assert!(!accepts(&before, &other, "localhost", later) && !accepts(&other, &before, "localhost", later));
    }

    #[test]
    fn each_defect_is_found() {
        let (list, one, more) = (names(&["a", "b"]), names(&["a"]), names(&["a", "b", "c"]));
        let good = requirements(&list, now()).certify(None).unwrap();
        let (crt, key) = (Some(&*good.certificate), Some(&*good.key));
        let another = requirements(&list, now()).certify(None).unwrap();
        let examine = |crt, key, names| requirements(names, now()).examine(crt, key).unwrap_err();
        assert_eq!(examine(None, key, &list), Defect::Missing);
        assert_eq!(examine(crt, None, &list), Defect::Missing);
        assert_eq!(examine(Some(b"x"), key, &list), Defect::Unreadable);
        assert_eq!(examine(crt, Some(b"x"), &list), Defect::Unreadable);
        assert_eq!(examine(crt, Some(b"\xff"), &list), Defect::Unreadable);
        assert_eq!(examine(crt, crt, &list), Defect::Unreadable);
        assert_eq!(examine(crt, Some(&another.key), &list), Defect::OtherKey);
        assert_eq!(examine(crt, key, &one), Defect::OtherNames);
        assert_eq!(examine(crt, key, &more), Defect::OtherNames);
        // The order of names is of no importance.
        assert!(requirements(&names(&["b", "a"]), now()).examine(crt, key).is_ok());
    }

    #[test]
    fn a_certificate_that_somebody_else_has_signed_is_replaced_and_its_key_kept() {
        let list = names(&["a"]);
        let own = requirements(&list, now()).certify(None).unwrap();
        let key = read_key(&own.key).unwrap();
        let mut issuer = CertificateParams::default();
        issuer.distinguished_name = DistinguishedName::new();
        issuer.distinguished_name.push(DnType::OrganizationName, ORGANIZATION);
        let mut params = CertificateParams::new(vec!["a".to_owned()]).unwrap();
        params.distinguished_name = issuer.distinguished_name.clone();
        let foreign = params.signed_by(&key, &Issuer::from_params(&issuer, &KeyPair::generate().unwrap())).unwrap();
        let foreign = foreign.pem().into_bytes();
        let examined = requirements(&list, now()).examine(Some(&foreign), Some(&own.key));
        assert_eq!(examined, Err(Defect::OtherIssuer));
        assert!(requirements(&list, now()).certify(Some(&own.key)).unwrap().key == own.key);
        assert!(requirements(&list, now()).certify(Some(b"x")).unwrap().key != own.key);
    }
}
