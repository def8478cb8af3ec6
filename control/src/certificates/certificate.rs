//! A certificate with its key, and the defects for which another one is made.

use std::fmt;
use std::time::{Duration, SystemTime};

use rcgen::{KeyPair, date_time_ymd};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;
use x509_parser::time::ASN1Time;

use super::authority::Authority;
use super::names::DnsName;

/// A certificate and its key, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct CertificatePair {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// When a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Validity {
    pub(super) from: SystemTime,
    pub(super) until: SystemTime,
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
    /// This CA hasn't signed it.
    OtherAuthority,
    /// It has other names.
    OtherNames,
    /// It is valid from this time on, which is later than now.
    NotYetValid(SystemTime),
    /// It ends at this time, which is soon or over.
    Ending(SystemTime),
}

/// What a certificate is to be.
#[derive(Clone, Copy)]
pub(super) struct Requirements<'a> {
    pub(super) authority: &'a Authority,
    pub(super) now: SystemTime,
    pub(super) validity: Duration,
    pub(super) renew_before: Duration,
}

impl Validity {
    pub(super) fn of(certificate: &X509Certificate<'_>) -> Self {
        let time = |time: ASN1Time| {
            let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
            SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
        };
        let validity = certificate.validity();
        Self { from: time(validity.not_before), until: time(validity.not_after) }
    }
}

impl Requirements<'_> {
    /// Examines a certificate and its key, both in PEM; returns its end.
    pub(super) fn examine(
        &self,
        certificate: Option<&[u8]>,
        key: Option<&[u8]>,
        names: &[&DnsName],
    ) -> Result<SystemTime, Defect> {
        let (Some(certificate), Some(key)) = (certificate, key) else { return Err(Defect::Missing) };
        let (_, decoded) = parse_x509_pem(certificate).map_err(|_| Defect::Unreadable)?;
        let certificate = decoded.parse_x509().map_err(|_| Defect::Unreadable)?;
        let key = str::from_utf8(key).ok().and_then(|key| KeyPair::from_pem(key).ok()).ok_or(Defect::Unreadable)?;
        if key.public_key_raw() != &*certificate.public_key().subject_public_key.data {
            return Err(Defect::OtherKey);
        }
        if !self.authority.has_signed(&certificate) {
            return Err(Defect::OtherAuthority);
        }
        if !has_names(&certificate, names) {
            return Err(Defect::OtherNames);
        }
        let Validity { from, until } = Validity::of(&certificate);
        if from > self.now {
            return Err(Defect::NotYetValid(from));
        }
        // Another one would not end later than the CA's.
        let renewed_until = (self.now + self.validity).min(self.authority.validity.until);
        if until < self.now + self.renew_before && until < renewed_until {
            return Err(Defect::Ending(until));
        }
        Ok(until)
    }
}

/// Whether a certificate has these DNS names and no other name.
fn has_names(certificate: &X509Certificate<'_>, names: &[&DnsName]) -> bool {
    let Ok(Some(alternative)) = certificate.subject_alternative_name() else { return false };
    let found = alternative.value.general_names.iter().map(|name| match name {
        GeneralName::DNSName(name) => Some(*name),
        _ => None,
    });
    let Some(mut found) = found.collect::<Option<Vec<&str>>>() else { return false };
    let mut wanted: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
    found.sort_unstable();
    wanted.sort_unstable();
    // Common names authenticate gateways, too.
    let mut common = certificate.subject().iter_common_name().map(|name| name.as_str().ok());
    found == wanted && common.all(|name| name.is_some_and(|name| wanted.contains(&name)))
}

