//! Reads the Secrets, decides, and writes what changes; all of it again when somebody else has written meanwhile.
//!
//! The CA is read after the other Secrets, and a write names the version that was read. So a run that has read a CA
//! before somebody replaced it can't overwrite what was signed by the new one: either it has read the other Secrets
//! before these were written, and its write is a conflict, or it has read the new CA. And what it wrote before they were
//! written is a conflict for the others, which then replace it.

use std::time::SystemTime;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::certificate::Requirements;
use super::error::CertificatesError;
use super::secret::{Slot, plan, plan_ca};
use super::{Owner, Specification};

/// Attempts while somebody else writes.
const MAX_ATTEMPTS: u32 = 8;

/// Where the Secrets are.
pub(super) trait SecretStore {
    /// A reference to an object that is to own Secrets.
    async fn owner(&mut self, owner: &Owner) -> Result<OwnerReference, CertificatesError>;

    /// Reads a Secret with a quorum; `None`: there is none.
    async fn read(&mut self, name: &str) -> Result<Option<Secret>, CertificatesError>;

    /// Replaces the Secret of its resource version, or creates it if it has none.
    async fn write(&mut self, secret: &Secret) -> Result<(), WriteError>;
}

/// Why a write has failed.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The Secret isn't the one that was read.
    Conflict,
    /// It was refused, or there was no response.
    Failed(CertificatesError),
}

impl<E: Into<CertificatesError>> From<E> for WriteError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Makes and renews what is missing or due; reports what is done, a line each.
pub(super) async fn run(
    store: &mut impl SecretStore,
    specification: &Specification,
    now: SystemTime,
    report: &mut impl FnMut(&str),
) -> Result<(), CertificatesError> {
    for _ in 0..MAX_ATTEMPTS {
        match attempt(store, specification, now, report).await {
            Ok(kept) => {
                for line in &kept {
                    report(line);
                }
                return Ok(());
            }
            Err(WriteError::Failed(error)) => return Err(error),
            Err(WriteError::Conflict) => {}
        }
    }
    Err(CertificatesError::Conflicts(MAX_ATTEMPTS))
}

/// Returns the lines about what is kept.
async fn attempt(
    store: &mut impl SecretStore,
    specification: &Specification,
    now: SystemTime,
    report: &mut impl FnMut(&str),
) -> Result<Vec<String>, WriteError> {
    let common = specification.owner();
    let common_reference = read_owner(store, common.as_ref()).await?;
    let mut found = Vec::new();
    for wanted in specification.secrets() {
        let owner = if wanted.owner == common {
            common_reference.clone()
        } else {
            read_owner(store, wanted.owner.as_ref()).await?
        };
        let present = store.read(&wanted.name).await?;
        found.push((wanted, owner, present));
    }
    let ca = store.read(&specification.ca).await?;
    let slot = Slot { name: &specification.ca, present: ca.as_ref(), owner: common_reference.as_ref() };
    let (authority, revision) = plan_ca(slot, now)?;
    let Specification { validity, renew_before, .. } = *specification;
    let requirements = Requirements { authority: &authority, now, validity, renew_before };
    // Nothing is written if one of them must not be.
    let mut revisions = vec![revision];
    for (wanted, owner, present) in &found {
        let slot = Slot { name: &wanted.name, present: present.as_ref(), owner: owner.as_ref() };
        revisions.push(plan(slot, wanted.subjects, requirements)?);
    }
    for revision in revisions.iter().filter(|revision| revision.is_changed) {
        store.write(&revision.secret).await?;
        for line in &revision.changes {
            report(line);
        }
    }
    Ok(revisions.into_iter().flat_map(|revision| revision.kept).collect())
}

async fn read_owner(
    store: &mut impl SecretStore,
    owner: Option<&Owner>,
) -> Result<Option<OwnerReference>, CertificatesError> {
    match owner {
        Some(owner) => store.owner(owner).await.map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests;
