//! Allocation: reserves addresses, and releases those that vipgate reserved.
//!
//! Labels can't be set when an address is created. So its name is made of the token, and its description has it: after a
//! failure between the two requests, the next attempt with the same token finds the address and labels it.

use super::claim::{in_use, swap};
use super::client::{Client, DELETE, INSERT};
use super::label;
use crate::error::{CloudError, ErrorKind};
use crate::name;
use crate::provider::{Allocation, PublicAddress};

/// Allocates an address, or finds the one of the same token.
pub(super) async fn allocate(client: &Client, allocation: &Allocation) -> Result<(), CloudError> {
    let error = |code: &str, text: &str| CloudError::new(ErrorKind::Invalid, INSERT.name, code, text);
    if allocation.is_ipv6 {
        return Err(error("Ipv6", "external IPv6 addresses can't be attached to a NIC as access configs"));
    }
    if let Some((key, value)) = allocation.tags.iter().find(|(key, value)| !label::is_label(key, value)) {
        return Err(error("Label", &format!("{key}={value} can't be a label")));
    }
    let labels = label::allocated(&allocation.tags, &allocation.claim, &allocation.token)
        .ok_or_else(|| error("Label", "the claim or the token is too long for labels"))?;
    let name = name::of_allocation(allocation);
    let description = format!("Allocated by vipgate, token {}", allocation.token);
    match client.insert(&name, &description).await {
        // 409 alreadyExists: an attempt before was successful until here.
        Err(error) if error.kind != ErrorKind::Conflict => return Err(error),
        _ => {}
    }
    swap(client, &name, |read| match label::token_of(&read.labels) {
        Some(token) if token == allocation.token => match label::claim_of(&read.labels) {
            Some(claim) if claim == allocation.claim => Ok(None),
            Some(_) => Err(in_use(INSERT.name, read, "another claim has it")),
            // Another server gave it up, which didn't have this allocation yet.
            None if !read.is_used() => Ok(label::with_claim(&read.labels, Some(&allocation.claim))),
            None => Err(in_use(INSERT.name, read, "something uses it that has no claim")),
        },
        None if read.description == description && label::claim_of(&read.labels).is_none() => Ok(Some(labels.clone())),
        _ => Err(in_use(INSERT.name, read, "an address of this name is somebody else's")),
    })
    .await
}

/// Releases an address that vipgate allocated.
pub(super) async fn release(client: &Client, address: &PublicAddress) -> Result<(), CloudError> {
    let Some(read) = client.address(&address.id.0).await? else { return Ok(()) };
    if label::token_of(&read.labels).is_none() {
        return Err(CloudError::new(
            ErrorKind::Denied,
            DELETE.name,
            "NotAllocated",
            "vipgate didn't allocate this address",
        ));
    }
    let claim = label::claim_of(&read.labels);
    if claim.is_some() && claim != address.claim {
        return Err(in_use(DELETE.name, &read, "another claim has it"));
    }
    if read.is_used() {
        return Err(in_use(DELETE.name, &read, "it is attached"));
    }
    match client.delete(&read.name).await {
        Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
