//! Gives private addresses of VIPs back: they are unassigned first, and their tags are deleted then.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::query::{filters, list, one, tags as tag_parameters};
use super::reply::{Address, DescribeAddresses, NetworkInterface};
use super::{Aws, DELETE_TAGS, DESCRIBE_ADDRESSES, UNASSIGN_PRIVATE, describe, tags};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Associate, Binding, Nic, NicId, PublicAddress};

pub(super) async fn unprepare(aws: &Aws, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
    let v4: Vec<&Binding> = bindings.iter().filter(|binding| binding.address.has_tags).collect();
    if v4.is_empty() || aws.config.associate == Associate::Instance {
        return Ok(());
    }
    let addresses: Vec<PublicAddress> = v4.iter().map(|binding| binding.address.clone()).collect();
    let (interface, current) = tokio::join!(describe::interface(aws, &nic.id), describe::addresses(aws, &addresses));
    let (interface, current) = (interface?, current?);
    let is_bound = |binding: &&&Binding| {
        let current = current.get(&binding.address.id);
        current.is_some_and(|current| tags::private(current).get(&nic.id) == Some(&binding.private))
    };
    let (mut free, mut bound_twice, mut is_in_use) = (Vec::new(), Vec::new(), false);
    for binding in v4.iter().filter(is_bound) {
        // Unassigning a private address ends its association, also one of another user.
        match user(aws, &interface, binding).await? {
            User::Nobody => free.push(binding),
            User::BoundToo => bound_twice.push(binding),
            User::Other => is_in_use = true,
        }
    }
    let private: Vec<IpAddr> = free.iter().map(|binding| binding.private).collect();
    unassign(aws, &nic.id, &private).await?;
    for binding in free.into_iter().chain(bound_twice) {
        forget(aws, binding, &nic.id).await?;
    }
    if is_in_use {
        let text = format!("a private address of {} has a public address", nic.id);
        return Err(CloudError::new(ErrorKind::InUse, UNASSIGN_PRIVATE.name, "InUse", &text));
    }
    Ok(())
}

/// What is associated with a private address.
enum User {
    Nobody,
    /// An address that it is bound to as well: the private address stays.
    BoundToo,
    /// The address itself, or somebody else's.
    Other,
}

async fn user(aws: &Aws, interface: &NetworkInterface, binding: &Binding) -> Result<User, CloudError> {
    let private = interface.private(binding.private);
    let Some(association) = private.and_then(|private| private.association.as_ref()) else { return Ok(User::Nobody) };
    let other = association.allocation_id.as_deref().filter(|id| **id != *binding.address.id.0);
    let Some(other) = other else { return Ok(User::Other) };
    let by_id = filters([("allocation-id".to_owned(), vec![other])]);
    let reply: DescribeAddresses = aws.query.call(DESCRIBE_ADDRESSES, &by_id).await?;
    let nic = NicId(interface.network_interface_id.clone());
    let is_bound = |address: &Address| tags::private(address).get(&nic) == Some(&binding.private);
    Ok(if reply.addresses_set.items.iter().any(is_bound) { User::BoundToo } else { User::Other })
}

/// Unassigns private addresses. What isn't assigned is no error: so a read that is too old to show one leaves none behind.
async fn unassign(aws: &Aws, nic: &NicId, private: &[IpAddr]) -> Result<(), CloudError> {
    if private.is_empty() {
        return Ok(());
    }
    let request = |private: &[IpAddr]| {
        let mut parameters = vec![one("NetworkInterfaceId", nic.0.as_str())];
        parameters.extend(list("PrivateIpAddress", private.iter().map(IpAddr::to_string)));
        parameters
    };
    match aws.query.send(UNASSIGN_PRIVATE, &request(private)).await {
        Err(error) if is_not_assigned(&error) && private.len() > 1 => {}
        Err(error) if is_not_assigned(&error) => return Ok(()),
        outcome => return outcome.map(drop),
    }
    // One that isn't assigned keeps all others of a request.
    for one in private {
        match aws.query.send(UNASSIGN_PRIVATE, &request(&[*one])).await {
            Err(error) if is_not_assigned(&error) => {}
            outcome => drop(outcome?),
        }
    }
    Ok(())
}

fn is_not_assigned(error: &CloudError) -> bool {
    error.kind == ErrorKind::NotFound || error.code == "InvalidParameterValue"
}

/// Deletes the tag with a private address at an ENI; another address that was written meanwhile stays.
async fn forget(aws: &Aws, binding: &Binding, nic: &NicId) -> Result<(), CloudError> {
    let mut parameters = list("ResourceId", [binding.address.id.0.as_str()]);
    let (key, value) = (tags::private_key(nic), binding.private.to_string());
    parameters.extend(tag_parameters("Tag", [(key.as_str(), Some(value.as_str()))]));
    aws.query.send(DELETE_TAGS, &parameters).await.map(drop)
}

/// Unassigns the private addresses that are bound to an address, at whichever ENI; returns those that stay, since they are
/// associated, or there is no right to unassign them. Without their tag they would be nobody's.
pub(super) async fn unbind(aws: &Aws, address: &Address) -> Result<BTreeSet<NicId>, CloudError> {
    let private = tags::private(address);
    let mut left = BTreeSet::new();
    if private.is_empty() {
        return Ok(left);
    }
    let ids = private.keys().map(|nic| nic.0.as_str()).collect();
    for interface in describe::filtered(aws, "network-interface-id", ids).await? {
        let nic = NicId(interface.network_interface_id.clone());
        let Some(private) = private.get(&nic).copied() else { continue };
        let is_associated = interface.private(private).is_some_and(|private| private.association.is_some());
        let is_left = is_associated
            || match unassign(aws, &nic, &[private]).await {
                Err(error) if error.kind == ErrorKind::Denied => true,
                outcome => outcome.map(|()| false)?,
            };
        if is_left {
            left.insert(nic);
        }
    }
    Ok(left)
}
