//! The provider of the model: its state, what requests do to it, and what people do.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

use super::{Action, MAX_LAG, assert_releasable};
use crate::provider::{
    AddressId, Associate, Attachment, Binding, Capacity, Claim, Nic, NicId, Observation, PublicAddress,
};

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// It fails or gets lost.
    NotDone,
    /// It ends after this many addresses.
    Partly(usize),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Address {
    zone: Option<String>,
    has_tags: bool,
    claim: Option<Claim>,
    /// Steps since it has been free of claims.
    unclaimed_for: u64,
    token: Option<String>,
    attachment: Option<(NicId, IpAddr)>,
    /// Whether a person attached it.
    is_foreign: bool,
    private: BTreeMap<NicId, IpAddr>,
}

#[derive(Clone, Debug)]
struct Interface {
    gateway: String,
    primary: IpAddr,
    capacity: Capacity,
    zone: String,
    associate: Associate,
    is_there: bool,
    is_busy: bool,
    is_ready: bool,
}

/// The state of the provider, and earlier states of addresses, latest first.
#[derive(Default)]
pub(super) struct Truth {
    addresses: BTreeMap<IpAddr, Address>,
    history: VecDeque<BTreeMap<IpAddr, Address>>,
    nics: BTreeMap<NicId, Interface>,
    next_private: u32,
}

fn foreign_nic() -> NicId {
    NicId("foreign".into())
}

fn id_of(address: IpAddr) -> AddressId {
    AddressId(format!("id-{address}"))
}

impl Truth {
    pub(super) fn add_address(&mut self, address: IpAddr, zone: Option<String>) {
        self.insert(address, zone, true);
    }

    /// An address that is listed, and has no tags.
    pub(super) fn add_untagged(&mut self, address: IpAddr) {
        self.insert(address, None, false);
    }

    fn insert(&mut self, address: IpAddr, zone: Option<String>, has_tags: bool) {
        let new = Address {
            zone,
            has_tags,
            claim: None,
            unclaimed_for: MAX_LAG + 1,
            token: None,
            attachment: None,
            is_foreign: false,
            private: BTreeMap::new(),
        };
        self.addresses.entry(address).or_insert(new);
    }

    pub(super) fn add_nic(&mut self, gateway: &str, number: u8, capacity: Capacity, zone: &str, associate: Associate) {
        let nic = Interface {
            gateway: gateway.to_owned(),
            primary: Ipv4Addr::new(10, 0, 0, number).into(),
            capacity,
            zone: zone.to_owned(),
            associate,
            is_there: true,
            is_busy: false,
            is_ready: false,
        };
        self.nics.insert(NicId(format!("nic-{gateway}")), nic);
    }

    pub(super) fn tick(&mut self) {
        self.history.push_front(self.addresses.clone());
        self.history.truncate(MAX_LAG as usize);
        for address in self.addresses.values_mut() {
            address.unclaimed_for = if address.claim.is_some() { 0 } else { address.unclaimed_for + 1 };
        }
    }

    /// Reads everything, each address at its age in steps.
    pub(super) fn observe(&self, mut age: impl FnMut() -> u64) -> Observation {
        let read = |(ip, now): (&IpAddr, &Address)| {
            let earlier = (age() as usize).checked_sub(1).and_then(|at| self.history.get(at)?.get(ip));
            self.public(*ip, earlier.unwrap_or(now))
        };
        let addresses = self.addresses.iter().map(read).collect();
        let nic = |(id, nic): (&NicId, &Interface)| Nic {
            id: id.clone(),
            gateway: nic.gateway.clone(),
            zone: Some(nic.zone.clone()),
            capacity: nic.capacity,
            associate: nic.associate,
            is_busy: nic.is_busy,
            is_ready: nic.is_ready,
            missing: Vec::new(),
            version: String::new(),
        };
        Observation { addresses, nics: self.nics.iter().filter(|(_, nic)| nic.is_there).map(nic).collect() }
    }

