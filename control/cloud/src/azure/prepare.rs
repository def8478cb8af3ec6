//! Preparation: forwarding, and an IP configuration with a private address for each public address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use super::claim::not_found;
use super::client::{Client, PUT_INTERFACE};
use super::interface::Interface;
use super::resource_id::{ResourceId, configuration_name};
use super::subnet;
use crate::candidates::{Range, shuffled};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Associate, Binding, Nic, PublicAddress};

const NAME: &str = PUT_INTERFACE.name;

/// Private addresses of a NIC, and of a virtual machine, at most
/// (<https://learn.microsoft.com/azure/azure-resource-manager/management/azure-subscription-service-limits>).
pub(super) const MAX_CONFIGURATIONS: usize = 256;
/// Times that private addresses are chosen: others in the subnet are in use, which only the attempt shows.
const MAX_ATTEMPTS: usize = 8;

/// Turns forwarding on, and gives a private address to each address that has none at the NIC.
pub(super) async fn prepare(
    client: &Client,
    nic: &Nic,
    addresses: &[PublicAddress],
    candidates: &[IpNet],
) -> Result<(), CloudError> {
    let id = ResourceId::of_nic(NAME, &nic.id)?;
    let mut wanted = Vec::new();
    if client.associate == Associate::Nic {
        for address in addresses {
            let of = ResourceId::of_address(NAME, &address.id)?;
            wanted.push(Wanted { name: configuration_name(&of), is_ipv6: address.address.is_ipv6() });
        }
    }
    let mut read = client.interface(&id).await?;
    let interface = read.as_ref().ok_or_else(|| not_found(NAME, &id))?;
    let mut candidates = match interface.primary().and_then(|it| it.subnet()) {
        Some(of) if !candidates.is_empty() && !wanted.is_empty() => {
            let ranges = subnet::usable(client, of, candidates).await?;
            Candidates { is_given: true, ranges, ..Candidates::default() }
        }
        _ => Candidates::default(),
    };
    // Private addresses of the same addresses at other NICs are in use.
    candidates.taken.extend(addresses.iter().flat_map(|address| address.private.values().copied()));
    for left in (0..MAX_ATTEMPTS).rev() {
        let changed = client.change(&id, read.take(), |interface: &mut Interface| {
            let is_changed = add_missing(&id, interface, &wanted, &candidates)?;
            Ok(interface.enable_forwarding() || is_changed)
        });
        match changed.await {
            Err(error) if left > 0 && is_taken(&error) && candidates.is_given => {
                candidates.exclude(&id, &wanted, &error);
            }
            result => return result?.ok_or_else(|| not_found(NAME, &id)),
        }
    }
    Ok(())
}

/// An IP configuration that is to be there.
struct Wanted {
    name: String,
    is_ipv6: bool,
}

/// Private addresses to choose from.
#[derive(Debug, Default)]
struct Candidates {
    /// Whether there are any: else Azure chooses.
    is_given: bool,
    /// Those that are in the subnet, as ranges.
    ranges: Vec<Range>,
    taken: BTreeSet<IpAddr>,
}

impl Candidates {
    /// An address for an IP configuration. The same one each time, as long as it isn't taken: another attempt after a lost answer
    /// doesn't ask for a second one.
    fn choose(&self, nic: &ResourceId, wanted: &Wanted, used: &BTreeSet<IpAddr>) -> Option<IpAddr> {
        let is_free = |it: &IpAddr| !self.taken.contains(it) && !used.contains(it);
        let seed = format!("{nic} {}", wanted.name);
        let ranges = self.ranges.iter().filter(|(first, _)| first.is_ipv6() == wanted.is_ipv6);
        ranges.flat_map(|range| shuffled(*range, &seed)).find(is_free)
    }

    /// Excludes the address that is taken; if the error doesn't name it, all that were chosen.
    fn exclude(&mut self, nic: &ResourceId, wanted: &[Wanted], error: &CloudError) {
        let mut chosen = BTreeSet::new();
        for wanted in wanted {
            chosen.extend(self.choose(nic, wanted, &chosen));
        }
        let words = error.message.split(|it: char| !it.is_ascii_hexdigit() && it != '.' && it != ':');
        let named: BTreeSet<IpAddr> = words.filter_map(|it| it.trim_end_matches('.').parse().ok()).collect();
        let of_these: Vec<IpAddr> = chosen.intersection(&named).copied().collect();
        self.taken.extend(if of_these.is_empty() { chosen.into_iter().collect() } else { of_these });
    }
}

fn is_taken(error: &CloudError) -> bool {
    error.code == "PrivateIPAddressIsAllocated" || error.code == "PrivateIPAddressInUse"
}

/// Adds the IP configurations that are missing.
fn add_missing(
    nic: &ResourceId,
    interface: &mut Interface,
    wanted: &[Wanted],
    candidates: &Candidates,
) -> Result<bool, CloudError> {
    let quota = |code: &str, text: &str| Err(CloudError::new(ErrorKind::Quota, NAME, code, text));
    let mut used: BTreeSet<IpAddr> = interface.configurations().filter_map(|it| it.private()).collect();
    let mut is_changed = false;
    for wanted in wanted {
        if interface.named(&wanted.name).is_some() {
            continue;
        }
        if interface.configurations().count() >= MAX_CONFIGURATIONS {
            return quota("TooManyIpConfigurations", "the NIC has as many IP configurations as are possible");
        }
        if wanted.is_ipv6 && interface.configurations().any(|it| it.is_ipv6()) {
            return quota("SecondIpv6", "a NIC has one private IPv6 address at most");
        }
        let chosen = candidates.choose(nic, wanted, &used);
        if candidates.is_given && chosen.is_none() {
            return quota("NoFreePrivateAddress", "no candidate is free in the subnet of the NIC");
        }
        let subnet = interface.primary().and_then(|it| it.subnet()).unwrap_or_default().to_owned();
        interface.add(&wanted.name, &subnet, wanted.is_ipv6, chosen);
        used.extend(chosen);
        is_changed = true;
    }
    Ok(is_changed)
}

/// Removes the IP configurations of these addresses, unless a public address is attached to them.
pub(super) async fn unprepare(client: &Client, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
    // The primary IP configuration isn't vipgate's.
    if client.associate == Associate::Instance || bindings.is_empty() {
        return Ok(());
    }
    let id = ResourceId::of_nic(NAME, &nic.id)?;
    let mut ours = Vec::new();
    for binding in bindings {
        let of = ResourceId::of_address(NAME, &binding.address.id)?;
        ours.push((configuration_name(&of), binding.private));
    }
    let changed = client.change(&id, None, |interface: &mut Interface| {
        let mut is_changed = false;
        for (name, private) in &ours {
            let found = interface
                .named(name)
                .filter(|it| !it.is_primary() && it.public_id().is_none() && it.private() == Some(*private));
            if let Some(index) = found.map(|it| it.index) {
                interface.remove(index);
                is_changed = true;
            }
        }
        Ok(is_changed)
    });
    // An interface that doesn't exist has nothing of ours.
    changed.await.map(drop)
}
