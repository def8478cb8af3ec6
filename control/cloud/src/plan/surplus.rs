//! Addresses of ours that are no VIP any more.

use super::schedule::Step;
use super::vip::reserved;
use super::{Location, World};
use crate::provider::{Associate, Binding, Claim, PublicAddress};

/// Owner in the claim on an address that is only claimed to be given up in order.
const UNUSED: &str = "-/unused";

/// The next steps of each address that no VIP is: detached, without private addresses, without a claim; in this order, so that
/// what is half done is still known to be ours.
pub(super) fn plan(world: &World<'_>, steps: &mut Vec<Step>) {
    for address in &world.observed.addresses {
        let is_wanted =
            world.desired.vips.contains_key(&address.address) || world.desired.expected.contains(&address.id);
        if !is_wanted && !world.is_others(address) {
            steps.extend(next_steps(world, address));
        }
    }
}

fn next_steps(world: &World<'_>, address: &PublicAddress) -> Vec<Step> {
    match world.location_of(address) {
        // Somebody has removed the claim, but not what came with it.
        Location::At(_) | Location::Former(_) if address.has_tags && address.claim.is_none() => {
            let claim = Claim { cluster: world.desired.cluster.clone(), owner: UNUSED.to_owned() };
            vec![Step::Claim(address.clone(), claim)]
        }
        Location::At(nic) => vec![Step::Detach(nic.id.clone(), address.clone())],
        Location::Former(id) => vec![Step::Detach(id.clone(), address.clone())],
        // Where it is foreign, its user doesn't know of the claim: that and what is bound is given up.
        Location::Free | Location::Foreign => {
            let bound = reserved(address).filter_map(|(id, private)| Some((*world.nics.get(id)?, *private)));
            let bound = bound.filter(|(nic, _)| nic.associate == Associate::Nic);
            let unprepare =
                |(nic, private)| Step::Unprepare(Clone::clone(nic), Binding { address: address.clone(), private });
            let steps: Vec<Step> = bound.map(unprepare).collect();
            let is_releasable = address.token.is_some() && world.desired.releasable.contains(&address.id);
            if !steps.is_empty() {
                steps
            } else if address.claim.is_some() {
                vec![Step::Unclaim(address.clone())]
            } else if is_releasable && address.attachment.is_none() {
                vec![Step::Release(address.clone())]
            } else {
                vec![]
            }
        }
    }
}