    fn public(&self, ip: IpAddr, address: &Address) -> PublicAddress {
        let mut private = address.private.clone();
        if address.claim.is_some() && ip.is_ipv4() {
            let instances = self.nics.iter().filter(|(_, nic)| nic.associate == Associate::Instance && nic.is_there);
            private.extend(instances.map(|(id, nic)| (id.clone(), nic.primary)));
        }
        if !address.has_tags {
            private = self.nics.iter().filter(|(_, nic)| nic.is_there).map(|(id, _)| (id.clone(), ip)).collect();
        }
        let attachment =
            |(nic, private): &(NicId, IpAddr)| Attachment { nic: Some(nic.clone()), private: Some(*private), id: None };
        PublicAddress {
            id: id_of(ip),
            address: ip,
            zone: address.zone.clone(),
            has_tags: address.has_tags,
            claim: address.claim.clone(),
            is_allocated: address.token.is_some(),
            attachment: address.attachment.as_ref().map(attachment),
            private,
            version: String::new(),
        }
    }

    /// The addresses that were allocated.
    pub(super) fn allocated(&self) -> impl Iterator<Item = AddressId> {
        self.addresses.iter().filter(|(_, address)| address.token.is_some()).map(|(ip, _)| id_of(*ip))
    }

    /// Carries out an action, as far as the fault lets it.
    pub(super) fn carry_out(&mut self, action: &Action, fault: Fault, cluster: &str) {
        let mut left = match fault {
            Fault::None => usize::MAX,
            Fault::NotDone => 0,
            Fault::Partly(count) => count,
        };
        let mut goes_on = || {
            left = left.saturating_sub(1);
            left > 0
        };
        match action {
            Action::Claim(address, claim) if goes_on() => self.claim(address.address, claim),
            Action::Unclaim(address) if goes_on() => self.unclaim(address.address, cluster),
            Action::Prepare(nic, all) => {
                all.iter()
                    .take_while(|_| goes_on())
                    .for_each(|address| self.prepare(&nic.id, address.address, cluster));
            }
            Action::Unprepare(nic, all) => {
                all.iter()
                    .take_while(|_| goes_on())
                    .for_each(|it| self.unprepare(&nic.id, it.address.address, cluster));
            }
            Action::Attach(nic, all) => {
                all.iter().take_while(|_| goes_on()).for_each(|binding| self.attach(None, &nic.id, binding, cluster));
            }
            Action::Move(from, nic, all) => {
                all.iter()
                    .take_while(|_| goes_on())
                    .for_each(|binding| self.attach(Some(from), &nic.id, binding, cluster));
            }
            Action::Detach(from, all) => {
                all.iter().take_while(|_| goes_on()).for_each(|address| self.detach(from, address.address, cluster));
            }
            Action::Allocate(allocation) if goes_on() => self.allocate(&allocation.token, &allocation.claim),
            Action::Release(address) if goes_on() => self.release(address.address),
            _ => {}
        }
    }

    fn ours(&mut self, address: IpAddr, cluster: &str) -> Option<&mut Address> {
        let address = self.addresses.get_mut(&address)?;
        let is_ours = address.claim.as_ref().is_some_and(|claim| claim.cluster == cluster);
        (is_ours || !address.has_tags).then_some(address)
    }

    fn claim(&mut self, address: IpAddr, claim: &Claim) {
        let Some(address) = self.addresses.get_mut(&address) else { return };
        let is_free = address.claim.as_ref().is_none_or(|other| other.cluster == claim.cluster);
        assert!(address.has_tags, "a claim without tags");
        if is_free && !address.is_foreign {
            address.claim = Some(claim.clone());
        }
    }

    fn unclaim(&mut self, address: IpAddr, cluster: &str) {
        if let Some(address) = self.ours(address, cluster) {
            address.claim = None;
        }
    }

    fn prepare(&mut self, nic: &NicId, address: IpAddr, cluster: &str) {
        let Some(interface) = self.nics.get_mut(nic).filter(|nic| nic.is_there && !nic.is_busy) else { return };
        interface.is_ready = true;
        let has_tags = self.addresses.get(&address).is_some_and(|address| address.has_tags);
        let capacity = interface.capacity.of(address);
        if interface.associate == Associate::Instance || !has_tags || self.used(nic, address) >= capacity {
            return;
        }
        let private = Ipv4Addr::from_bits(0x0a01_0000 + self.next_private);
        let private = if address.is_ipv6() { private.to_ipv6_mapped().into() } else { private.into() };
        if let Some(address) = self.ours(address, cluster) {
            address.private.entry(nic.clone()).or_insert(private);
            self.next_private += 1;
        }
    }

