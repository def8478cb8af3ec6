//! Peer authentication by certificate pinning: each process generates a key and a self-signed certificate, and reports
//! its fingerprint to the policy server; the membership view maps fingerprints to gateways. There is no CA: a
//! certificate is valid while the view contains its fingerprint. Its validity period and names are ignored.
//!
//! A process leaves its key to the next one on its host, which uses it as long as the view has no certificate of its own:
//! so a restarted gateway is known while the server is away.

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

/// Subject name of all certificates. Not verified: the fingerprint identifies the gateway.
pub(super) const CERTIFICATE_NAME: &str = "vipgate-peer";

/// The SHA-256 hash of a certificate in DER form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// The fingerprint of a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, certificate).as_ref());
        Self(bytes)
    }

    /// From the bytes of a message; `None` unless there are 32 of them.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Errors when generating or using a certificate.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// Key or certificate generation failed, most likely for lack of random numbers.
    #[error("cannot generate the certificate for peer links: {0}")]
    Generation(#[from] rcgen::Error),
    /// TLS rejects the certificate or key.
    #[error("cannot use the certificate for peer links: {0}")]
    Tls(#[from] Error),
}

/// Certificate and key of a process. Outside of processes they are only where the process secret is.
#[derive(Debug)]
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

/// The certificates of this gateway.
#[derive(Debug)]
pub struct Identities {
    own: Identity,
    /// Of a predecessor.
    inherited: Option<Identity>,
}

impl Identities {
    /// This process's certificate, and one that a predecessor has left.
    pub fn new(own: Identity, inherited: Option<Identity>) -> Self {
        Self { own, inherited }
    }

    /// The certificate of this process.
    pub fn own(&self) -> &Identity {
        &self.own
    }

    /// The certificate of a predecessor.
    pub(super) fn inherited(&self) -> Option<&Identity> {
        self.inherited.as_ref()
    }

    /// The certificate to present under a view with this fingerprint of this gateway.
    pub fn presented(&self, named: Option<Fingerprint>) -> &Identity {
        self.inherited().filter(|it| Some(it.fingerprint()) == named).unwrap_or(&self.own)
    }
}

impl Identity {
    /// Generates a key and a self-signed certificate.
    ///
    /// # Errors
    /// When no random numbers are available.
    pub fn generate() -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![CERTIFICATE_NAME.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, CERTIFICATE_NAME);
        let certificate = params.self_signed(&key)?.der().clone();
        Ok(Self { certificate, key: PrivatePkcs8KeyDer::from(key.serialize_der()).into() })
    }

    /// Loads what [`Identity::certificate`] and [`Identity::key`] have returned.
    ///
    /// # Errors
    /// When TLS can't use the certificate with this key.
    pub fn load(certificate: Vec<u8>, key: Vec<u8>) -> Result<Self, IdentityError> {
        let identity = Self { certificate: certificate.into(), key: PrivatePkcs8KeyDer::from(key).into() };
        identity.server_config(Arc::default())?;
        Ok(identity)
    }

    /// The certificate in DER form.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// The key as PKCS #8, for the session state directory only.
    pub fn key(&self) -> &[u8] {
        self.key.secret_der()
    }

    /// The fingerprint that peers pin.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    /// TLS configuration for accepting peers: `pins` is consulted at each handshake.
    pub(super) fn server_config(&self, pins: Arc<Pins>) -> Result<ServerConfig, IdentityError> {
        let provider = Arc::new(provider::default_provider());
        let verifier = Arc::new(PinnedVerifier::new(pins, None, &provider));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        // A resumed connection presents no certificate, so the removal of a pin would go unnoticed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// TLS configuration for connecting to the gateway with this name.
    pub(super) fn client_config(&self, pins: Arc<Pins>, name: &Arc<str>) -> Result<ClientConfig, IdentityError> {
        let provider = Arc::new(provider::default_provider());
        let verifier = Arc::new(PinnedVerifier::new(pins, Some(name.clone()), &provider));
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// PinnedVerifier fingerprints by gateway name, from the current view.
#[derive(Debug, Default)]
pub(super) struct Pins(ArcSwap<BTreeMap<Arc<str>, Fingerprint>>);

impl Pins {
    /// Replaces all pins.
    pub(super) fn set(&self, pins: BTreeMap<Arc<str>, Fingerprint>) {
        self.0.store(Arc::new(pins));
    }

    /// The pinned fingerprint of a gateway.
    pub(super) fn fingerprint_of(&self, name: &str) -> Option<Fingerprint> {
        self.0.load().get(name).copied()
    }

    /// The gateway that a fingerprint is pinned for.
    pub(super) fn owner(&self, fingerprint: Fingerprint) -> Option<Arc<str>> {
        self.0.load().iter().find(|(_, pinned)| **pinned == fingerprint).map(|(name, _)| name.clone())
    }
}

/// TLS verifier that accepts only pinned certificates: of one gateway, or of any.
#[derive(Debug)]
struct PinnedVerifier {
    pins: Arc<Pins>,
    only: Option<Arc<str>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PinnedVerifier {
    fn new(pins: Arc<Pins>, only: Option<Arc<str>>, provider: &CryptoProvider) -> Self {
        Self { pins, only, algorithms: provider.signature_verification_algorithms }
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let presented = Fingerprint::of(certificate);
        let is_pinned = match &self.only {
            Some(name) => self.pins.fingerprint_of(name) == Some(presented),
            None => self.pins.owner(presented).is_some(),
        };
        if is_pinned { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }
}

impl ServerCertVerifier for PinnedVerifier {
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

impl ClientCertVerifier for PinnedVerifier {
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
