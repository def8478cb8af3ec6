//! Private addresses of ENIs for VIPs. An address is written to a tag of the Elastic IP address first, and assigned then; it is
//! unassigned first, and the tag is deleted then.
//!
//! Which one it is depends on the ENI and the Elastic IP address: two servers, or another attempt after an old read, come to the
//! same one.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use tokio::time::sleep;

use super::query::{filters, list, one, tags as tag_parameters};
use super::reply::{Address, DescribeAddresses, DescribeSubnets, NetworkInterface};
use super::{
    ASSIGN_PRIVATE, Aws, CREATE_TAGS, DELETE_TAGS, DESCRIBE_ADDRESSES, DESCRIBE_SUBNETS, MODIFY_INTERFACE,
    UNASSIGN_PRIVATE, observe, tags,
};
use crate::candidates::{Range, shuffled, within};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Associate, Binding, Nic, NicId, PublicAddress};

/// Private addresses that are tried for one VIP: others in the subnet are in use, which only the attempt shows.
const MAX_ATTEMPTS: usize = 16;
/// Pauses before tags are read again that don't explain a private address: what was written may not be seen yet.
const READ_PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

pub(super) async fn prepare(
    aws: &Aws,
    nic: &Nic,
    addresses: &[PublicAddress],
    candidates: &[IpNet],
) -> Result<(), CloudError> {
    let is_bound = |address: &&PublicAddress| address.has_tags && aws.config.associate == Associate::Nic;
    let addresses: Vec<PublicAddress> = addresses.iter().filter(is_bound).cloned().collect();
    let (interface, current) = tokio::join!(observe::interface(aws, &nic.id), observe::addresses(aws, &addresses));
    let (interface, current) = (interface?, current?);
    if interface.source_dest_check == Some(true) {
        disable_check(aws, &nic.id).await?;
    }
    if addresses.is_empty() {
        return Ok(());
    }
    let mut choice = Choice {
        ranges: ranges(aws, &interface.subnet_id, candidates).await?,
        used: current.values().flat_map(|address| tags::private(address).into_values()).collect(),
        interface,
    };
    let mut outcome = Ok(());
    for address in addresses.iter().filter_map(|address| current.get(&address.id)) {
        let is_ours = tags::claim(address).is_some_and(|claim| claim.cluster == aws.config.cluster);
        if is_ours {
            outcome = outcome.and(choice.bind(aws, address).await);
        }
    }
    outcome
}

/// Without the right to do so it is reported as missing, and not tried again soon.
async fn disable_check(aws: &Aws, nic: &NicId) -> Result<(), CloudError> {
    let parameters = [one("NetworkInterfaceId", nic.0.as_str()), one("SourceDestCheck.Value", "false")];
    match aws.query.send(MODIFY_INTERFACE, &parameters).await {
        Err(error) if error.kind == ErrorKind::Denied => {
            aws.unmodifiable.add(nic);
            Ok(())
        }
        outcome => outcome.map(drop),
    }
}

/// What can be chosen of a subnet: the candidates in it; without candidates, all of it.
async fn ranges(aws: &Aws, subnet: &str, candidates: &[IpNet]) -> Result<Vec<Range>, CloudError> {
    let reply: DescribeSubnets = aws.query.call(DESCRIBE_SUBNETS, &list("SubnetId", [subnet])).await?;
    let prefixes = reply.subnet_set.items.into_iter().map(|subnet| subnet.cidr_block);
    let range = |prefix| {
        let all = [prefix];
        within(&prefix, if candidates.is_empty() { &all } else { candidates })
    };
    Ok(prefixes.flat_map(range).collect())
}

/// Private addresses to choose from at an ENI.
struct Choice {
    interface: NetworkInterface,
    ranges: Vec<Range>,
    /// Bound to an address of ours, here or at another ENI.
    used: BTreeSet<IpAddr>,
}

