//! Claims: labels of an address, changed only if they are still what was read (compare-and-swap by their fingerprint).

use std::collections::BTreeMap;

use super::client::{Client, SET_LABELS};
use super::label;
use super::name::NicName;
use super::resource::Address;
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Claim, PublicAddress};

/// Attempts when labels change between read and write.
const MAX_ATTEMPTS: usize = 3;

type Labels = BTreeMap<String, String>;

/// Claims a free address, or replaces a claim of the same cluster.
pub(super) async fn claim(client: &Client, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
    let changed = label::with_claim(&Labels::new(), Some(claim));
    changed.ok_or_else(|| {
        CloudError::new(ErrorKind::Invalid, SET_LABELS.name, "Label", "the claim is too long for labels")
    })?;
    let is_ours = is_attached_by_us(client, address).await?;
    swap(client, &address.id.0, |read| match label::claim_of(&read.labels) {
        Some(found) if found == *claim => Ok(None),
        Some(found) if found.cluster != claim.cluster => {
            Err(in_use(SET_LABELS.name, read, &format!("the cluster {} has claimed it", found.cluster)))
        }
        Some(_) => Ok(label::with_claim(&read.labels, Some(claim))),
        None if read.is_used() && !is_ours => Err(in_use(SET_LABELS.name, read, "something uses it that has no claim")),
        None => match read.status.as_str() {
            "RESERVING" => {
                Err(CloudError::new(ErrorKind::Busy, SET_LABELS.name, "RESERVING", "the address isn't reserved yet"))
            }
            _ => Ok(label::with_claim(&read.labels, Some(claim))),
        },
    })
    .await
}

/// Whether an address is attached where it was observed, by an access config of vipgate's.
async fn is_attached_by_us(client: &Client, address: &PublicAddress) -> Result<bool, CloudError> {
    let Some(nic) = address.attachment.as_ref().filter(|it| it.private.is_some()).and_then(|it| it.nic.as_ref()) else {
        return Ok(false);
    };
    let nic = NicName::parse(SET_LABELS.name, nic)?;
    let instance = client.instance(&nic.zone, &nic.instance).await?;
    let found = instance.as_ref().and_then(|it| it.attachment_of(address.address));
    Ok(found.is_some_and(|(interface, config)| interface.name == nic.nic && config.is_own()))
}

/// Removes a claim of ours. An address that doesn't exist has no claim.
pub(super) async fn unclaim(client: &Client, address: &PublicAddress) -> Result<(), CloudError> {
    let removed = swap(client, &address.id.0, |read| match label::claim_of(&read.labels) {
        None => Ok(None),
        found if found == address.claim => Ok(label::with_claim(&read.labels, None)),
        Some(_) => Err(in_use(SET_LABELS.name, read, "another claim has it")),
    });
    match removed.await {
        Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Reads an address and replaces its labels by those that `change` makes of them, if any.
pub(super) async fn swap(
    client: &Client,
    name: &str,
    change: impl Fn(&Address) -> Result<Option<Labels>, CloudError>,
) -> Result<(), CloudError> {
    let mut attempt = 1;
    loop {
        let read = client.address(name).await?.ok_or_else(|| not_found(SET_LABELS.name, name))?;
        let Some(labels) = change(&read)? else { return Ok(()) };
        match client.set_labels(name, &labels, &read.label_fingerprint).await {
            // 412 conditionNotMet: somebody else's change was first, so look again whose the address is now.
            Err(error) if error.kind == ErrorKind::Conflict && attempt < MAX_ATTEMPTS => attempt += 1,
            result => return result,
        }
    }
}

/// The address with the claim that the caller read: whatever has another one is not ours.
pub(super) fn owned(operation: &'static str, read: &Address, expected: &PublicAddress) -> Result<(), CloudError> {
    match label::claim_of(&read.labels) {
        Some(found) if expected.claim.as_ref() == Some(&found) => Ok(()),
        _ => Err(in_use(operation, read, "its labels don't have the claim")),
    }
}

pub(super) fn in_use(operation: &'static str, address: &Address, text: &str) -> CloudError {
    let user = address.users.first().map_or(String::new(), |user| format!(" (used by {user})"));
    CloudError::new(
        ErrorKind::InUse,
        operation,
        "InUse",
        &format!("{} {}: {text}{user}", address.name, address.address),
    )
}

pub(super) fn not_found(operation: &'static str, name: &str) -> CloudError {
    CloudError::new(ErrorKind::NotFound, operation, "NotFound", &format!("{name} doesn't exist"))
}