/// The day of a time, in UTC: `2027-02-25`.
pub(super) fn day(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    (date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)).date().to_string()
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there was none"),
            Self::Unreadable => f.write_str("the one before was unreadable"),
            Self::OtherKey => f.write_str("the one before had another key"),
            Self::OtherAuthority => f.write_str("another CA signed the one before"),
            Self::OtherNames => f.write_str("the one before had other names"),
            Self::NotYetValid(from) => write!(f, "the one before is not valid before {}", day(*from)),
            Self::Ending(until) => write!(f, "the one before ends on {}", day(*until)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{DAY, names, now};
    use super::*;

    #[test]
    fn what_the_ca_signs_has_no_defect_until_shortly_before_its_end() {
        let authority = Authority::generate("ca", now()).unwrap();
        let requirements =
            Requirements { authority: &authority, now: now(), validity: 90 * DAY, renew_before: 30 * DAY };
        for set in [&["node-1"][..], &["a.b", "localhost", "a.b.c"], &["10.0.0.1"], &[&long()]] {
            let names = names(set);
            let names: Vec<&DnsName> = names.iter().collect();
            let pair = authority.sign(&names, now(), 90 * DAY).unwrap();
            let examine =
                |now| Requirements { now, ..requirements }.examine(Some(&pair.certificate), Some(&pair.key), &names);
            let until = now() + 90 * DAY;
            assert_eq!(examine(now()), Ok(until));
            assert_eq!(examine(now() + 60 * DAY), Ok(until));
            assert_eq!(examine(now() + 60 * DAY + Duration::from_secs(1)), Err(Defect::Ending(until)));
            assert_eq!(examine(now() + 400 * DAY), Err(Defect::Ending(until)));
            assert!(matches!(examine(now() - DAY), Err(Defect::NotYetValid(_))));
        }
    }

    /// A gateway's name of more characters than a common name may have.
    fn long() -> String {
        ["x".repeat(60), "y".repeat(60)].join(".")
    }

    #[test]
    fn a_name_that_is_too_long_for_a_common_name_has_none() {
        let authority = Authority::generate("ca", now()).unwrap();
        let common_names = |name: &str| {
            let names = names(&[name]);
            let pair = authority.sign(&[&names[0]], now(), DAY).unwrap();
            let (_, decoded) = parse_x509_pem(&pair.certificate).unwrap();
            let parsed = decoded.parse_x509().unwrap();
            parsed.subject().iter_common_name().map(|it| it.as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(common_names("node-1"), ["node-1"]);
        assert!(common_names(&long()).is_empty());
    }

    #[test]
    fn each_defect_is_found() {
        let (authority, other) = (Authority::generate("ca", now()).unwrap(), Authority::generate("ca", now()).unwrap());
        let requirements =
            Requirements { authority: &authority, now: now(), validity: 90 * DAY, renew_before: 30 * DAY };
        let list = names(&["a", "b"]);
        let both: Vec<&DnsName> = list.iter().collect();
        let good = authority.sign(&both, now(), 90 * DAY).unwrap();
        let (crt, key) = (Some(&*good.certificate), Some(&*good.key));
        let foreign = other.sign(&both, now(), 90 * DAY).unwrap();
        let another = authority.sign(&both, now(), 90 * DAY).unwrap();
        let examine = |crt, key, names: &[&DnsName]| requirements.examine(crt, key, names).unwrap_err();
        assert_eq!(examine(None, key, &both), Defect::Missing);
        assert_eq!(examine(crt, None, &both), Defect::Missing);
        assert_eq!(examine(Some(b"x"), key, &both), Defect::Unreadable);
        assert_eq!(examine(crt, Some(b"x"), &both), Defect::Unreadable);
        assert_eq!(examine(crt, Some(b"\xff"), &both), Defect::Unreadable);
        assert_eq!(examine(crt, crt, &both), Defect::Unreadable);
        assert_eq!(examine(crt, Some(&another.key), &both), Defect::OtherKey);
        assert_eq!(examine(Some(&foreign.certificate), Some(&foreign.key), &both), Defect::OtherAuthority);
        assert_eq!(examine(crt, key, &both[..1]), Defect::OtherNames);
        let more = names(&["a", "b", "c"]);
        assert_eq!(examine(crt, key, &more.iter().collect::<Vec<_>>()), Defect::OtherNames);
        // The order of names is of no importance.
        assert!(requirements.examine(crt, key, &[both[1], both[0]]).is_ok());
    }

    #[test]
    fn a_certificate_does_not_outlive_its_ca_and_is_not_renewed_in_vain() {
        let authority = Authority::generate("ca", now()).unwrap();
        let late = authority.validity.until - 20 * DAY;
        let list = names(&["a"]);
        let pair = authority.sign(&[&list[0]], late, 90 * DAY).unwrap();
        let requirements =
            Requirements { authority: &authority, now: late, validity: 90 * DAY, renew_before: 30 * DAY };
        let found = requirements.examine(Some(&pair.certificate), Some(&pair.key), &[&list[0]]);
        assert_eq!(found, Ok(authority.validity.until));
    }
}