impl Choice {
    /// Gives an address a private one.
    async fn bind(&mut self, aws: &Aws, address: &Address) -> Result<(), CloudError> {
        let nic = NicId(self.interface.network_interface_id.clone());
        let mut written = tags::private(address).get(&nic).copied();
        if written.is_some_and(|written| self.interface.private(written).is_some()) {
            return Ok(());
        }
        let candidates = self.candidates(&nic, address);
        if self.is_bound_since(aws, &nic, address, &candidates).await? {
            return Ok(());
        }
        let is_free = |candidate: &IpAddr| self.interface.private(*candidate).is_none();
        // One that was written, but perhaps not assigned, is tried first.
        for candidate in written.into_iter().chain(candidates).filter(is_free) {
            if written.take() != Some(candidate) {
                write(aws, &address.allocation_id, &nic, candidate).await?;
            }
            let parameters = [
                one("NetworkInterfaceId", nic.0.as_str()),
                one("PrivateIpAddress.1", candidate.to_string()),
                one("AllowReassignment", "false"),
            ];
            match aws.query.send(ASSIGN_PRIVATE, &parameters).await {
                Ok(_) => {
                    self.used.insert(candidate);
                    return Ok(());
                }
                Err(error) if is_taken(&error) => {}
                Err(error) => return Err(error),
            }
        }
        let text = format!("no private address is free for {} in the subnet", address.public_ip);
        Err(CloudError::new(ErrorKind::Quota, ASSIGN_PRIVATE.name, "NoFreePrivateAddress", &text))
    }

    /// What is tried for an address, in this order.
    fn candidates(&self, nic: &NicId, address: &Address) -> Vec<IpAddr> {
        let seed = format!("{nic} {}", address.allocation_id);
        let is_delegated = |it: &IpAddr| self.interface.prefixes().any(|prefix| prefix.contains(it));
        let all = self.ranges.iter().flat_map(|range| shuffled(*range, &seed));
        all.filter(|it| !self.used.contains(it) && !is_delegated(it)).take(MAX_ATTEMPTS).collect()
    }

    /// Whether a candidate is assigned here for this address already, which the tags that were read don't say yet. What no tag
    /// explains after a while is somebody else's.
    async fn is_bound_since(
        &self,
        aws: &Aws,
        nic: &NicId,
        address: &Address,
        candidates: &[IpAddr],
    ) -> Result<bool, CloudError> {
        let is_unexplained = |it: &&IpAddr| {
            let private = self.interface.private(**it);
            private.is_some_and(|private| !private.primary && private.association.is_none())
        };
        let mut unexplained: BTreeSet<IpAddr> = candidates.iter().filter(is_unexplained).copied().collect();
        for pause in READ_PAUSES {
            if unexplained.is_empty() {
                break;
            }
            sleep(pause).await;
            let texts: Vec<String> = unexplained.iter().map(IpAddr::to_string).collect();
            let of_nic = format!("tag:{}", tags::private_key(nic));
            let bound = filters([(of_nic, texts.iter().map(String::as_str).collect())]);
            let reply: DescribeAddresses = aws.query.call(DESCRIBE_ADDRESSES, &bound).await?;
            for found in &reply.addresses_set.items {
                let Some(private) = tags::private(found).get(nic).copied() else { continue };
                if unexplained.remove(&private) && found.allocation_id == address.allocation_id {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// Whether a private address is in use elsewhere, or can't be used.
fn is_taken(error: &CloudError) -> bool {
    error.kind == ErrorKind::InUse || error.code == "InvalidParameterValue"
}

async fn write(aws: &Aws, allocation: &str, nic: &NicId, private: IpAddr) -> Result<(), CloudError> {
    let mut parameters = list("ResourceId", [allocation]);
    let (key, value) = (tags::private_key(nic), private.to_string());
    parameters.extend(tag_parameters("Tag", [(key.as_str(), Some(value.as_str()))]));
    aws.query.send(CREATE_TAGS, &parameters).await.map(drop)
}

pub(super) async fn unprepare(aws: &Aws, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
    let v4: Vec<&Binding> = bindings.iter().filter(|binding| binding.address.has_tags).collect();
    if v4.is_empty() || aws.config.associate == Associate::Instance {
        return Ok(());
    }
    let addresses: Vec<PublicAddress> = v4.iter().map(|binding| binding.address.clone()).collect();
    let (interface, current) = tokio::join!(observe::interface(aws, &nic.id), observe::addresses(aws, &addresses));
    let (interface, current) = (interface?, current?);
    let is_bound = |binding: &&&Binding| {
        let current = current.get(&binding.address.id);
        current.is_some_and(|current| tags::private(current).get(&nic.id) == Some(&binding.private))
    };
    let (mut free, mut bound_twice, mut is_in_use) = (Vec::new(), Vec::new(), false);
    for binding in v4.iter().filter(is_bound) {
        // Unassigning a private address ends its association, whoever made it.
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
    for interface in observe::filtered(aws, "network-interface-id", ids).await? {
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
