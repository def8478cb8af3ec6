//! Random worlds: gateways die, requests fail, get lost or are half done, reads are old, people change things by hand, and two
//! servers plan at the same time. At each request: it harms nobody. At the end, when all is quiet: everything is as desired, as
//! far as it can be.
//!
//! `VIPGATE_MODEL_WORLDS` sets how many there are, `VIPGATE_MODEL_FIRST` the number of the first.

mod world;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use vipgate_coverage::Coverage;

use self::world::{Fault, Truth};
use super::{Action, AddressPlan, Desired, DesiredVip, GatewayState, Problem, plan};
use crate::provider::{AddressId, Allocation, Associate, Capacity, Claim, NicId, Observation, PublicAddress, Tags};

/// Worlds by default; a million with `make model`.
const WORLDS: u64 = 50_000;
/// Steps of a world.
const STEPS: u32 = 40;
/// Rounds until all is done, when nothing disturbs.
const MAX_ROUNDS: u32 = 80;
/// Age of a read, in steps, at most.
const MAX_LAG: u64 = 3;

const CLUSTER: &str = "ours";
const GATEWAYS: [&str; 3] = ["a", "b", "c"];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

fn vip(number: usize) -> IpAddr {
    let address = Ipv4Addr::new(203, 0, 113, number as u8);
    if number.is_multiple_of(2) { address.to_ipv6_mapped().into() } else { address.into() }
}

/// A world, its policy, and what was desired before: another server may still act on that.
struct Simulation<'a> {
    random: Random,
    truth: Truth,
    desired: Desired,
    former: Desired,
    associate: Associate,
    coverage: &'a Coverage,
}

impl<'a> Simulation<'a> {
    fn new(seed: u64, coverage: &'a Coverage) -> Self {
        let mut random = Random(seed);
        let associate = if random.chance(25) { Associate::Instance } else { Associate::Nic };
        let mut truth = Truth::default();
        for number in 1..=2 + random.below(4) {
            // A primary private address is of IPv4, so only addresses that are their own are of IPv6 then.
            if vip(number).is_ipv6() && (associate == Associate::Instance || random.chance(40)) {
                truth.add_untagged(vip(number));
                continue;
            }
            let zone = random.chance(20).then(|| "z1".to_owned());
            truth.add_address(vip(number), zone);
        }
        for (number, gateway) in GATEWAYS.iter().enumerate() {
            let v4 = if associate == Associate::Instance { 1 } else { 1 + random.below(4) };
            let capacity = Capacity { v4, v6: random.below(4) };
            let zone = if random.chance(70) { "z1" } else { "z2" };
            truth.add_nic(gateway, number as u8, capacity, zone, associate);
        }
        let desired = Desired { cluster: CLUSTER.to_owned(), ..Desired::default() };
        let mut simulation = Self { random, truth, former: desired.clone(), desired, associate, coverage };
        for gateway in GATEWAYS {
            simulation.desired.gateways.insert(gateway.to_owned(), GatewayState::Active);
        }
        for _ in 0..4 {
            simulation.change_policy();
        }
        simulation
    }

    /// Policy or view change.
    fn change_policy(&mut self) {
        if self.random.chance(50) {
            self.former = self.desired.clone();
        }
        let number = 1 + self.random.below(6);
        match self.random.below(6) {
            0..=2 => {
                let mut order: Vec<String> = GATEWAYS.iter().map(|name| (*name).to_owned()).collect();
                let first = self.random.below(3);
                order.rotate_left(first);
                let gateway = (!self.random.chance(10)).then(|| order.remove(0));
                let owner = format!("default/{}", self.random.below(3));
                self.desired.vips.insert(vip(number), DesiredVip { owner, gateway, standbys: order });
            }
            3 => {
                self.desired.vips.remove(&vip(number));
            }
            4 => {
                let gateway = GATEWAYS[self.random.below(3)];
                let state = if self.random.chance(50) { GatewayState::Dead } else { GatewayState::Active };
                self.desired.gateways.insert(gateway.to_owned(), state);
                if state == GatewayState::Dead {
                    self.fail_over(gateway);
                }
            }
            _ => self.change_allocations(),
        }
    }

    /// What placement and view make of a dead gateway.
    fn fail_over(&mut self, dead: &str) {
        self.coverage.count("gateway died");
        for desired in self.desired.vips.values_mut().filter(|desired| desired.gateway.as_deref() == Some(dead)) {
            let alive = desired.standbys.iter().position(|name| self.desired.gateways[name] == GatewayState::Active);
            if let Some(at) = alive {
                let next = desired.standbys.remove(at);
                desired.standbys.insert(0, desired.gateway.replace(next).unwrap_or_default());
            }
        }
    }

