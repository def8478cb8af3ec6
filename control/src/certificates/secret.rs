//! What becomes of the Secrets: pure, with the Secrets that are there and the time as arguments.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::certificate::{CertificatePair, Defect, Requirements, day};
use super::error::CertificatesError;

/// Keys of a Secret: the CA bundle, the certificate, its key.
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// The key of a secret that isn't a certificate's.
const TUNNEL_SECRET: &str = "secret";
/// Length of a random secret, bytes; in text twice as much.
const RANDOM_BYTES: usize = 32;
/// Types of Secrets.
const TLS: &str = "kubernetes.io/tls";
const OPAQUE: &str = "Opaque";
/// The label of Secrets that may be written.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "vipgate");
/// An annotation of Secrets that cert-manager writes.
const CERT_MANAGER: &str = "cert-manager.io/certificate-name";

/// A Secret as it was found.
#[derive(Clone, Copy)]
pub(super) struct Slot<'a> {
    pub(super) name: &'a str,
    pub(super) present: Option<&'a Secret>,
    /// The object that is to own it.
    pub(super) owner: Option<&'a OwnerReference>,
}

/// What a Secret is to be.
pub(super) struct Revision {
    /// With the resource version of the one that was found.
    pub(super) secret: Secret,
    /// Whether it differs from the one that was found.
    pub(super) is_changed: bool,
    /// What changes, a line each.
    pub(super) changes: Vec<String>,
    /// What is kept, a line each.
    pub(super) kept: Vec<String>,
}

/// The Secret of the policy server, and its CA bundle.
pub(super) fn plan_server(
    slot: Slot<'_>,
    requirements: Requirements<'_>,
) -> Result<(Vec<u8>, Revision), CertificatesError> {
    let mut draft = Draft::new(slot, TLS)?;
    let bundle = draft.ensure_certificate(requirements)?;
    draft.store_bundle(&bundle);
    Ok((bundle, draft.finish()))
}

/// The Secret of the policy server's clients, gateways and agents of nodes: its CA bundle alone, since every node can
/// read it.
pub(super) fn plan_clients(slot: Slot<'_>, bundle: &[u8]) -> Result<Revision, CertificatesError> {
    let mut draft = Draft::new(slot, OPAQUE)?;
    draft.store_bundle(bundle);
    Ok(draft.finish())
}

/// The Secret of the policy servers from which they derive the MAC addresses in nodes' tunnels.
pub(super) fn plan_tunnels(slot: Slot<'_>) -> Result<Revision, CertificatesError> {
    let mut draft = Draft::new(slot, OPAQUE)?;
    draft.ensure_random(TUNNEL_SECRET)?;
    Ok(draft.finish())
}

/// A Secret while it is changed.
struct Draft<'a> {
    slot: Slot<'a>,
    secret: Secret,
    data: BTreeMap<String, ByteString>,
    changes: Vec<String>,
    kept: Vec<String>,
}

impl<'a> Draft<'a> {
    fn new(slot: Slot<'a>, secret_type: &str) -> Result<Self, CertificatesError> {
        let mut secret = match slot.present {
            Some(present) => check(slot.name, present, secret_type).map(|()| present.clone())?,
            None => new_secret(slot.name, secret_type),
        };
        let data = secret.data.take().unwrap_or_default();
        let mut draft = Self { slot, secret, data, changes: Vec::new(), kept: Vec::new() };
        draft.set_owner();
        Ok(draft)
    }

    /// Replaces the reference to an earlier owner of the same name: it was another object.
    fn set_owner(&mut self) {
        let Some(owner) = self.slot.owner else { return };
        let owners = self.secret.metadata.owner_references.get_or_insert_default();
        if owners.contains(owner) {
            return;
        }
        let identity = |it: &OwnerReference| (it.api_version.clone(), it.kind.clone(), it.name.clone());
        owners.retain(|it| identity(it) != identity(owner));
        owners.push(owner.clone());
        if self.slot.present.is_some() {
            self.changes.push(format!("changed owner of {}", title(self.slot.name)));
        }
    }

