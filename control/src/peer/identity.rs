//! Who is who among gateways: each process makes itself a key and a certificate, and tells the policy server its fingerprint; the
//! view says which fingerprint is whose. No authority signs anything: a certificate counts while the view names it, and its dates
//! and names don't matter.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rcgen::{CertificateParams, DnType, KeyPair};
use ring::digest::{SHA256, digest};
use thiserror::Error;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring as provider, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::NoServerSessionStorage;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
};

/// The name in certificates, which nobody looks at: the fingerprint says whose one is.
pub(super) const NAME: &str = "vipgate-peer";

/// What a certificate is known by: the SHA-256 of its DER form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// A certificate's.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, certificate).as_ref());
        Self(bytes)
    }

    /// From the bytes of a message; `None` if they aren't 32.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A certificate that can't be made or used.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// No key, most likely for want of random numbers.
    #[error("no certificate for links to other gateways can be made: {0}")]
    Made(#[from] rcgen::Error),
    /// TLS doesn't want it.
    #[error("the certificate for links to other gateways can't be used: {0}")]
    Used(#[from] Error),
}

/// This process's certificate and key. It is never written anywhere.
#[derive(Debug)]
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    /// A new one.
    ///
    /// # Errors
    /// When there are no random numbers.
    pub fn generate() -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![NAME.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, NAME);
        let certificate = params.self_signed(&key)?.der().clone();
        Ok(Self { certificate, key: PrivatePkcs8KeyDer::from(key.serialize_der()).into() })
    }

    /// What others know it by.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    /// How to let others in: whom `pins` names at that moment.
    pub(super) fn server(&self, pins: Arc<Pins>) -> Result<ServerConfig, IdentityError> {
        let provider = Arc::new(provider::default_provider());
        let verifier = Arc::new(Pinned::new(pins, None, &provider));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        // A resumed connection shows no certificate: a pin that went away would not be missed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// How to connect to the gateway of this name.
    pub(super) fn client(&self, pins: Arc<Pins>, name: &Arc<str>) -> Result<ClientConfig, IdentityError> {
        let provider = Arc::new(provider::default_provider());
        let verifier = Arc::new(Pinned::new(pins, Some(name.clone()), &provider));
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// The fingerprints of the current view.
#[derive(Debug, Default)]
pub(super) struct Pins(ArcSwap<BTreeMap<Arc<str>, Fingerprint>>);

impl Pins {
    /// Others count from now on.
    pub(super) fn set(&self, pins: BTreeMap<Arc<str>, Fingerprint>) {
        self.0.store(Arc::new(pins));
    }

    /// The fingerprint of a gateway.
    pub(super) fn of(&self, name: &str) -> Option<Fingerprint> {
        self.0.load().get(name).copied()
    }

    /// Whose a fingerprint is.
    pub(super) fn owner(&self, fingerprint: Fingerprint) -> Option<Arc<str>> {
        self.0.load().iter().find(|(_, pinned)| **pinned == fingerprint).map(|(name, _)| name.clone())
    }
}

/// Accepts certificates that are pinned: of one gateway, or of any.
#[derive(Debug)]
struct Pinned {
    pins: Arc<Pins>,
    only: Option<Arc<str>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Pinned {
    fn new(pins: Arc<Pins>, only: Option<Arc<str>>, provider: &CryptoProvider) -> Self {
        Self { pins, only, algorithms: provider.signature_verification_algorithms }
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let shown = Fingerprint::of(certificate);
        let known = match &self.only {
            Some(name) => self.pins.of(name) == Some(shown),
            None => self.pins.owner(shown).is_some(),
        };
        if known { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
