//! Allocation: creates public addresses, and deletes those that vipgate created.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::claim::{attached_to, in_use, ip_of, used_by};
use super::client::{Client, Condition, DELETE_ADDRESS, PUT_ADDRESS, is_repeatable};
use super::interface::etag;
use super::resource_id::{ResourceId, Type};
use super::{observe, tag};
use crate::error::{CloudError, ErrorKind};
use crate::name;
use crate::provider::{AddressId, Allocation, PublicAddress};

const NAME: &str = PUT_ADDRESS.name;
/// Times that a change is sent when somebody else's was first or no answer came.
const MAX_ATTEMPTS: usize = 2;

/// Allocates an address, or finds the one of the same token: its name is made of the token.
pub(super) async fn allocate(client: &Client, allocation: &Allocation) -> Result<PublicAddress, CloudError> {
    let own = [&allocation.token, &allocation.claim.cluster, &allocation.claim.owner];
    tag::check_values(NAME, own.into_iter().chain(allocation.tags.values()).map(String::as_str))?;
    let name = name::of_allocation(allocation);
    let id = ResourceId::new(&client.subscription, &client.group, Type::PublicAddress, &name);
    let id = id.ok_or_else(|| CloudError::new(ErrorKind::Invalid, NAME, "ResourceId", &name))?;
    let mut found = client.address(&id).await?;
    let mut left = MAX_ATTEMPTS;
    while found.is_none() {
        let body = body_of(client, allocation)?;
        left -= 1;
        match client.put(PUT_ADDRESS, &id, &body, Condition::IfNoneMatch).await {
            // It may be there: by a request whose answer was lost, or by another one with the same token.
            Err(error) if is_repeatable(&error) && left > 0 => {}
            result => result?,
        }
        found = client.address(&id).await?;
        if found.is_none() && left == 0 {
            // It is found by its name at the next attempt.
            return Err(CloudError::new(ErrorKind::Unknown, NAME, "NotSeenYet", &id.to_string()));
        }
    }
    allocated(&id, allocation, &found.unwrap_or_default())
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

fn allocated(id: &ResourceId, allocation: &Allocation, read: &Value) -> Result<PublicAddress, CloudError> {
    let claim = tag::claim(read);
    if tag::get(read, tag::ALLOCATED) != Some(&allocation.token) {
        return Err(in_use(NAME, id, "an address of this name is somebody else's"));
    }
    if claim.as_ref().is_some_and(|claim| *claim != allocation.claim) {
        return Err(in_use(NAME, id, "another claim has it"));
    }
    let address = ip_of(read)
        .ok_or_else(|| CloudError::new(ErrorKind::Busy, NAME, "Updating", "the address isn't allocated yet"))?;
    Ok(PublicAddress {
        id: AddressId::from(id),
        address,
        zone: observe::zone_of(read),
        has_tags: true,
        claim,
        token: Some(allocation.token.clone()),
        attachment: None,
        private: BTreeMap::new(),
        version: etag(read).to_owned(),
    })
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
        match client.delete(DELETE_ADDRESS, &id, etag(&read)).await {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
            Err(error) if is_repeatable(&error) && left > 0 => {}
            result => return result,
        }
    }
}
