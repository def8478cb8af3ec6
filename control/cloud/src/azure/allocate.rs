//! Allocation: creates public addresses, and deletes those that vipgate created.

use hyper::header::{IF_MATCH, IF_NONE_MATCH};
use serde_json::{Value, json};

use super::claim::{attached_to, in_use, used_by};
use super::client::{Client, DELETE_ADDRESS, PUT_ADDRESS, is_repeatable};
use super::interface::etag;
use super::resource_id::{ResourceId, Type};
use super::tag;
use crate::error::{CloudError, ErrorKind};
use crate::name;
use crate::provider::{Allocation, PublicAddress};

const NAME: &str = PUT_ADDRESS.name;
/// Times that a change is sent when somebody else's was first or no answer came.
const MAX_ATTEMPTS: usize = 2;

/// Allocates an address, or finds the one of the same token: its name is made of the token.
pub(super) async fn allocate(client: &Client, allocation: &Allocation) -> Result<(), CloudError> {
    let own = [&allocation.token, &allocation.claim.cluster, &allocation.claim.owner];
    tag::check_values(NAME, own.into_iter().chain(allocation.tags.values()).map(String::as_str))?;
    let name = name::of_allocation(allocation);
    let id = ResourceId::new(&client.subscription, &client.group, Type::PublicAddress, &name);
    let id = id.ok_or_else(|| CloudError::new(ErrorKind::Invalid, NAME, "ResourceId", &name))?;
    let mut left = MAX_ATTEMPTS;
    loop {
        if let Some(read) = client.address(&id).await? {
            return check_allocated(&id, allocation, &read);
        }
        left -= 1;
        let body = body_of(client, allocation)?;
        match client.write(PUT_ADDRESS, &id, Some(&body), (IF_NONE_MATCH, "*")).await {
            // It may be there: by a request whose answer was lost, or by another one with the same token.
            Err(error) if is_repeatable(&error) && left > 0 => {}
            result => return result,
        }
    }
}

fn body_of(client: &Client, allocation: &Allocation) -> Result<Value, CloudError> {
    let location = client.location.get().ok_or_else(|| {
        let text = "the region is unknown: no gateway's NIC has been read, and `location` isn't set";
        CloudError::new(ErrorKind::Unavailable, NAME, "NoLocation", text)
    })?;
    let mut body = json!({
        "location": location,
        "sku": { "name": "Standard" },
        "tags": allocation.tags,
        "properties": {
            "publicIPAllocationMethod": "Static",
            "publicIPAddressVersion": if allocation.is_ipv6 { "IPv6" } else { "IPv4" },
        },
    });
    tag::set_claim(&mut body, Some(&allocation.claim));
    tag::set(&mut body, tag::ALLOCATED, Some(&allocation.token));
    if let Some(zone) = &allocation.zone {
        body["zones"] = json!([zone]);
    }
    Ok(body)
}

/// Fails if an address isn't the one that is to be allocated, or another claim has it.
fn check_allocated(id: &ResourceId, allocation: &Allocation, read: &Value) -> Result<(), CloudError> {
    if tag::get(read, tag::ALLOCATED) != Some(&allocation.token) {
        return Err(in_use(NAME, id, "an address of this name is somebody else's"));
    }
    if tag::claim(read).is_some_and(|claim| claim != allocation.claim) {
        return Err(in_use(NAME, id, "another claim has it"));
    }
    Ok(())
}

/// Releases an address that vipgate allocated.
pub(super) async fn release(client: &Client, address: &PublicAddress) -> Result<(), CloudError> {
    const NAME: &str = DELETE_ADDRESS.name;
    let id = ResourceId::of_address(NAME, &address.id)?;
    let mut left = MAX_ATTEMPTS;
    loop {
        let Some(read) = client.address(&id).await? else { return Ok(()) };
        if tag::get(&read, tag::ALLOCATED).is_none() {
            let text = "vipgate didn't allocate this address";
            return Err(CloudError::new(ErrorKind::Denied, NAME, "NotAllocated", text));
        }
        let claim = tag::claim(&read);
        if claim.is_some() && claim != address.claim {
            return Err(in_use(NAME, &id, "another claim has it"));
        }
        if attached_to(&read).is_some() {
            return Err(used_by(NAME, &id, &read));
        }
        left -= 1;
        match client.write(DELETE_ADDRESS, &id, None, (IF_MATCH, etag(&read))).await {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
            Err(error) if is_repeatable(&error) && left > 0 => {}
            result => return result,
        }
    }
}
