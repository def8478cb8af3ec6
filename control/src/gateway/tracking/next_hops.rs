//! Next-hop tracking: finds, by side and address family, whether all next hops are down or the routes are missing. Time
//! is an argument.
//!
//! The prober (`kernel/prober`) reports which next hops reply. This module decides which of them count, when one that
//! has never replied is down, and which routes are missing.

mod missing_routes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{HopSpec, InterfaceSpec, NetworkSpec, RouteSpec, RouteTarget};

use self::missing_routes::MissingRoutes;
use crate::config::Health;
use crate::kernel::{LinkState, LinkStatus, NextHopState, NextHopStatus};
use crate::state::fault;
use crate::state::fault::{Fault, RouteScope, SIDES, Side};

/// A next hop: an address on an interface.
type NextHop = (InterfaceId, IpAddr);

/// The inputs of next-hop tracking.
pub(super) struct TrackingInput<'a> {
    pub(super) links: &'a [LinkStatus],
    /// States from the prober.
    pub(super) next_hops: &'a [NextHopStatus],
    /// Routes, addresses and neighbors of the kernel.
    pub(super) network: &'a NetworkSpec,
    /// Whether policy needs routes of an address family: IPv4 if `true`.
    pub(super) needs: &'a dyn Fn(bool) -> bool,
}

impl TrackingInput<'_> {
    fn link(&self, id: InterfaceId) -> Option<&LinkStatus> {
        self.links.iter().find(|link| link.id == id)
    }

    fn is_up(&self, id: InterfaceId) -> bool {
        self.link(id).is_some_and(|link| link.state == LinkState::Up)
    }

    /// The next hops of the default route with the best metric.
    fn default_route(&self, is_v4: bool) -> &[HopSpec] {
        let is_default = |route: &&RouteSpec| route.prefix.prefix_len() == 0 && route.prefix.addr().is_ipv4() == is_v4;
        match self.network.routes.iter().find(is_default).map(|route| &route.target) {
            Some(RouteTarget::Via(hops)) => hops.as_slice(),
            Some(RouteTarget::Local | RouteTarget::Unreachable) | None => &[],
        }
    }

    /// Whether the kernel has a neighbor entry with a MAC address for the next hop, resolved or static.
    fn is_resolved(&self, hop: NextHop) -> bool {
        self.network.neighbors.iter().any(|it| (it.interface, it.address) == hop)
    }

    /// Whether the next hop is probed and has never replied. A neighbor solicitation requires a source address, which
    /// an interface that has just come up doesn't have yet.
    fn is_silent(&self, hop: &NextHopStatus) -> bool {
        let has_source = |it: &InterfaceSpec| it.id == hop.interface && it.addresses.iter().any(IpAddr::is_ipv6);
        hop.state == NextHopState::Unknown
            && self.is_up(hop.interface)
            && (hop.address.is_ipv4() || self.network.interfaces.iter().any(has_source))
            && !self.is_resolved(key(hop))
    }

    /// Whether one of the next hops is on an interface with a fault of its own.
    fn is_behind_fault(&self, hops: &[NextHop], health: &Health) -> bool {
        hops.iter()
            .filter_map(|hop| self.link(hop.0))
            .any(|link| fault::is_interface_fault(health.links, self.links, link))
    }

    /// Addresses and interface names of next hops.
    fn with_interface_names(&self, hops: &[NextHop]) -> Vec<(IpAddr, String)> {
        let name = |id| self.link(id).map_or_else(String::new, |link| link.name.clone());
        hops.iter().map(|&(interface, address)| (address, name(interface))).collect()
    }
}

fn key(hop: &NextHopStatus) -> NextHop {
    (hop.interface, hop.address)
}

/// Timer in probe intervals. At most one interval counts for each evaluation: after a pause of this thread there may be
/// unread replies, so several intervals at once prove nothing. Expires after `health.failures` + 1 intervals, since
/// evaluations and probes aren't aligned.
#[derive(Clone, Copy, Debug)]
struct ProbeTimer {
    intervals: u32,
    next: Instant,
}

impl ProbeTimer {
    fn start(now: Instant, health: &Health) -> Self {
        Self { intervals: 0, next: now + health.interval }
    }

    fn tick(&mut self, now: Instant, health: &Health) {
        if now >= self.next && !self.has_expired(health) {
            self.intervals += 1;
            self.next = now + health.interval;
        }
    }

    fn has_expired(&self, health: &Health) -> bool {
        self.intervals > health.failures
    }
}

/// Reachability of a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reachability {
    /// Replies to probes, or the kernel has resolved it.
    Up,
    /// Doesn't reply any more, or never has within the timeout.
    Down,
    /// Has never replied; the timeout hasn't expired yet.
    Pending,
}

/// The next hops that determine whether one side is up for one address family.
#[derive(Debug)]
struct NextHopGroup {
    side: &'static str,
    is_v4: bool,
    /// Whether the side has a default route; its interfaces may be down.
    has_default: bool,
    /// Whether it has a route to any next hop; its interface may be down.
    has_any: bool,
    routes: RouteScope,
    /// The probed next hops on interfaces that are up; an interface that is down is a fault of its own.
    hops: Vec<(Reachability, NextHop)>,
}

impl NextHopGroup {
    fn next_hops_up(&self) -> Vec<NextHop> {
        self.hops.iter().filter(|hop| hop.0 == Reachability::Up).map(|hop| hop.1).collect()
    }

    fn any_up(&self) -> bool {
        self.hops.iter().any(|hop| hop.0 == Reachability::Up)
    }

    fn all_down(&self) -> bool {
        !self.hops.is_empty() && self.hops.iter().all(|hop| hop.0 == Reachability::Down)
    }