    fn store_bundle(&mut self, bundle: &[u8]) {
        let before = self.data.insert(CA.to_owned(), ByteString(bundle.to_vec()));
        if before.is_none_or(|before| before.0 != bundle) {
            self.changes.push(format!("stored `{CA}` in {}", title(self.slot.name)));
        }
    }

    /// Replaces the certificate if it or its key has a defect; returns it.
    fn ensure_certificate(&mut self, requirements: Requirements<'_>) -> Result<Vec<u8>, CertificatesError> {
        let part = |key| self.data.get(key).map(|value: &ByteString| &*value.0);
        let (certificate, key) = (part(CERTIFICATE), part(KEY));
        let defect: Defect = match requirements.examine(certificate, key) {
            Ok(until) => {
                self.kept.push(format!("kept certificate of the policy server until {}", day(until)));
                return Ok(certificate.unwrap_or_default().to_vec());
            }
            Err(defect) => defect,
        };
        let CertificatePair { certificate, key } = requirements.certify(key)?;
        self.data.insert(CERTIFICATE.to_owned(), ByteString(certificate.clone()));
        self.data.insert(KEY.to_owned(), ByteString(key));
        let until = day(requirements.until());
        self.changes.push(format!("made certificate of the policy server until {until}: {defect}"));
        Ok(certificate)
    }

    /// Makes a random secret, unless there is one.
    fn ensure_random(&mut self, key: &str) -> Result<(), CertificatesError> {
        let title = title(self.slot.name);
        if self.data.get(key).is_some_and(|value| !value.0.is_empty()) {
            self.kept.push(format!("kept `{key}` of {title}"));
            return Ok(());
        }
        let mut bytes = [0; RANDOM_BYTES];
        getrandom::fill(&mut bytes)?;
        let text = bytes.map(|byte| format!("{byte:02x}")).concat();
        self.data.insert(key.to_owned(), ByteString(text.into_bytes()));
        self.changes.push(format!("made `{key}` of {title}"));
        Ok(())
    }

    fn finish(self) -> Revision {
        let secret = Secret { data: Some(self.data), ..self.secret };
        let is_changed = self.slot.present != Some(&secret);
        Revision { secret, is_changed, changes: self.changes, kept: self.kept }
    }
}

/// A Secret's name in messages.
pub(super) fn title(name: &str) -> String {
    format!("Secret {name}")
}

fn new_secret(name: &str, secret_type: &str) -> Secret {
    let (label, value) = MANAGED_BY;
    let mut secret = Secret { type_: Some(secret_type.to_owned()), ..Secret::default() };
    secret.metadata.name = Some(name.to_owned());
    secret.metadata.labels = Some(BTreeMap::from([(label.to_owned(), value.to_owned())]));
    secret
}

/// Whether a Secret may be written: nobody else's is.
fn check(name: &str, secret: &Secret, secret_type: &str) -> Result<(), CertificatesError> {
    if secret.metadata.deletion_timestamp.is_some() {
        return Err(CertificatesError::BeingDeleted(title(name)));
    }
    let (label, value) = MANAGED_BY;
    let manager = secret.metadata.labels.as_ref().and_then(|labels| labels.get(label));
    let annotations = secret.metadata.annotations.as_ref();
    let found_type = secret.type_.as_deref().unwrap_or_default();
    let problem = if annotations.is_some_and(|annotations| annotations.contains_key(CERT_MANAGER)) {
        "is managed by cert-manager".to_owned()
    } else {
        match manager {
            Some(manager) if manager == value && found_type == secret_type => return Ok(()),
            Some(manager) if manager == value => format!("has type {found_type}, not {secret_type}"),
            Some(manager) => format!("is managed by {manager}"),
            None => format!("isn't managed by vipgate (label {label}: {value})"),
        }
    };
    Err(CertificatesError::Foreign { secret: title(name), problem })
}

#[cfg(test)]
mod tests;
