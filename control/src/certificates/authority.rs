//! The CA of gateways and policy server: a self-signed certificate, valid for ten years, and its key.
//!
//! In the last tenth of its life the certificate is renewed with the same key and the same subject, so that what the CA
//! has signed stays valid under both.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber, date_time_ymd,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use x509_parser::certificate::X509Certificate;
use x509_parser::der_parser::asn1_rs::Tag;
use x509_parser::extensions::ParsedExtension;
use x509_parser::pem::parse_x509_pem;
use x509_parser::x509::X509Name;

use super::certificate::{CertificatePair, Validity};
use super::error::{BrokenAuthority, GenerationError};
use super::names::DnsName;

/// How long a CA's certificate is valid: ten years.
pub(super) const VALIDITY: Duration = Duration::from_hours(24 * 3652);
/// Certificates are valid from so long ago, for clocks that are slow.
const CLOCK_TOLERANCE: Duration = Duration::from_hours(1);
/// Longest common name (RFC 5280, `ub-common-name`).
const MAX_COMMON_NAME: usize = 64;
/// The organization in names of certificates. It is no gateway's name, as a common name would be.
const ORGANIZATION: &str = "vipgate";

/// A CA that can sign.
pub(super) struct Authority {
    pub(super) pem: CertificatePair,
    pub(super) validity: Validity,
    key: KeyPair,
    /// The certificate's subject: as DER, and its common name.
    subject: Vec<u8>,
    common_name: String,
    key_id: KeyIdMethod,
}

impl Authority {
    /// Generates a CA.
    pub(super) fn generate(common_name: &str, now: SystemTime) -> Result<Self, GenerationError> {
        let key = KeyPair::generate()?;
        let name: String = common_name.chars().take(MAX_COMMON_NAME).collect();
        let certificate = certify(&name, KeyIdMethod::Sha256, &key, now)?;
        let pem = CertificatePair { certificate, key: key.serialize_pem().into_bytes() };
        Ok(Self::read(&pem.certificate, &pem.key).expect("what was just generated can be read"))
    }

    /// Reads a CA's certificate and key, both in PEM.
    pub(super) fn read(certificate: &[u8], key: &[u8]) -> Result<Self, BrokenAuthority> {
        let (_, decoded) = parse_x509_pem(certificate).map_err(|_| BrokenAuthority::Certificate)?;
        let parsed = decoded.parse_x509().map_err(|_| BrokenAuthority::Certificate)?;
        let may_sign = parsed.key_usage().ok().flatten().is_none_or(|usage| usage.value.key_cert_sign());
        if !parsed.is_ca() || !may_sign {
            return Err(BrokenAuthority::NotCa);
        }
        let pair = str::from_utf8(key).ok().and_then(|text| {
            // Another kind of key is no key here.
            KeyPair::from_pkcs8_pem_and_sign_algo(text, &PKCS_ECDSA_P256_SHA256).ok()
        });
        let pair = pair.ok_or(BrokenAuthority::Key)?;
        if pair.public_key_raw() != &*parsed.public_key().subject_public_key.data {
            return Err(BrokenAuthority::OtherKey);
        }
        let common_name = single_common_name(parsed.subject()).ok_or(BrokenAuthority::Subject)?;
        let key_id = parsed.iter_extensions().find_map(|it| match it.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(KeyIdMethod::PreSpecified(id.0.to_vec())),
            _ => None,
        });
        Ok(Self {
            pem: CertificatePair { certificate: certificate.to_vec(), key: key.to_vec() },
            validity: Validity::of(&parsed),
            subject: parsed.subject().as_raw().to_vec(),
            common_name,
            key_id: key_id.unwrap_or(KeyIdMethod::Sha256),
            key: pair,
        })
    }

    /// Whether its certificate has less than a tenth of its life left, or isn't valid yet.
    pub(super) fn is_due(&self, now: SystemTime) -> bool {
        let Validity { from, until } = self.validity;
        let life = until.duration_since(from).unwrap_or_default();
        from > now || until.duration_since(now).unwrap_or_default() < life / 10
    }

    /// The same CA with a new certificate.
    pub(super) fn renewed(&self, now: SystemTime) -> Result<Self, GenerationError> {
        let certificate = certify(&self.common_name, self.key_id.clone(), &self.key, now)?;
        Ok(Self::read(&certificate, &self.pem.key).expect("what was just generated can be read"))
    }

    /// Whether the CA has signed a certificate. Its validity period isn't looked at.
    pub(super) fn has_signed(&self, certificate: &X509Certificate<'_>) -> bool {
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, self.key.public_key_raw());
        certificate.issuer().as_raw() == self.subject
            && key.verify(certificate.tbs_certificate.as_ref(), &certificate.signature_value.data).is_ok()
    }

    /// A new certificate with a new key, for both sides of a connection, not valid for longer than the CA's.
    pub(super) fn sign(
        &self,
        names: &[&DnsName],
        now: SystemTime,
        validity: Duration,
    ) -> Result<CertificatePair, GenerationError> {
        let mut params = CertificateParams::default();
        // A node may be named like an address; it is a name all the same.
        let alternative = names.iter().map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)));
        params.subject_alt_names = alternative.collect::<Result<_, rcgen::Error>>()?;
        params.distinguished_name = subject(names);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial_number()?);
        set_validity(&mut params, now, (now + validity).min(self.validity.until));
        let key = KeyPair::generate()?;
        let own = authority_params(&self.common_name, self.key_id.clone());
        let certificate = params.signed_by(&key, &Issuer::from_params(&own, &self.key))?;
        Ok(CertificatePair { certificate: certificate.pem().into_bytes(), key: key.serialize_pem().into_bytes() })
    }
}

/// A CA's certificate, in PEM.
fn certify(common_name: &str, key_id: KeyIdMethod, key: &KeyPair, now: SystemTime) -> Result<Vec<u8>, GenerationError> {
    let mut params = authority_params(common_name, key_id);
    // A renewed certificate must not have the serial number of the one before, as one derived from the key would.
    params.serial_number = Some(serial_number()?);
    set_validity(&mut params, now, now + VALIDITY);
    Ok(params.self_signed(key)?.pem().into_bytes())
}

fn authority_params(common_name: &str, key_id: KeyIdMethod) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    params.key_identifier_method = key_id;
    params
}

/// The first name as common name, if it is short enough: a cut one would be another gateway's name.
fn subject(names: &[&DnsName]) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::OrganizationName, ORGANIZATION);
    if let Some(name) = names.first().filter(|name| name.as_str().len() <= MAX_COMMON_NAME) {
        subject.push(DnType::CommonName, name.as_str());
    }
    subject
}

/// The common name, if a name consists of nothing else, encoded as a new certificate would have it.
fn single_common_name(name: &X509Name<'_>) -> Option<String> {
    let mut attributes = name.iter_attributes();
    let only = attributes.next().filter(|_| attributes.next().is_none())?;
    let common = name.iter_common_name().next()?;
    (only.attr_value().tag() == Tag::Utf8String).then(|| common.as_str().ok().map(str::to_owned))?
}

/// A positive number of 127 bits.
fn serial_number() -> Result<SerialNumber, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    // Neither negative nor of fewer bytes.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

/// Sets the validity period, in whole seconds.
fn set_validity(params: &mut CertificateParams, now: SystemTime, until: SystemTime) {
    let since_epoch = |time: SystemTime| {
        Duration::from_secs(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs())
    };
    params.not_before = date_time_ymd(1970, 1, 1) + since_epoch(now - CLOCK_TOLERANCE);
    params.not_after = date_time_ymd(1970, 1, 1) + since_epoch(until);
}