    fn change_allocations(&mut self) {
        if self.random.chance(50) {
            self.desired.allocations.clear();
        } else {
            let token = format!("t{}", self.random.below(3));
            let claim = Claim { cluster: CLUSTER.to_owned(), owner: format!("default/{token}") };
            self.desired.allocations = vec![Allocation { tags: Tags::new(), claim, is_ipv6: false, zone: None, token }];
        }
        self.desired.releasable = self.truth.allocated().filter(|_| self.random.next() & 1 == 0).collect();
    }

    /// A server observes, plans and carries out.
    fn act(&mut self) {
        let lag = if self.random.chance(40) { self.random.next() % (MAX_LAG + 1) } else { 0 };
        let observed = self.truth.observe(|| if lag == 0 { 0 } else { self.random.next() % (lag + 1) });
        let is_other = self.random.chance(10);
        let desired = if is_other { &self.former } else { &self.desired };
        let plan = plan(desired, &observed);
        if is_other && !plan.actions.is_empty() {
            self.coverage.count("other server acted");
        }
        let stops_after = if self.random.chance(15) { self.random.below(3) } else { usize::MAX };
        for action in plan.actions.iter().take(stops_after) {
            let fault = match self.random.below(10) {
                0 => Fault::NotDone,
                1 => Fault::Partly(self.random.below(2)),
                _ => Fault::None,
            };
            if fault != Fault::None {
                self.coverage.count("request failed");
            }
            self.coverage.count(name(action));
            self.truth.carry_out(action, fault, CLUSTER);
        }
    }

    /// Somebody changes something by hand.
    fn disturb(&mut self) {
        let number = 1 + self.random.below(6);
        let gateway = GATEWAYS[self.random.below(3)];
        match self.random.below(11) {
            0 => self.truth.attach_elsewhere(vip(number)),
            1 => self.truth.detach_by_hand(vip(number)),
            2 => self.truth.reattach_elsewhere(vip(number)),
            3 => self.truth.remove_claim(vip(number)),
            4 => self.truth.claim_by_other(vip(number), MAX_LAG),
            5 => self.truth.toggle_nic(gateway),
            6 if vip(number).is_ipv6() && self.associate == Associate::Instance => self.truth.add_untagged(vip(number)),
            6 => self.truth.add_address(vip(number), None),
            7 => self.truth.attach_by_hand_to(gateway, vip(number)),
            8 => self.truth.switch_off(gateway),
            9 => {
                // Of the same family.
                let other = 1 + (number + 1) % 6;
                if self.truth.bind_twice(gateway, vip(other), vip(number)) {
                    self.coverage.count("bound twice");
                }
            }
            _ => self.truth.toggle_busy(gateway),
        }
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            match self.random.below(10) {
                0..=1 => self.change_policy(),
                2 => self.disturb(),
                _ => self.act(),
            }
            self.truth.tick();
        }
    }

    /// Nothing disturbs any more: everything is done, and stays so.
    fn converge(&mut self) {
        self.truth.quiet();
        self.desired.allocations.clear();
        for _ in 0..MAX_ROUNDS {
            let plan = plan(&self.desired, &self.truth.observe(|| 0));
            if plan.actions.is_empty() {
                self.check(&plan);
                return;
            }
            for action in &plan.actions {
                self.truth.carry_out(action, Fault::None, CLUSTER);
            }
            self.truth.tick();
        }
        let observed = self.truth.observe(|| 0);
        panic!("still something to do: {:#?}\n{:#?}\n{observed:#?}", plan(&self.desired, &observed), self.desired);
    }

    fn check(&self, plan: &AddressPlan) {
        assert!(!plan.is_waiting, "nothing to do, but waiting");
        let observed = self.truth.observe(|| 0);
        self.check_vips(plan, &observed);
        for address in &observed.addresses {
            let is_ours = address.claim.as_ref().is_some_and(|claim| claim.cluster == CLUSTER);
            if !is_ours || self.desired.vips.contains_key(&address.address) {
                continue;
            }
            panic!("claimed, but no VIP: {address:#?}");
        }
    }

    fn check_vips(&self, plan: &AddressPlan, observed: &Observation) {
        let mut attached: BTreeMap<(&NicId, bool), usize> = BTreeMap::new();
        for address in &observed.addresses {
            if let Some(nic) = address.attachment.as_ref().and_then(|attachment| attachment.nic.as_ref()) {
                *attached.entry((nic, address.address.is_ipv6())).or_default() += 1;
            }
        }
        for (vip, desired) in &self.desired.vips {
            let address = observed.addresses.iter().find(|address| address.address == *vip);
            let nic = desired.gateway.as_ref().and_then(|gateway| observed.nic_of(gateway));
            let at = address.and_then(|address| address.attachment.as_ref()).and_then(|it| it.nic.as_ref());
            if plan.attached.contains(vip) {
                assert_eq!(at, nic.map(|nic| &nic.id), "{vip}");
                assert!(nic.is_some_and(|nic| nic.is_ready), "{vip}: its packets are dropped");
                self.coverage.count("attached");
                continue;
            }
            let problem = plan.problems.get(vip).unwrap_or_else(|| panic!("{vip} is neither attached nor a problem"));
            self.coverage.count(problem.reason());
            match problem {
                Problem::NoAddress => assert!(address.is_none()),
                Problem::OtherCluster(_) => assert!(self.truth.is_claimed_by_other(*vip)),
                // Without tags, and at a primary address, only what is at a NIC that is there, and claimed, can be distinguished from
                // a person's.
                Problem::Attached(_) | Problem::AttachedWithClaim(_) if self.may_be_a_persons(address.unwrap()) => {}
                Problem::Attached(_) | Problem::AttachedWithClaim(_) => {
                    assert!(self.truth.is_foreign(*vip), "{vip} is ours: {address:#?}");
                }
                Problem::NoNic(_) => assert!(nic.is_none()),
                Problem::NoGateway => assert!(desired.gateway.is_none()),
                Problem::OtherZone(_) => assert_ne!(address.unwrap().zone, nic.unwrap().zone),
                Problem::NoCapacity(_) => {
                    let nic = nic.unwrap();
                    let at_home = attached.get(&(&nic.id, vip.is_ipv6())).copied().unwrap_or_default();
                    assert!(
                        at_home >= nic.capacity.of(*vip),
                        "{vip}: {} has room, {:?}: {observed:#?}",
                        nic.id,
                        self.associate
                    );
                }
            }
        }
    }

    fn may_be_a_persons(&self, address: &PublicAddress) -> bool {
        let is_gone = !self.truth.is_at_gateway(address.address);
        let is_instance = self.associate == Associate::Instance;
        !address.has_tags && is_gone || is_instance && (is_gone || address.claim.is_none())
    }
}

