//! The next step of each VIP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::schedule::Step;
use super::{AddressPlan, DesiredVip, Location, Problem, World, describe_attachment};
use crate::provider::{AddressId, Associate, Binding, Capacity, Claim, Nic, NicId, PublicAddress};

/// Standby gateways of a VIP that get a private address beforehand, so that a failover is one request. Private addresses are
/// scarce.
const PREPARED_STANDBYS: usize = 1;

/// Room for VIPs at NICs.
struct Room<'a> {
    /// What is left at each NIC beside the private addresses that are bound already, whatever for.
    left: BTreeMap<&'a NicId, Capacity>,
    /// The address that each private address is in use for, or is about to be.
    users: BTreeMap<(&'a NicId, IpAddr), &'a AddressId>,
    /// Addresses with a private address that another one has, too.
    doubles: BTreeSet<(&'a NicId, &'a AddressId)>,
    /// Addresses that were made to leave a NIC.
    evicted: BTreeSet<&'a AddressId>,
}

impl<'a> Room<'a> {
    fn new(world: &World<'a>) -> Self {
        let mut left: BTreeMap<&NicId, Capacity> =
            world.observed.nics.iter().map(|nic| (&nic.id, nic.capacity)).collect();
        let mut users = BTreeMap::new();
        for address in &world.observed.addresses {
            for id in occupied(address) {
                if let Some(left) = left.get_mut(id) {
                    let left = left.of_mut(address.address);
                    *left = left.saturating_sub(1);
                }
            }
            if let Some(attachment) = &address.attachment
                && let (Some(nic), Some(private)) = (&attachment.nic, attachment.private)
            {
                users.insert((nic, private), &address.id);
            }
        }
        Self { left, users, doubles: doubles(world), evicted: BTreeSet::new() }
    }

    /// Takes room for a further private address.
    fn take(&mut self, nic: &Nic, address: &PublicAddress) -> bool {
        let left = self.left.get_mut(&nic.id).map(|left| left.of_mut(address.address));
        let Some(left) = left.filter(|left| **left > 0) else { return false };
        *left -= 1;
        true
    }

    /// Takes a private address for an address, unless it is in use for another one.
    fn take_private(&mut self, nic: &'a NicId, private: IpAddr, address: &'a AddressId) -> bool {
        *self.users.entry((nic, private)).or_insert(address) == address
    }

    /// A step that makes room at a full NIC: another gateway owns the VIP, or it is only prepared here. Standbys give way to
    /// owners, and of two VIPs that are to change places one has to leave first.
    fn evict(&mut self, world: &World<'a>, nic: &'a Nic, vip: IpAddr) -> Option<Step> {
        let is_owned_here = |address: &PublicAddress| {
            let desired = world.desired.vips.get(&address.address);
            let is_owner = desired.is_some_and(|desired| desired.gateway.as_deref() == Some(&nic.gateway));
            is_owner && world.location_of(address) != Location::Foreign
        };
        let attached_here = |address: &PublicAddress| world.location_of(address) == Location::At(nic);
        let bound = world.observed.addresses.iter().filter(|address| {
            let is_bound = !world.is_others(address) && occupied(address).any(|id| *id == nic.id);
            let is_same_family = address.address.is_ipv6() == vip.is_ipv6();
            is_bound && is_same_family && !is_owned_here(address) && !self.evicted.contains(&address.id)
        });
        // Without its claim, which somebody removed, nothing is detached: the claim is first.
        let is_detachable = |address: &PublicAddress| !address.has_tags || address.claim.is_some();
        let can_leave = |address: &&PublicAddress| {
            if attached_here(address) { is_detachable(address) } else { nic.associate == Associate::Nic }
        };
        // What only is prepared gives way first.
        let evicted = bound.filter(can_leave).min_by_key(|address| (attached_here(address), &address.address))?;
        self.evicted.insert(&evicted.id);
        if attached_here(evicted) {
            return Some(Step::Detach(nic.id.clone(), evicted.clone()));
        }
        let private = *evicted.private.get(&nic.id)?;
        Some(Step::Unprepare(nic.clone(), Binding { address: evicted.clone(), private }))
    }
}

