//! Private addresses of ENIs for VIPs. An address is written to the tag of the Elastic IP address first, and assigned then.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};

use super::query::{list, one, tags as tag_parameters};
use super::reply::{Address, DescribeSubnets, NetworkInterface};
use super::{
    ASSIGN_PRIVATE, Aws, CREATE_TAGS, DELETE_TAGS, DESCRIBE_SUBNETS, MODIFY_INTERFACE, UNASSIGN_PRIVATE, observe, tags,
};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{AddressId, Associate, Binding, Nic, NicId, PublicAddress};

/// Private addresses that are tried for one VIP: others in the subnet are in use, which only the attempt shows.
const MAX_ATTEMPTS: usize = 16;
/// Addresses at the start of a subnet that AWS keeps for itself; so does it with the last one.
const RESERVED: u32 = 4;

pub(super) async fn prepare(
    aws: &Aws,
    nic: &Nic,
    addresses: &[PublicAddress],
    candidates: &[IpNet],
) -> Result<(), CloudError> {
    let interface = observe::interface(aws, &nic.id).await?;
    if interface.source_dest_check == Some(true) {
        disable_check(aws, &nic.id).await?;
    }
    let v4: Vec<PublicAddress> = addresses.iter().filter(|it| it.has_tags).cloned().collect();
    if v4.is_empty() || aws.config.associate == Associate::Instance {
        return Ok(());
    }
    let current = observe::addresses(aws, &v4).await?;
    let prefixes = if candidates.is_empty() { subnet(aws, &interface.subnet_id).await? } else { candidates.to_vec() };
    let mut taken: Vec<IpAddr> =
        interface.private_ip_addresses_set.items.iter().map(|it| it.private_ip_address).collect();
    let mut outcome = Ok(());
    for address in v4.iter().filter_map(|address| current.get(&address.id)) {
        let is_ours = tags::claim(address).is_some_and(|claim| claim.cluster == aws.config.cluster);
        if is_ours {
            outcome = outcome.and(bind(aws, &interface, address, &prefixes, &mut taken).await);
        }
    }
    outcome
}

