//! Makes actions of steps: those of the same kind at the same NIC are one. Each NIC has one action at a time, since some
//! providers replace a NIC as a whole, and so has each address, since others replace its tags.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, AddressPlan};
use crate::provider::{AddressId, Allocation, Binding, Claim, Nic, NicId, PublicAddress};

/// The next step of an address. In the order of urgency: what restores traffic, then what prepares for it, then what tidies up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Move(NicId, Nic, Binding),
    Attach(Nic, Binding),
    Detach(NicId, PublicAddress),
    Claim(PublicAddress, Claim),
    Prepare(Nic, PublicAddress),
    Allocate(Allocation),
    Unprepare(Nic, Binding),
    Unclaim(PublicAddress),
    Release(PublicAddress),
}

/// Addresses that one action has at most, so that no action takes long.
const MAX_ADDRESSES: usize = 100;

/// What an action does where: steps with the same key are one action. The number is the urgency.
type Key = (u8, Option<NicId>, Option<NicId>);

impl Step {
    fn key(&self) -> Key {
        match self {
            Self::Move(from, to, _) => (0, Some(from.clone()), Some(to.id.clone())),
            Self::Attach(nic, _) => (1, Some(nic.id.clone()), None),
            Self::Detach(from, _) => (2, Some(from.clone()), None),
            Self::Claim(..) => (3, None, None),
            Self::Prepare(nic, _) => (4, Some(nic.id.clone()), None),
            Self::Allocate(_) => (5, None, None),
            Self::Unprepare(nic, _) => (6, Some(nic.id.clone()), None),
            Self::Unclaim(_) => (7, None, None),
            Self::Release(_) => (8, None, None),
        }
    }

    /// The address; `None`: there is none yet.
    fn address(&self) -> Option<&AddressId> {
        match self {
            Self::Move(_, _, binding) | Self::Attach(_, binding) | Self::Unprepare(_, binding) => {
                Some(&binding.address.id)
            }
            Self::Detach(_, address)
            | Self::Claim(address, _)
            | Self::Prepare(_, address)
            | Self::Unclaim(address)
            | Self::Release(address) => Some(&address.id),
            Self::Allocate(_) => None,
        }
    }

    /// Whether an operation on its NIC is under way.
    fn is_busy(&self) -> bool {
        match self {
            Self::Move(_, nic, _) | Self::Attach(nic, _) | Self::Prepare(nic, _) | Self::Unprepare(nic, _) => {
                nic.is_busy
            }
            _ => false,
        }
    }
}

pub(super) fn schedule(steps: Vec<Step>, plan: &mut AddressPlan) {
    plan.is_waiting |= !steps.is_empty();
    let mut groups: BTreeMap<Key, Vec<Step>> = BTreeMap::new();
    for step in steps.into_iter().filter(|step| !step.is_busy()) {
        groups.entry(step.key()).or_default().push(step);
    }
    let (mut used, mut changed): (BTreeSet<NicId>, BTreeSet<AddressId>) = Default::default();
    for ((_, one, other), mut group) in groups {
        let nics: Vec<NicId> = one.into_iter().chain(other).collect();
        if nics.iter().any(|nic| used.contains(nic)) {
            continue;
        }
        // A VIP that is to leave a NIC also makes room there for another one: that is the same step twice.
        let mut of_group = BTreeSet::new();
        group.retain(|step| {
            step.address().is_none_or(|address| !changed.contains(address) && of_group.insert(address.clone()))
        });
        if group.is_empty() {
            continue;
        }
        if !nics.is_empty() {
            group.truncate(MAX_ADDRESSES);
        }
        changed.extend(group.iter().filter_map(Step::address).cloned());
        used.extend(nics);
        for step in group {
            add(&mut plan.actions, step);
        }
    }
}

/// Adds a step to the last action if it is of the same kind and NIC, else as an action of its own.
fn add(actions: &mut Vec<Action>, step: Step) {
    match (actions.last_mut(), step) {
        (Some(Action::Move(last, nic, all)), Step::Move(from, to, binding)) if *last == from && nic.id == to.id => {
            all.push(binding);
        }
        (Some(Action::Attach(nic, all)), Step::Attach(to, binding)) if nic.id == to.id => all.push(binding),
        (Some(Action::Detach(last, all)), Step::Detach(from, address)) if *last == from => all.push(address),
        (Some(Action::Prepare(nic, all)), Step::Prepare(to, address)) if nic.id == to.id => all.push(address),
        (Some(Action::Unprepare(nic, all)), Step::Unprepare(from, binding)) if nic.id == from.id => all.push(binding),
        (_, step) => actions.push(match step {
            Step::Move(from, to, binding) => Action::Move(from, to, vec![binding]),
            Step::Attach(nic, binding) => Action::Attach(nic, vec![binding]),
            Step::Detach(from, address) => Action::Detach(from, vec![address]),
            Step::Claim(address, claim) => Action::Claim(address, claim),
            Step::Prepare(nic, address) => Action::Prepare(nic, vec![address]),
            Step::Allocate(allocation) => Action::Allocate(allocation),
            Step::Unprepare(nic, binding) => Action::Unprepare(nic, vec![binding]),
            Step::Unclaim(address) => Action::Unclaim(address),
            Step::Release(address) => Action::Release(address),
        }),
    }
}