pub(super) fn plan(world: &World<'_>, steps: &mut Vec<Step>, plan: &mut AddressPlan) {
    let mut room = Room::new(world);
    let observed: BTreeMap<_, _> = world.observed.addresses.iter().map(|address| (address.address, address)).collect();
    let mut standbys = Vec::new();
    for (vip, desired) in &world.desired.vips {
        let Some(address) = observed.get(vip) else {
            plan.problems.insert(*vip, Problem::NoAddress);
            continue;
        };
        let next = match next_step(world, address, desired, &mut room) {
            Err(Problem::NoCapacity(gateway)) => {
                let nic = world.by_gateway.get(gateway.as_str());
                nic.and_then(|nic| room.evict(world, nic, *vip)).map(Some).ok_or(Problem::NoCapacity(gateway))
            }
            next => next,
        };
        match next {
            Ok(Some(step)) => steps.push(step),
            Ok(None) => {
                plan.attached.insert(*vip);
                let home = desired.gateway.as_deref().and_then(|gateway| world.by_gateway.get(gateway));
                steps.extend(home.and_then(|nic| make_ready(nic, address)));
                standbys.push((*address, desired));
            }
            Err(problem) => {
                plan.problems.insert(*vip, problem);
            }
        }
    }
    // Room is for owners first.
    for (address, desired) in standbys {
        prepare_standbys(world, address, desired, &mut room, steps);
    }
}

/// The next step; `None`: the VIP is attached where it is to be.
fn next_step<'a>(
    world: &World<'a>,
    address: &'a PublicAddress,
    desired: &DesiredVip,
    room: &mut Room<'a>,
) -> Result<Option<Step>, Problem> {
    if let Some(claim) = address.claim.as_ref().filter(|_| world.is_others(address)) {
        return Err(Problem::OtherCluster(claim.cluster.clone()));
    }
    let place = world.location_of(address);
    if place == Location::Foreign {
        let at = describe_attachment(address);
        let nic = address.attachment.as_ref().and_then(|attachment| attachment.nic.as_ref());
        let is_elsewhere = nic.is_some_and(|nic| !world.nics.contains_key(nic));
        // At a primary address nothing shows whether vipgate attached it there, when the NIC was a gateway's, or a person did.
        let is_instance = world.observed.nics.iter().all(|nic| nic.associate == Associate::Instance);
        let is_former = is_elsewhere && is_instance && address.claim.is_some();
        return Err(if is_former { Problem::AttachedWithClaim(at) } else { Problem::Attached(at) });
    }
    if address.has_tags && address.claim.as_ref().is_none_or(|claim| claim.owner != desired.owner) {
        let claim = Claim { cluster: world.desired.cluster.clone(), owner: desired.owner.clone() };
        return Ok(Some(Step::Claim(address.clone(), claim)));
    }
    // Without an active gateway it stays where it is.
    let gateway = desired.gateway.as_deref().ok_or(Problem::NoGateway)?;
    let nic = *world.by_gateway.get(gateway).ok_or_else(|| Problem::NoNic(gateway.to_owned()))?;
    if !is_in_zone(address, nic) {
        return Err(Problem::OtherZone(gateway.to_owned()));
    }
    if place == Location::At(nic) {
        return Ok(None);
    }
    let no_capacity = || Problem::NoCapacity(gateway.to_owned());
    let Some(private) = address.private.get(&nic.id) else {
        let has_room = room.take(nic, address);
        let prepare = || Some(Step::Prepare(nic.clone(), address.clone()));
        return if has_room { Ok(prepare()) } else { Err(no_capacity()) };
    };
    let binding = Binding { address: address.clone(), private: *private };
    if room.doubles.contains(&(&nic.id, &address.id)) {
        return Ok(Some(Step::Unprepare(nic.clone(), binding)));
    }
    if is_own(address, *private) && !room.take(nic, address) || !room.take_private(&nic.id, *private, &address.id) {
        return Err(no_capacity());
    }
    Ok(Some(match place {
        Location::At(other) if world.is_dead(&other.gateway) => Step::Move(other.id.clone(), nic.clone(), binding),
        Location::At(other) => Step::Detach(other.id.clone(), address.clone()),
        Location::Former(id) => Step::Detach(id.clone(), address.clone()),
        Location::Free | Location::Foreign => Step::Attach(nic.clone(), binding),
    }))
}

/// The private addresses that are reserved for an address: others than itself.
pub(super) fn reserved(address: &PublicAddress) -> impl Iterator<Item = (&NicId, &IpAddr)> {
    address.private.iter().filter(|(_, private)| !is_own(address, **private))
}