/// Without the right to do so it is reported as missing.
async fn disable_check(aws: &Aws, nic: &NicId) -> Result<(), CloudError> {
    let parameters = [one("NetworkInterfaceId", nic.0.as_str()), one("SourceDestCheck.Value", "false")];
    match aws.query.send(MODIFY_INTERFACE, &parameters).await {
        Err(error) if error.kind == ErrorKind::Denied => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// The prefix of a subnet.
async fn subnet(aws: &Aws, id: &str) -> Result<Vec<IpNet>, CloudError> {
    let reply: DescribeSubnets = aws.query.call(DESCRIBE_SUBNETS, &list("SubnetId", [id])).await?;
    Ok(reply.subnet_set.items.into_iter().map(|subnet| subnet.cidr_block).collect())
}

/// Gives an address a private one at an ENI.
async fn bind(
    aws: &Aws,
    interface: &NetworkInterface,
    address: &Address,
    prefixes: &[IpNet],
    taken: &mut Vec<IpAddr>,
) -> Result<(), CloudError> {
    let nic = NicId(interface.network_interface_id.clone());
    let mut private = tags::private(address);
    // One that was written, but perhaps not assigned, is tried first.
    let mut written = private.get(&nic).copied();
    if written.is_some_and(|written| interface.private(written).is_some()) {
        return Ok(());
    }
    let exhausted = || {
        let text = format!("no private address is free for {} in the subnet", address.public_ip);
        CloudError::new(ErrorKind::Quota, ASSIGN_PRIVATE.name, "NoFreePrivateAddress", &text)
    };
    for _ in 0..MAX_ATTEMPTS {
        let candidate = match written.take() {
            Some(written) => written,
            None => choose(prefixes, taken).ok_or_else(exhausted)?,
        };
        taken.push(candidate);
        if private.insert(nic.clone(), candidate) != Some(candidate) {
            write(aws, &address.allocation_id, &private).await?;
        }
        let parameters = [
            one("NetworkInterfaceId", nic.0.as_str()),
            one("PrivateIpAddress.1", candidate.to_string()),
            one("AllowReassignment", "false"),
        ];
        match aws.query.send(ASSIGN_PRIVATE, &parameters).await {
            Ok(_) => return Ok(()),
            Err(error) if is_taken(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Err(exhausted())
}

/// Whether a private address is in use elsewhere, or can't be used.
fn is_taken(error: &CloudError) -> bool {
    error.kind == ErrorKind::InUse || error.code == "InvalidParameterValue"
}

async fn write(aws: &Aws, id: &str, private: &BTreeMap<NicId, IpAddr>) -> Result<(), CloudError> {
    let mut parameters = list("ResourceId", [id]);
    if private.is_empty() {
        parameters.extend(tag_parameters("Tag", [(tags::PRIVATE, None)]));
        return aws.query.send(DELETE_TAGS, &parameters).await.map(drop);
    }
    let too_many =
        || CloudError::new(ErrorKind::Quota, CREATE_TAGS.name, "TagTooLong", "too many gateways for one tag");
    let value = tags::private_value(private).ok_or_else(too_many)?;
    parameters.extend(tag_parameters("Tag", [(tags::PRIVATE, Some(value.as_str()))]));
    aws.query.send(CREATE_TAGS, &parameters).await.map(drop)
}

/// A random address that isn't taken.
fn choose(prefixes: &[IpNet], taken: &[IpAddr]) -> Option<IpAddr> {
    let prefixes: Vec<Ipv4Net> =
        prefixes.iter().filter_map(|net| if let IpNet::V4(net) = net { Some(*net) } else { None }).collect();
    // Without randomness: from the start.
    let random = getrandom::u32().unwrap_or_default();
    let net = prefixes.get(random as usize % prefixes.len().max(1))?;
    let (first, last) = (net.network().to_bits(), net.broadcast().to_bits());
    // A long prefix of a list may be a part of a subnet, whose first addresses can be used.
    let is_subnet = net.prefix_len() <= 28;
    let (first, last) = if is_subnet { (first + RESERVED, last - 1) } else { (first, last) };
    let count = last - first + 1;
    let start = getrandom::u32().unwrap_or_default() % count;
    let addresses = (0..count).map(|step| IpAddr::from(Ipv4Addr::from_bits(first + (start + step) % count)));
    addresses.take(4096).find(|address| !taken.contains(address))
}

pub(super) async fn unprepare(aws: &Aws, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
    let v4: Vec<&Binding> = bindings.iter().filter(|binding| binding.address.has_tags).collect();
    if v4.is_empty() || aws.config.associate == Associate::Instance {
        return Ok(());
    }
    let interface = observe::interface(aws, &nic.id).await?;
    let addresses: Vec<PublicAddress> = v4.iter().map(|binding| binding.address.clone()).collect();
    let current = observe::addresses(aws, &addresses).await?;
    let is_bound = |binding: &&&Binding| {
        let current = current.get(&binding.address.id);
        current.is_some_and(|current| tags::private(current).get(&nic.id) == Some(&binding.private))
    };
    let bound: Vec<&&Binding> = v4.iter().filter(is_bound).collect();
    // Unassigning a private address ends its association, whoever made it.
    let has_association =
        |binding: &Binding| interface.private(binding.private).is_some_and(|it| it.association.is_some());
    let free: Vec<&&Binding> = bound.iter().copied().filter(|binding| !has_association(binding)).collect();
    let assigned = free.iter().filter(|binding| interface.private(binding.private).is_some());
    let assigned: Vec<String> = assigned.map(|binding| binding.private.to_string()).collect();
    if !assigned.is_empty() {
        let mut parameters = vec![one("NetworkInterfaceId", nic.id.0.as_str())];
        parameters.extend(list("PrivateIpAddress", assigned));
        aws.query.send(UNASSIGN_PRIVATE, &parameters).await?;
    }
    for binding in &free {
        forget(aws, &binding.address.id, &nic.id, &current).await?;
    }
    if free.len() < bound.len() {
        let text = format!("a private address of {} has a public address", nic.id);
        return Err(CloudError::new(ErrorKind::InUse, UNASSIGN_PRIVATE.name, "InUse", &text));
    }
    Ok(())
}

/// Removes the private address of an ENI from the tag.
async fn forget(
    aws: &Aws,
    address: &AddressId,
    nic: &NicId,
    current: &BTreeMap<AddressId, Address>,
) -> Result<(), CloudError> {
    let Some(current) = current.get(address) else { return Ok(()) };
    let mut private = tags::private(current);
    private.remove(nic);
    write(aws, &address.0, &private).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_four_addresses_of_a_subnet_and_the_last_are_never_chosen() {
        let subnet: IpNet = "10.0.0.0/28".parse().unwrap();
        let mut taken = Vec::new();
        while let Some(address) = choose(&[subnet], &taken) {
            taken.push(address);
        }
        taken.sort_unstable();
        let expected: Vec<IpAddr> = (4..=14).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        assert_eq!(taken, expected);
    }

    #[test]
    fn all_of_a_listed_prefix_is_chosen() {
        let listed: IpNet = "10.0.0.32/30".parse().unwrap();
        let mut taken = Vec::new();
        while let Some(address) = choose(&[listed], &taken) {
            taken.push(address);
        }
        taken.sort_unstable();
        assert_eq!(taken, (32..36).map(|last| IpAddr::from([10, 0, 0, last])).collect::<Vec<_>>());
        assert_eq!(choose(&[], &[]), None);
    }
}