    /// What takes room at a NIC in the family of an address.
    fn used(&self, nic: &NicId, of: IpAddr) -> usize {
        let of_family = self.addresses.iter().filter(|(ip, _)| ip.is_ipv6() == of.is_ipv6());
        let takes_room = |(ip, address): &(&IpAddr, &Address)| {
            address.private.contains_key(nic) || address.attachment.as_ref() == Some(&(nic.clone(), **ip))
        };
        of_family.filter(takes_room).count()
    }

    fn unprepare(&mut self, nic: &NicId, address: IpAddr, cluster: &str) {
        let is_there = self.nics.get(nic).is_some_and(|nic| nic.is_there && !nic.is_busy);
        // The private address is the NIC's, whoever has the claim now.
        if let Some(address) = self.addresses.get_mut(&address)
            && address.claim.as_ref().is_none_or(|claim| claim.cluster == cluster)
            && is_there
            && address
                .attachment
                .as_ref()
                .is_none_or(|(at, private)| address.private.get(at) != Some(private) || at != nic)
        {
            let private = address.private.remove(nic);
            // Where it was bound twice, it is gone for the other one, too, unless that is attached there.
            for other in self.addresses.values_mut() {
                let is_attached =
                    other.attachment.as_ref().is_some_and(|(at, at_private)| at == nic && Some(*at_private) == private);
                if private.is_some() && other.private.get(nic) == private.as_ref() && !is_attached {
                    other.private.remove(nic);
                }
            }
        }
    }

    fn attach(&mut self, from: Option<&NicId>, nic: &NicId, binding: &Binding, cluster: &str) {
        let Some(interface) = self.nics.get(nic).filter(|nic| nic.is_there && !nic.is_busy).cloned() else { return };
        let place = (nic.clone(), binding.private);
        let is_used = self.addresses.values().any(|address| address.attachment.as_ref() == Some(&place));
        let ip = binding.address.address;
        let Some(address) = self.addresses.get(&ip) else { return };
        let is_allowed = match &address.attachment {
            None => true,
            Some((at, _)) => Some(at) == from && !address.is_foreign,
        };
        let is_bound = interface.associate == Associate::Instance
            || !address.has_tags
            || address.private.get(nic) == Some(&binding.private);
        let is_full = !address.has_tags && self.used(nic, ip) >= interface.capacity.of(ip);
        if !is_allowed || is_used || !is_bound || is_full {
            return;
        }
        let claim = address.claim.as_ref().map(|claim| claim.cluster.as_str());
        assert!(claim.is_none_or(|claim| claim == cluster), "{ip} of {claim:?} is attached");
        // An old read may miss that a person has taken the claim away; then the provider reads again, and refuses.
        if claim.is_some() || !address.has_tags {
            self.addresses.get_mut(&ip).unwrap().attachment = Some(place);
        }
    }

    fn detach(&mut self, from: &NicId, address: IpAddr, cluster: &str) {
        if let Some(address) = self.ours(address, cluster)
            && address.attachment.as_ref().is_some_and(|(at, _)| at == from)
            && !address.is_foreign
        {
            address.attachment = None;
        }
    }

    fn allocate(&mut self, token: &str, claim: &Claim) {
        if self.addresses.values().all(|address| address.token.as_deref() != Some(token)) {
            let ip = Ipv4Addr::new(203, 0, 113, 100 + self.next_private as u8 % 100).into();
            self.next_private += 1;
            self.add_address(ip, None);
            let address = self.addresses.get_mut(&ip).unwrap();
            if address.claim.is_none() && address.attachment.is_none() {
                (address.token, address.claim) = (Some(token.to_owned()), Some(claim.clone()));
            }
        }
    }

    fn release(&mut self, ip: IpAddr) {
        let Some(address) = self.addresses.get(&ip).filter(|it| it.attachment.is_none() && it.claim.is_none()) else {
            return;
        };
        assert_releasable(&id_of(ip), address.token.is_some());
        self.addresses.remove(&ip);
        self.history.iter_mut().for_each(|past| drop(past.remove(&ip)));
    }
}