    fn fault(&self, input: &TrackingInput<'_>) -> Option<Fault> {
        let all: Vec<NextHop> = self.hops.iter().map(|hop| hop.1).collect();
        let Self { side, routes, .. } = *self;
        self.all_down().then(|| Fault::NextHopsDown { side, routes, hops: input.with_interface_names(&all) })
    }
}

/// Tracks next hops over time.
#[derive(Debug)]
pub(super) struct NextHopTracker {
    health: Health,
    /// Timeouts of next hops that have never replied.
    silent: BTreeMap<NextHop, ProbeTimer>,
    /// By side and address family.
    memories: [[MissingRoutes; 2]; 2],
}

impl NextHopTracker {
    pub(super) fn new(health: Health) -> Self {
        Self { health, silent: BTreeMap::new(), memories: Default::default() }
    }

    /// When to evaluate again without new input.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let missing = self.memories.iter().flatten().filter_map(MissingRoutes::missing);
        let timers = self.silent.values().chain(missing).filter(|timer| !timer.has_expired(&self.health));
        timers.map(|timer| timer.next).min()
    }

    /// Returns the faults of next hops and routes.
    pub(super) fn evaluate(&mut self, input: &TrackingInput<'_>, now: Instant) -> Vec<Fault> {
        self.update_silent(input, now);
        let mut faults: Vec<Fault> = Vec::new();
        for (index, side) in SIDES.into_iter().enumerate() {
            for is_v4 in [true, false] {
                let group = self.group(input, side, is_v4);
                let memory = &mut self.memories[index][usize::from(is_v4)];
                let missing = memory.fault(&group, input, &self.health, now);
                memory.record(&group);
                // On an interface with role `both` it is one fault.
                let fault = missing.or_else(|| group.fault(input).filter(|_| (input.needs)(is_v4)));
                faults.extend(fault.filter(|fault| !faults.iter().any(|other| is_same(other, fault))));
            }
        }
        faults
    }

    fn update_silent(&mut self, input: &TrackingInput<'_>, now: Instant) {
        let Self { health, silent, .. } = self;
        let current: BTreeSet<NextHop> = input.next_hops.iter().filter(|hop| input.is_silent(hop)).map(key).collect();
        silent.retain(|hop, _| current.contains(hop));
        for hop in current {
            silent.entry(hop).or_insert_with(|| ProbeTimer::start(now, health)).tick(now, health);
        }
    }

    /// `None`: unknown, since it can't be probed.
    fn reachability(&self, input: &TrackingInput<'_>, hop: &NextHopStatus) -> Option<Reachability> {
        match hop.state {
            NextHopState::Up => Some(Reachability::Up),
            NextHopState::Down => Some(Reachability::Down),
            NextHopState::Unknown if input.is_resolved(key(hop)) => Some(Reachability::Up),
            NextHopState::Unknown => {
                let timer = self.silent.get(&key(hop))?;
                Some(if timer.has_expired(&self.health) { Reachability::Down } else { Reachability::Pending })
            }
        }
    }

    /// The next hops that count for a side: those of its default route. Without one, or if its next hops aren't probed
    /// (an on-link default route), all next hops of the side, since none of them carries most destinations.
    fn group(&self, input: &TrackingInput<'_>, (side, is_side): Side, is_v4: bool) -> NextHopGroup {
        let on_side = |id| input.link(id).is_some_and(|link| is_side(link.role));
        let default: Vec<&HopSpec> = input.default_route(is_v4).iter().filter(|hop| on_side(hop.interface)).collect();
        let all: Vec<&NextHopStatus> =
            input.next_hops.iter().filter(|hop| on_side(hop.interface) && hop.address.is_ipv4() == is_v4).collect();
        let (has_default, has_any) = (!default.is_empty(), !default.is_empty() || !all.is_empty());
        let usable: Vec<&HopSpec> = default.into_iter().filter(|hop| input.is_up(hop.interface)).collect();
        let of_default: Vec<&NextHopStatus> = input
            .next_hops
            .iter()
            .filter(|probed| usable.iter().any(|hop| self.represents(input, probed, hop, is_v4)))
            .collect();
        let is_probed = |hop: &HopSpec| of_default.iter().any(|probed| self.represents(input, probed, hop, is_v4));
        let (routes, probed) = if !usable.is_empty() && usable.iter().all(|hop| is_probed(hop)) {
            (RouteScope::Default, of_default)
        } else {
            (RouteScope::All, all.into_iter().filter(|hop| input.is_up(hop.interface)).collect())
        };
        let hops = probed.into_iter().filter_map(|hop| Some((self.reachability(input, hop)?, key(hop)))).collect();
        NextHopGroup { side, is_v4, has_default, has_any, routes, hops }
    }

    /// Whether a probed next hop represents one of the default route: it is the same, or a configured target on its
    /// interface.
    fn represents(&self, input: &TrackingInput<'_>, probed: &NextHopStatus, hop: &HopSpec, is_v4: bool) -> bool {
        let name = input.link(hop.interface).map(|link| link.name.as_str());
        let is_target = || {
            probed.address.is_ipv4() == is_v4
                && self.health.targets.iter().any(|target| Some(target.interface.as_str()) == name)
        };
        probed.interface == hop.interface && (Some(probed.address) == hop.gateway || is_target())
    }
}

fn is_same(one: &Fault, other: &Fault) -> bool {
    match (one, other) {
        (Fault::NextHopsDown { hops: one, .. }, Fault::NextHopsDown { hops: other, .. }) => one == other,
        (Fault::NoRoute { is_v4, hops, .. }, Fault::NoRoute { is_v4: other_is_v4, hops: other, .. }) => {
            is_v4 == other_is_v4 && hops == other
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