fn name(action: &Action) -> &'static str {
    match action {
        Action::Claim(..) => "claim",
        Action::Prepare(..) => "prepare",
        Action::Attach(..) => "attach",
        Action::Move(..) => "move",
        Action::Detach(..) => "detach",
        Action::Unprepare(..) => "unprepare",
        Action::Unclaim(_) => "unclaim",
        Action::Allocate(_) => "allocate",
        Action::Release(_) => "release",
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

#[test]
fn nothing_is_taken_from_anybody_and_every_vip_gets_home() {
    let (first, worlds) =
        (number("VIPGATE_MODEL_FIRST").unwrap_or(0), number("VIPGATE_MODEL_WORLDS").unwrap_or(WORLDS));
    let coverage = Coverage::default();
    for seed in first..first + worlds {
        let world = std::panic::AssertUnwindSafe(|| {
            let mut simulation = Simulation::new(seed, &coverage);
            simulation.run();
            simulation.converge();
        });
        if let Err(panic) = std::panic::catch_unwind(world) {
            eprintln!("world {seed}: VIPGATE_MODEL_FIRST={seed} VIPGATE_MODEL_WORLDS=1 runs it alone");
            std::panic::resume_unwind(panic);
        }
    }
    println!("{worlds} worlds: {coverage:?}");
    if worlds >= WORLDS {
        coverage.assert_reached(&[
            "claim",
            "prepare",
            "attach",
            "move",
            "detach",
            "unprepare",
            "unclaim",
            "allocate",
            "release",
            "gateway died",
            "request failed",
            "bound twice",
            "other server acted",
            "attached",
            "NoAddress",
            "ClaimedByOtherCluster",
            "AttachedElsewhere",
            "NoNic",
            "NoCapacity",
            "OtherZone",
            "NoGateway",
        ]);
    }
}

/// A released address that somebody else could have had would be a loss for them: only what was allocated here is released.
fn assert_releasable(id: &AddressId, is_allocated: bool) {
    assert!(is_allocated, "{id} was not allocated by vipgate, but is released");
}