/// What people do.
impl Truth {
    pub(super) fn attach_elsewhere(&mut self, address: IpAddr) {
        if let Some(address) = self.addresses.get_mut(&address).filter(|address| address.attachment.is_none()) {
            (address.attachment, address.is_foreign) = (Some((foreign_nic(), Ipv4Addr::LOCALHOST.into())), true);
        }
    }

    pub(super) fn reattach_elsewhere(&mut self, address: IpAddr) {
        if let Some(address) = self.addresses.get_mut(&address) {
            (address.attachment, address.is_foreign) = (Some((foreign_nic(), Ipv4Addr::LOCALHOST.into())), true);
        }
    }

    /// To an address of the gateway's NIC that vipgate doesn't use.
    pub(super) fn attach_by_hand_to(&mut self, gateway: &str, address: IpAddr) {
        let place = (NicId(format!("nic-{gateway}")), IpAddr::from(Ipv4Addr::new(10, 9, 9, 9)));
        if let Some(address) = self.addresses.get_mut(&address).filter(|address| address.attachment.is_none()) {
            (address.attachment, address.is_foreign) = (Some(place), true);
        }
    }

    pub(super) fn detach_by_hand(&mut self, address: IpAddr) {
        if let Some(address) = self.addresses.get_mut(&address) {
            (address.attachment, address.is_foreign) = (None, false);
        }
    }

    pub(super) fn remove_claim(&mut self, address: IpAddr) {
        if let Some(address) = self.addresses.get_mut(&address) {
            address.claim = None;
        }
    }

    /// Another cluster, which claims only what is free, and has read that after the last claim's end was to be seen.
    pub(super) fn claim_by_other(&mut self, address: IpAddr, lag: u64) {
        if let Some(address) = self.addresses.get_mut(&address)
            && address.has_tags
            && address.claim.is_none()
            && address.attachment.is_none()
            && address.unclaimed_for > lag
        {
            address.claim = Some(Claim { cluster: "theirs".to_owned(), owner: "x/y".to_owned() });
        }
    }

    pub(super) fn toggle_nic(&mut self, gateway: &str) {
        for nic in self.nics.values_mut().filter(|nic| nic.gateway == gateway) {
            nic.is_there = !nic.is_there;
        }
    }

    /// Two writers, of which neither saw what the other one wrote.
    pub(super) fn bind_twice(&mut self, gateway: &str, from: IpAddr, to: IpAddr) -> bool {
        let nic = NicId(format!("nic-{gateway}"));
        let Some(private) = self.addresses.get(&from).and_then(|address| address.private.get(&nic).copied()) else {
            return false;
        };
        let to = self.addresses.get_mut(&to).filter(|to| to.claim.is_some() && !to.private.contains_key(&nic));
        to.is_some_and(|to| to.private.insert(nic, private).is_none())
    }

    pub(super) fn switch_off(&mut self, gateway: &str) {
        for nic in self.nics.values_mut().filter(|nic| nic.gateway == gateway) {
            nic.is_ready = false;
        }
    }

    pub(super) fn toggle_busy(&mut self, gateway: &str) {
        for nic in self.nics.values_mut().filter(|nic| nic.gateway == gateway) {
            nic.is_busy = !nic.is_busy;
        }
    }

    pub(super) fn quiet(&mut self) {
        self.nics.values_mut().for_each(|nic| nic.is_busy = false);
    }

    pub(super) fn is_claimed_by_other(&self, address: IpAddr) -> bool {
        self.addresses[&address].claim.as_ref().is_some_and(|claim| claim.cluster == "theirs")
    }

    /// Whether it is attached to a NIC that is there.
    pub(super) fn is_at_gateway(&self, address: IpAddr) -> bool {
        let at = self.addresses[&address].attachment.as_ref().and_then(|(nic, _)| self.nics.get(nic));
        at.is_some_and(|nic| nic.is_there)
    }

    pub(super) fn is_foreign(&self, address: IpAddr) -> bool {
        self.addresses[&address].is_foreign
    }
}
