//! Next-hop tracking: on which side and for which family packets reach nobody, since no next hop answers, or no route is left. Time is an
//! argument.
//!
//! The prober says which next hops answer, and which did before (`kernel/prober`). Decided here: which of them count, when one that has
//! never answered is down, and which routes are missing.

mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{HopSpec, InterfaceSpec, NetworkSpec, RouteSpec, RouteTarget};

use self::memory::Memory;
use super::fault::{self, Fault, Routes, SIDES, Side};
use crate::config::Health;
use crate::kernel::{LinkState, LinkStatus, NextHopState, NextHopStatus};

/// A next hop: an address behind an interface.
type Hop = (InterfaceId, IpAddr);

/// What next hops are judged by.
pub(super) struct Seen<'a> {
    pub(super) links: &'a [LinkStatus],
    /// What the prober says.
    pub(super) next_hops: &'a [NextHopStatus],
    /// Routes, addresses and neighbours, as the kernel has them.
    pub(super) network: &'a NetworkSpec,
    /// Whether policy needs routes of a family: IPv4's if true.
    pub(super) needs: &'a dyn Fn(bool) -> bool,
}

impl Seen<'_> {
    fn link(&self, id: InterfaceId) -> Option<&LinkStatus> {
        self.links.iter().find(|link| link.id == id)
    }

    fn is_up(&self, id: InterfaceId) -> bool {
        self.link(id).is_some_and(|link| link.state == LinkState::Up)
    }

    /// The next hops of a family's default route: the one that the kernel uses, whichever others have a worse metric.
    fn default_route(&self, is_v4: bool) -> &[HopSpec] {
        let is_it = |route: &&RouteSpec| route.prefix.prefix_len() == 0 && route.prefix.addr().is_ipv4() == is_v4;
        match self.network.routes.iter().find(is_it).map(|route| &route.target) {
            Some(RouteTarget::Via(hops)) => hops.as_slice(),
            Some(RouteTarget::Local | RouteTarget::Unreachable) | None => &[],
        }
    }

    /// Whether the kernel knows a MAC address of the next hop: its own questions were answered, or somebody has entered it.
    fn is_resolved(&self, hop: Hop) -> bool {
        self.network.neighbours.iter().any(|it| (it.interface, it.address) == hop)
    }

    /// Whether the next hop leaves probes unanswered that it has got, and has never answered any. A neighbour solicitation takes an address
    /// to ask from, which an interface that has just come up doesn't have yet.
    fn is_silent(&self, hop: &NextHopStatus) -> bool {
        let has_source = |it: &InterfaceSpec| it.id == hop.interface && it.addresses.iter().any(IpAddr::is_ipv6);
        hop.state == NextHopState::Unknown
            && self.is_up(hop.interface)
            && (hop.address.is_ipv4() || self.network.interfaces.iter().any(has_source))
            && !self.is_resolved(key(hop))
    }

    /// Whether one of them is behind an interface that is a fault by itself.
    fn is_behind_fault(&self, hops: &[Hop], health: &Health) -> bool {
        hops.iter().filter_map(|hop| self.link(hop.0)).any(|link| fault::counts(health.links, self.links, link))
    }

    /// Their addresses, and the names of their interfaces.
    fn named(&self, hops: &[Hop]) -> Vec<(IpAddr, String)> {
        let name = |id| self.link(id).map_or_else(String::new, |link| link.name.clone());
        hops.iter().map(|&(interface, address)| (address, name(interface))).collect()
    }
}

fn key(hop: &NextHopStatus) -> Hop {
    (hop.interface, hop.address)
}

/// How long something has been so, in intervals between probes. Each must have passed before a look of ours: after a pause of this thread,
/// when answers lie there unread, one interval has passed and not many. One more than `health.failures` is enough, since looks and rounds of
/// probes aren't in step.
#[derive(Clone, Copy, Debug)]
struct Wait {
    intervals: u32,
    next: Instant,
}

impl Wait {
    fn begin(now: Instant, health: &Health) -> Self {
        Self { intervals: 0, next: now + health.interval }
    }

    fn look(&mut self, now: Instant, health: &Health) {
        if now >= self.next && !self.is_over(health) {
            self.intervals += 1;
            self.next = now + health.interval;
        }
    }

    fn is_over(&self, health: &Health) -> bool {
        self.intervals > health.failures
    }
}

/// How a next hop stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It answers, probes or the kernel.
    Answers,
    /// It answers no more, or never has.
    Down,
    /// It has never answered, and still has time to.
    Open,
}

/// The next hops by which one side is judged for one family.
#[derive(Debug)]
struct Group {
    side: &'static str,
    is_v4: bool,
    /// The side has a default route, be its interfaces up or down.
    has_default: bool,
    /// It has a route to some next hop, likewise.
    has_any: bool,
    routes: Routes,
    /// Those that are probed, behind interfaces that are up: where one is down, that is the fault.
    hops: Vec<(Standing, Hop)>,
}

impl Group {
    fn answering(&self) -> Vec<Hop> {
        self.hops.iter().filter(|hop| hop.0 == Standing::Answers).map(|hop| hop.1).collect()
    }

    fn answers(&self) -> bool {
        self.hops.iter().any(|hop| hop.0 == Standing::Answers)
    }

    fn is_dead(&self) -> bool {
        !self.hops.is_empty() && self.hops.iter().all(|hop| hop.0 == Standing::Down)
    }

