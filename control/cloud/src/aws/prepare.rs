//! Private addresses of ENIs for VIPs. An address is written to a tag of the Elastic IP address first, and assigned then.
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
use super::{ASSIGN_PRIVATE, Aws, CREATE_TAGS, DESCRIBE_ADDRESSES, DESCRIBE_SUBNETS, MODIFY_INTERFACE, describe, tags};
use crate::candidates::{Range, shuffled, within};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Associate, Nic, NicId, PublicAddress};

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
    let (interface, current) = tokio::join!(describe::interface(aws, &nic.id), describe::addresses(aws, &addresses));
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
        let written = tags::private(address).get(&nic).copied();
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
            // Also what was read in the tag: the read may be older than another server's removal of the tag, and what is assigned
            // without one is nobody's.
            write(aws, &address.allocation_id, &nic, candidate).await?;
            let parameters = [
                one("NetworkInterfaceId", nic.0.as_str()),
                one("PrivateIpAddress.1", candidate.to_string()),
                one("AllowReassignment", "false"),
            ];
            match aws.query.send(ASSIGN_PRIVATE, &parameters).await {
                Ok(_) => {
                    self.used.insert(candidate);
                    // Again: another server, which isn't the leader any more, may have removed it in between.
                    return write(aws, &address.allocation_id, &nic, candidate).await;
                }
                // Perhaps here, by another attempt for this address that no read showed yet.
                Err(error) if is_taken(&error) => {
                    if describe::interface(aws, &nic).await?.private(candidate).is_some() {
                        return Ok(());
                    }
                }
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
