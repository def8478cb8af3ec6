//! Claims: tags of an address, replaced only if the address is still what was read (its etag), so that of two claims one fails.
//! Tags can also be changed alone (`PublicIPAddresses_UpdateTags`), but not under that condition.

use std::net::IpAddr;

use serde_json::Value;

use super::client::{Client, PUT_ADDRESS};
use super::resource_id::{ResourceId, configuration_name};
use super::tag;
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Claim, PublicAddress};

const NAME: &str = PUT_ADDRESS.name;

/// Claims a free address, or replaces a claim of the same cluster.
pub(super) async fn claim(client: &Client, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
    tag::check_values(NAME, [claim.cluster.as_str(), claim.owner.as_str()])?;
    let id = ResourceId::of_address(NAME, &address.id)?;
    let changed = client.change(&id, None, |read: &mut Value| {
        match tag::claim(read) {
            Some(found) if found == *claim => return Ok(false),
            Some(found) if found.cluster != claim.cluster => {
                let text = format!("the cluster {} has claimed it", found.cluster);
                return Err(in_use(NAME, &id, &text));
            }
            None if is_foreign(&id, read) => return Err(used_by(NAME, &id, read)),
            Some(_) | None => {}
        }
        tag::set_claim(read, Some(claim));
        Ok(true)
    });
    changed.await?.ok_or_else(|| not_found(NAME, &id))
}

/// Removes a claim of ours. An address that doesn't exist has no claim.
pub(super) async fn unclaim(client: &Client, address: &PublicAddress) -> Result<(), CloudError> {
    let id = ResourceId::of_address(NAME, &address.id)?;
    let changed = client.change(&id, None, |read: &mut Value| {
        match tag::claim(read) {
            None => return Ok(false),
            Some(found) if found.cluster == client.cluster => tag::set_claim(read, None),
            Some(found) => return Err(in_use(NAME, &id, &format!("the cluster {} has claimed it", found.cluster))),
        }
        Ok(true)
    });
    changed.await.map(drop)
}

/// Fails unless our cluster has claimed an address.
pub(super) fn check_owned(
    client: &Client,
    operation: &'static str,
    id: &ResourceId,
    read: &Value,
) -> Result<(), CloudError> {
    match tag::claim(read) {
        Some(claim) if claim.cluster == client.cluster => Ok(()),
        _ => Err(in_use(operation, id, "its tags don't have the claim")),
    }
}

/// Id of what an address is attached to: an IP configuration of a NIC, a frontend of a load balancer, a NAT gateway.
pub(super) fn attached_to(address: &Value) -> Option<&str> {
    let properties = &address["properties"];
    properties["ipConfiguration"]["id"].as_str().or_else(|| properties["natGateway"]["id"].as_str())
}

/// Whether an address is attached, but not to the IP configuration that vipgate makes for it.
fn is_foreign(id: &ResourceId, address: &Value) -> bool {
    let is_bound = |user: &str| {
        let name = ResourceId::parse_configuration(user).map(|(_, name)| name);
        name.is_some_and(|name| name.eq_ignore_ascii_case(&configuration_name(id)))
    };
    attached_to(address).is_some_and(|user| !is_bound(user))
}

/// The address; `None`: it has none yet.
pub(super) fn ip_of(address: &Value) -> Option<IpAddr> {
    address["properties"]["ipAddress"].as_str()?.parse().ok()
}

pub(super) fn in_use(operation: &'static str, id: &ResourceId, text: &str) -> CloudError {
    CloudError::new(ErrorKind::InUse, operation, "InUse", &format!("{}: {text}", id.name))
}

/// An address that something else uses.
pub(super) fn used_by(operation: &'static str, id: &ResourceId, read: &Value) -> CloudError {
    in_use(operation, id, &format!("it is attached to {}", attached_to(read).unwrap_or("something else")))
}

pub(super) fn not_found(operation: &'static str, id: &ResourceId) -> CloudError {
    CloudError::new(ErrorKind::NotFound, operation, "NotFound", &format!("{id} doesn't exist"))
}
