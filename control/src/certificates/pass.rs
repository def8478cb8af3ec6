//! Reads the Secrets, decides, and writes what changes; all of it again when somebody else has written meanwhile.
//!
//! The server's Secret is read after the clients', and a write names the version that was read. So a run that has read
//! a certificate before somebody replaced it can't bring it back: either it has read the clients' Secret before that was
//! written, and its write is a conflict, or it has read the new certificate. And what it wrote before that is a conflict
//! for the others, which then replace it.

use std::time::SystemTime;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::Specification;
use super::certificate::Requirements;
use super::error::CertificatesError;
use super::secret::{Slot, plan_clients, plan_server, plan_tunnels};

/// Attempts while somebody else writes.
const MAX_ATTEMPTS: u32 = 8;

/// Where the Secrets are.
pub(super) trait SecretStore {
    /// A reference to an object that is to own Secrets.
    async fn owner(&mut self, name: &str) -> Result<OwnerReference, CertificatesError>;

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
    let Specification { server, server_names, clients, tunnels, validity, renew_before, owner } = specification;
    let owner = match owner {
        Some(owner) => Some(store.owner(owner).await?),
        None => None,
    };
    let owner = owner.as_ref();
    let found_clients = store.read(clients).await?;
    let found_server = store.read(server).await?;
    let requirements = Requirements { names: server_names, now, validity: *validity, renew_before: *renew_before };
    // Nothing is written if one of them must not be.
    let (bundle, revision) = plan_server(Slot { name: server, present: found_server.as_ref(), owner }, requirements)?;
    let slot = Slot { name: clients, present: found_clients.as_ref(), owner };
    let mut revisions = vec![revision, plan_clients(slot, &bundle)?];
    if let Some(name) = tunnels {
        let found = store.read(name).await?;
        revisions.push(plan_tunnels(Slot { name, present: found.as_ref(), owner })?);
    }
    for revision in revisions.iter().filter(|revision| revision.is_changed) {
        store.write(&revision.secret).await?;
        for line in &revision.changes {
            report(line);
        }
    }
    Ok(revisions.into_iter().flat_map(|revision| revision.kept).collect())
}

#[cfg(test)]
mod tests;