    fn fault(&self, seen: &Seen<'_>) -> Option<Fault> {
        let all: Vec<Hop> = self.hops.iter().map(|hop| hop.1).collect();
        let Self { side, routes, .. } = *self;
        self.is_dead().then(|| Fault::NextHops { side, routes, hops: seen.named(&all) })
    }
}

/// Judges next hops, and remembers what that takes.
#[derive(Debug)]
pub(super) struct NextHopTracker {
    health: Health,
    /// Since when each one that has never answered is silent.
    silent: BTreeMap<Hop, Wait>,
    /// By side and family.
    memories: [[Memory; 2]; 2],
}

impl NextHopTracker {
    pub(super) fn new(health: Health) -> Self {
        Self { health, silent: BTreeMap::new(), memories: Default::default() }
    }

    /// When to look again without any news.
    pub(super) fn due(&self) -> Option<Instant> {
        let missing = self.memories.iter().flatten().filter_map(Memory::missing);
        let waits = self.silent.values().chain(missing).filter(|wait| !wait.is_over(&self.health));
        waits.map(|wait| wait.next).min()
    }

    /// What is wrong with next hops and routes.
    pub(super) fn judge(&mut self, seen: &Seen<'_>, now: Instant) -> Vec<Fault> {
        self.wait_for_silent(seen, now);
        let mut faults: Vec<Fault> = Vec::new();
        for (at, side) in SIDES.into_iter().enumerate() {
            for is_v4 in [true, false] {
                let group = self.group(seen, side, is_v4);
                let memory = &mut self.memories[at][usize::from(is_v4)];
                let missed = memory.missed(&group, seen, &self.health, now);
                memory.remember(&group);
                // On a link that is both sides it is one fault.
                let found = missed.or_else(|| group.fault(seen).filter(|_| (seen.needs)(is_v4)));
                faults.extend(found.filter(|found| !faults.iter().any(|known| is_same(known, found))));
            }
        }
        faults
    }

    fn wait_for_silent(&mut self, seen: &Seen<'_>, now: Instant) {
        let Self { health, silent, .. } = self;
        let found: BTreeSet<Hop> = seen.next_hops.iter().filter(|hop| seen.is_silent(hop)).map(key).collect();
        silent.retain(|hop, _| found.contains(hop));
        for hop in found {
            silent.entry(hop).or_insert_with(|| Wait::begin(now, health)).look(now, health);
        }
    }

    /// `None`: nothing can be said of it, since it can't be probed.
    fn standing(&self, seen: &Seen<'_>, hop: &NextHopStatus) -> Option<Standing> {
        match hop.state {
            NextHopState::Up => Some(Standing::Answers),
            NextHopState::Down => Some(Standing::Down),
            NextHopState::Unknown if seen.is_resolved(key(hop)) => Some(Standing::Answers),
            NextHopState::Unknown => {
                let wait = self.silent.get(&key(hop))?;
                Some(if wait.is_over(&self.health) { Standing::Down } else { Standing::Open })
            }
        }
    }

    /// A side is judged by its default route. Where it has none, or one whose next hops aren't probed (it leads to the link itself), by all of
    /// its next hops, since no one of them is for most destinations.
    fn group(&self, seen: &Seen<'_>, (side, is_side): Side, is_v4: bool) -> Group {
        let on_side = |id| seen.link(id).is_some_and(|link| is_side(link.role));
        let default: Vec<&HopSpec> = seen.default_route(is_v4).iter().filter(|hop| on_side(hop.interface)).collect();
        let all: Vec<&NextHopStatus> =
            seen.next_hops.iter().filter(|hop| on_side(hop.interface) && hop.address.is_ipv4() == is_v4).collect();
        let (has_default, has_any) = (!default.is_empty(), !default.is_empty() || !all.is_empty());
        let usable: Vec<&HopSpec> = default.into_iter().filter(|hop| seen.is_up(hop.interface)).collect();
        let of_default: Vec<&NextHopStatus> = seen
            .next_hops
            .iter()
            .filter(|probed| usable.iter().any(|hop| self.stands_for(seen, probed, hop, is_v4)))
            .collect();
        let is_probed = |hop: &HopSpec| of_default.iter().any(|probed| self.stands_for(seen, probed, hop, is_v4));
        let (routes, probed) = if !usable.is_empty() && usable.iter().all(|hop| is_probed(hop)) {
            (Routes::Default, of_default)
        } else {
            (Routes::All, all.into_iter().filter(|hop| seen.is_up(hop.interface)).collect())
        };
        let hops = probed.into_iter().filter_map(|hop| Some((self.standing(seen, hop)?, key(hop)))).collect();
        Group { side, is_v4, has_default, has_any, routes, hops }
    }

    /// Whether what is probed tells how a next hop of a default route stands: it is that one, or a target that is probed in its place.
    fn stands_for(&self, seen: &Seen<'_>, probed: &NextHopStatus, hop: &HopSpec, is_v4: bool) -> bool {
        let name = seen.link(hop.interface).map(|link| link.name.as_str());
        let is_target = || {
            probed.address.is_ipv4() == is_v4
                && self.health.targets.iter().any(|target| Some(target.interface.as_str()) == name)
        };
        probed.interface == hop.interface && (Some(probed.address) == hop.gateway || is_target())
    }
}

fn is_same(one: &Fault, other: &Fault) -> bool {
    match (one, other) {
        (Fault::NextHops { hops: one, .. }, Fault::NextHops { hops: other, .. }) => one == other,
        (Fault::NoRoute { is_v4, hops, .. }, Fault::NoRoute { is_v4: other_is_v4, hops: other, .. }) => {
            is_v4 == other_is_v4 && hops == other
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