/// Whether an address is its own private address: it takes room only where it is attached.
fn is_own(address: &PublicAddress, private: IpAddr) -> bool {
    address.address == private
}

/// The NICs where an address takes room.
fn occupied(address: &PublicAddress) -> impl Iterator<Item = &NicId> {
    let attachment = address.attachment.iter().filter(|it| it.private.is_some_and(|private| is_own(address, private)));
    reserved(address).map(|(id, _)| id).chain(attachment.filter_map(|it| it.nic.as_ref()))
}

/// Addresses with a private address that another one has, too, which keeps it: the one that is attached there, else another
/// cluster's, else one that is to be attached there.
fn doubles<'a>(world: &World<'a>) -> BTreeSet<(&'a NicId, &'a AddressId)> {
    let mut bound: BTreeMap<(&NicId, IpAddr), Vec<&PublicAddress>> = BTreeMap::new();
    for address in &world.observed.addresses {
        let is_secondary = |id: &NicId| world.nics.get(id).is_some_and(|nic| nic.associate == Associate::Nic);
        for (id, private) in reserved(address).filter(|(id, _)| is_secondary(id)) {
            bound.entry((id, *private)).or_default().push(address);
        }
    }
    let mut doubles = BTreeSet::new();
    for ((id, private), addresses) in bound.iter().filter(|(_, addresses)| addresses.len() > 1) {
        let rank = |address: &PublicAddress| {
            let attachment = address.attachment.as_ref();
            let is_here = attachment.is_some_and(|it| it.nic.as_ref() == Some(*id) && it.private == Some(*private));
            let gateway = world.desired.vips.get(&address.address).and_then(|desired| desired.gateway.as_deref());
            let is_owned = gateway.is_some() && gateway == world.nics.get(id).map(|nic| nic.gateway.as_str());
            (is_here, world.is_others(address), is_owned)
        };
        let owner = addresses.iter().rev().max_by_key(|address| rank(address));
        let others = addresses.iter().filter(|address| Some(*address) != owner && !world.is_others(address));
        doubles.extend(others.map(|address| (*id, &address.id)));
    }
    doubles
}

fn is_in_zone(address: &PublicAddress, nic: &Nic) -> bool {
    address.zone.is_none() || address.zone == nic.zone
}

/// What makes a NIC forward that has all private addresses already: somebody has switched that off, or never was one needed.
fn make_ready(nic: &Nic, address: &PublicAddress) -> Option<Step> {
    (!nic.is_ready).then(|| Step::Prepare(nic.clone(), address.clone()))
}

/// Private addresses at the next standbys, and none elsewhere.
fn prepare_standbys<'a>(
    world: &World<'a>,
    address: &'a PublicAddress,
    desired: &DesiredVip,
    room: &mut Room<'a>,
    steps: &mut Vec<Step>,
) {
    let nics = desired.standbys.iter().filter_map(|gateway| world.by_gateway.get(gateway.as_str()).copied());
    let nics: Vec<&Nic> = nics.filter(|nic| is_in_zone(address, nic)).collect();
    let mut wanted = 0;
    for nic in &nics {
        if wanted == PREPARED_STANDBYS {
            break;
        }
        if let Some(private) = address.private.get(&nic.id) {
            wanted += 1;
            if room.doubles.contains(&(&nic.id, &address.id)) {
                let binding = Binding { address: address.clone(), private: *private };
                steps.push(Step::Unprepare((*nic).clone(), binding));
            } else {
                steps.extend(make_ready(nic, address));
            }
        } else if room.take(nic, address) {
            wanted += 1;
            steps.push(Step::Prepare((*nic).clone(), address.clone()));
        }
    }
    let attached_at = address.attachment.as_ref().and_then(|attachment| attachment.nic.as_ref());
    for (id, private) in reserved(address) {
        // A gateway that may take it over keeps its private address as long as it has one.
        let is_candidate = nics.iter().any(|nic| nic.id == *id);
        if let Some(nic) =
            world.nics.get(id).filter(|nic| nic.associate == Associate::Nic && !is_candidate && attached_at != Some(id))
        {
            let binding = Binding { address: address.clone(), private: *private };
            steps.push(Step::Unprepare((*nic).clone(), binding));
        }
    }
}
