//! What a provider has, as the compiler of policies takes it.

use std::collections::BTreeMap;

use vipgate_cloud::{Nic, NicId, Observation, PublicAddress};
use vipgate_policy::manifest::{CloudAddress, CloudNic, CloudPool};

/// The addresses that VIPs of a cluster can have, and the NICs of gateways.
pub(super) fn cloud_pool(cluster: &str, observation: &Observation) -> CloudPool {
    let gateways: BTreeMap<&NicId, &str> = observation.nics.iter().map(|nic| (&nic.id, nic.gateway.as_str())).collect();
    let is_usable = |address: &&PublicAddress| match &address.claim {
        Some(claim) => claim.cluster == cluster,
        // Whoever has it without a claim uses it.
        None => address.attachment.is_none(),
    };
    let entry = |address: &PublicAddress| {
        let private = address.private.iter();
        let private = private.filter_map(|(nic, private)| Some(((*gateways.get(nic)?).to_owned(), *private)));
        let owner = address.claim.as_ref().map(|claim| claim.owner.clone());
        (address.address, CloudAddress { owner, zone: address.zone.clone(), private: private.collect() })
    };
    let nic = |nic: &Nic| {
        let (capacity, ipv6_capacity) = (nic.capacity.v4, nic.capacity.v6);
        (nic.gateway.clone(), CloudNic { capacity, ipv6_capacity, zone: nic.zone.clone() })
    };
    CloudPool {
        addresses: observation.addresses.iter().filter(is_usable).map(entry).collect(),
        nics: observation.nics.iter().map(nic).collect(),
    }
}
