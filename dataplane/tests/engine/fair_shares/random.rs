//! Holders that open, confirm, close and go silent at random, in batches, against a slow model: the table counted anew after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_dataplane::address::V6;
use vipgate_dataplane::command::{SessionFilter, SessionState};
use vipgate_dataplane::counters::{Direction, EndReason};
use vipgate_dataplane::session::entry::{Flags, Slot};
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_dataplane::snapshot::spec::ServiceSpec;

use super::{images, take};
use crate::support::services::*;
use crate::support::*;
use crate::tally::{Tally, property};

const CAPACITY: u32 = 384;
const RESERVE: u32 = 128;
const SHARED: u32 = CAPACITY - RESERVE;
/// Who holds sessions: pods, and VIPs for their clients.
const HOLDERS: [&str; 8] = [
    "10.244.1.5",
    "10.244.1.6",
    "10.244.1.21",
    "fd00:244:1::5",
    "fd00:244:1::6",
    "192.0.2.10",
    "192.0.2.11",
    "2001:db8::10",
];

/// One thing that happens.
#[derive(Clone, Debug)]
enum Step {
    /// Packets of new sessions of some holders in one batch.
    Open(Vec<(usize, u8)>),
    /// Whoever gets the last packets of new sessions answers, and the others go on.
    Confirm,
    /// The sessions of a pod are ended by hand.
    Flush(usize),
    /// Another gateway tells of sessions of this pod.
    Standby(usize),
    /// Time passes.
    Pass(u32),
    /// A VIP goes, or is there again.
    Policy(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => prop::collection::vec((0..HOLDERS.len(), 1..=20_u8), 1..4).prop_map(Step::Open),
        5 => Just(Step::Confirm),
        1 => (0..5_usize).prop_map(Step::Flush),
        1 => (0..3_usize).prop_map(Step::Standby),
        1 => (1..2_500_u32).prop_map(Step::Pass),
        1 => any::<bool>().prop_map(Step::Policy),
    ]
}

type Holder = (IpAddr, IpAddr);

/// What is in a table, counted one by one.
#[derive(Default)]
pub(super) struct Model {
    held: u32,
    vips: BTreeMap<IpAddr, u32>,
    members: BTreeMap<Holder, u32>,
    /// Established sessions, by the first packet.
    established: BTreeMap<(SocketAddr, SocketAddr), Holder>,
}

impl Model {
    fn count<A: SessionFamily>(&mut self, sessions: &Sessions) {
        let table = A::table(sessions);
        for slot in (0..table.slots()).map(Slot).filter(|slot| table.deadline(*slot) != 0) {
            let entry = table.entry(slot);
            if entry.flags().has(Flags::QUARANTINED) {
                continue;
            }
            let (pod, _, vip) = entry.parties();
            let is_inbound = entry.direction() == Direction::Inbound;
            let holder = (vip.to_ip(), if is_inbound { vip.to_ip() } else { pod.to_ip() });
            self.held += 1;
            *self.vips.entry(holder.0).or_default() += 1;
            *self.members.entry(holder).or_default() += 1;
            let (state, _) = sessions.state::<A>(slot);
            let is_confirmed = !is_inbound || entry.is_confirmed();
            if !entry.is_copy() && is_confirmed && state == SessionState::Established {
                let key = entry.key();
                let ends = [(key.source, key.source_port), (key.destination, key.destination_port)];
                let [from, to] = ends.map(|(address, port)| SocketAddr::from((address.to_ip(), port)));
                self.established.insert((from, to), holder);
            }
        }
    }

    fn members_of(&self, vip: IpAddr) -> u32 {
        self.members.keys().filter(|(other, _)| *other == vip).count() as u32
    }

    fn of(&self, holder: Holder) -> (u32, u32) {
        let vip = self.vips.get(&holder.0).copied().unwrap_or(0);
        (vip, self.members.get(&holder).copied().unwrap_or(0))
    }

    /// Equal parts of a VIP and of a member of it, with these holders beside those that there are: what they have at least, if they want it.
    fn equal_parts(&self, holder: Holder, more: &BTreeMap<Holder, u32>) -> (u32, u32) {
        let vips: BTreeSet<IpAddr> = self.vips.keys().copied().chain(more.keys().map(|it| it.0)).collect();
        let members: BTreeSet<_> = self.members.keys().chain(more.keys()).filter(|it| it.0 == holder.0).collect();
        let vips = vips.len() as u32;
        (SHARED / vips, SHARED / vips / members.len() as u32)
    }

    /// Whether VIPs, and members of them, have no more than their shares, with what these holders want beside.
    fn is_within(&self, more: &BTreeMap<Holder, u32>) -> impl Fn(Holder) -> (bool, bool) {
        let (mut vips, mut members) = (self.vips.clone(), self.members.clone());
        for (&(vip, member), count) in more {
            *vips.entry(vip).or_default() += count;
            *members.entry((vip, member)).or_default() += count;
        }
        move |holder| {
            let share = level(&vips.values(), SHARED);
            let siblings = members.iter().filter(|(other, _)| other.0 == holder.0).map(|(_, count)| count);
            (vips[&holder.0] <= share, members[&holder] <= level(&siblings, share))
        }
    }
}

/// The largest level with no more than `limit` sessions below it.
fn level<'a>(counts: &(impl Iterator<Item = &'a u32> + Clone), limit: u32) -> u32 {
    let below = |level: u32| counts.clone().map(|count| *count.min(&level)).sum::<u32>();
    (0..=CAPACITY).rev().find(|level| below(*level) <= limit).unwrap()
}

/// Counts a table anew, and compares.
pub(super) fn recount(sessions: &Sessions) -> Model {
    let mut model = Model::default();
    model.count::<u32>(sessions);
    model.count::<V6>(sessions);
    assert_eq!(model.held, sessions.open_count() + sessions.copies());
    for vip in ["192.0.2.10", "192.0.2.11", "2001:db8::10"].map(ip) {
        let of_vip = match vip {
            IpAddr::V4(v4) => sessions.of_vip(v4.to_bits()),
            IpAddr::V6(v6) => sessions.of_vip(V6::from_bits(v6.to_bits())),
        };
        assert_eq!(of_vip, model.vips.get(&vip).copied().unwrap_or(0), "of {vip}");
    }
    for (&(vip, member), &count) in &model.members {
        let counted = match (vip, member) {
            (IpAddr::V4(vip), IpAddr::V4(member)) => sessions.of_member(vip.to_bits(), member.to_bits()),
            (IpAddr::V6(vip), IpAddr::V6(member)) => {
                sessions.of_member(V6::from_bits(vip.to_bits()), V6::from_bits(member.to_bits()))
            }
            _ => unreachable!("a session is of one family"),
        };
        assert_eq!(counted, (count, model.members_of(vip)), "of {member} at {vip}");
    }
    model
}

fn holder(place: usize) -> Holder {
    let own = ip(HOLDERS[place]);
    let vip = match HOLDERS[place] {
        "10.244.1.5" | "10.244.1.6" => "192.0.2.10",
        "10.244.1.21" => "192.0.2.11",
        pod if pod.starts_with("fd00") => "2001:db8::10",
        vip => vip,
    };
    (ip(vip), own)
}

struct Run<'a> {
    gateway: Gateway,
    tally: &'a Tally,
    next: u16,
    /// New sessions' first packets as they left: which way, and to whom.
    left: Vec<(vipgate_dataplane::io::InterfaceId, Vec<u8>)>,
    begun: Vec<(vipgate_dataplane::io::InterfaceId, Vec<u8>)>,
    has_vip: bool,
    standby: Gateway,
}

impl Run<'_> {
    fn model(&self) -> Model {
        recount(&self.gateway.workers[0].tables().sessions)
    }

    fn ended(&self, reason: EndReason) -> u64 {
        self.gateway.workers[0].counters().sessions_ended[reason as usize].get()
    }

    fn set_policy(&mut self) {
        let other = ServiceSpec {
            name: "Service other/api".into(),
            vips: vec![ip("192.0.2.11")],
            ..service(&[backend("10.244.1.21")])
        };
        let mut set = with_services(&[service(&both_pods()), other]);
        if !self.has_vip {
            set.services.remove(1);
            set.vips.retain(|vip| vip.address != ip("192.0.2.11"));
            set.endpoints.retain(|endpoint| endpoint.address != ip("10.244.1.21"));
        }
        self.gateway.set_policy(&set);
    }

    fn packet(&mut self, place: usize) -> (vipgate_dataplane::io::InterfaceId, Vec<u8>) {
        self.next = if self.next == 60_000 { 1024 } else { self.next + 1 };
        let own = ip(HOLDERS[place]);
        let far = if own.is_ipv4() { "198.51.100.10" } else { "2001:db8:51::10" };
        let far: SocketAddr = (ip(far), if place < 5 { 53 } else { self.next }).into();
        if place < 5 {
            return (INSIDE, packet(Protocol::Udp, (own, self.next).into(), far));
        }
        (OUTSIDE, packet(Protocol::Udp, far, (own, 53).into()))
    }

    fn open(&mut self, bursts: &[(usize, u8)]) -> Result<(), TestCaseError> {
        let before = self.model();
        prop_assert!(before.held <= SHARED + RESERVE / 2, "half of the reserve is for standby: {}", before.held);
        let over = self.ended(EndReason::OverShare);
        let mut wanted: BTreeMap<Holder, u32> = BTreeMap::new();
        for &(place, count) in bursts {
            // What has no VIP any more opens nothing.
            if !self.has_vip && holder(place).0 == ip("192.0.2.11") {
                continue;
            }
            for _ in 0..count {
                let (interface, bytes) = self.packet(place);
                self.begun.push((interface, bytes.clone()));
                prop_assert!(self.gateway.workers[0].io().inject(interface, &bytes));
            }
            *wanted.entry(holder(place)).or_default() += u32::from(count);
        }
        let created = self.gateway.workers[0].counters().sessions_created.get();
        self.left.extend(self.gateway.run());
        let created = self.gateway.workers[0].counters().sessions_created.get() - created;
        let all: u32 = wanted.values().sum();
        let refused = u64::from(all) - created;
        // Whoever would be within its share with all that it wants is refused nothing.
        let is_within = before.is_within(&wanted);
        let has_claim = |holder: Holder| {
            let (vip, own) = is_within(holder);
            if before.held + all > SHARED {
                self.tally.count(match (vip, own) {
                    (true, _) => "below its share in a full table",
                    (false, true) => "below its share of a VIP above",
                    (false, false) => "above in a full table",
                });
                if vip && before.of(holder).0 > before.equal_parts(holder, &wanted).0 {
                    self.tally.count("below its share, which others leave to it");
                }
            }
            vip || own
        };
        let least: u32 = wanted.iter().filter(|(holder, _)| has_claim(**holder)).map(|(_, count)| count).sum();
        let told = (&before.members, &wanted);
        prop_assert!(created >= least.into(), "{} of {} opened, {} had to be: {:?}", created, all, least, told);
        self.tally.add("opened", created);
        self.tally.add("refused", refused);
        let after = self.model();
        let lost: Vec<Holder> = before
            .established
            .iter()
            .filter(|(key, _)| !after.established.contains_key(*key))
            .map(|(_, it)| *it)
            .collect();
        prop_assert_eq!(lost.len() as u64, self.ended(EndReason::OverShare) - over, "established ones end by one name");
        // What else has ended meanwhile is room that there wasn't when these ended.
        let others = before.held + created as u32 - after.held - lost.len() as u32;
        for holder in lost {
            let ((vip, own), (vip_part, part)) = (after.of(holder), before.equal_parts(holder, &wanted));
            let has_its_part = vip + others >= vip_part && own + others >= part;
            prop_assert!(has_its_part, "{:?} has {} {}, of {} {}", holder, vip, own, vip_part, part);
            self.tally.count("an established one of who has more");
            if others > 0 {
                continue;
            }
            let with = |more: u32| after.is_within(&BTreeMap::from([(holder, more)]))(holder);
            // Shares are whole numbers: that of the VIP is up to one more now than it was.
            let is_within = (with(1).0, with(2).1);
            prop_assert_eq!(is_within, (false, false), "{:?}: {:?} {:?}", holder, after.vips, after.members);
            self.tally.count("an established one, for nobody else's end");
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Open(bursts) => {
                for bursts in bursts.chunks(3) {
                    self.open(bursts)?;
                }
            }
            Step::Confirm => {
                let answers = std::mem::take(&mut self.left).into_iter().map(|(interface, bytes)| {
                    (if interface == INSIDE { INSIDE } else { OUTSIDE }, answer_to(&bytes, Protocol::Udp))
                });
                let again = std::mem::take(&mut self.begun);
                for part in answers.collect::<Vec<_>>().chunks(32).chain(again.chunks(32)) {
                    for (interface, bytes) in part {
                        self.gateway.workers[0].io().inject(*interface, bytes);
                    }
                    // Sessions that were refused the first time may be opened by this.
                    self.gateway.run();
                }
                self.tally.add("established", self.model().established.len() as u64);
            }
            Step::Flush(place) => {
                let filter = SessionFilter { endpoint: Some(ip(HOLDERS[*place])), ..SessionFilter::default() };
                let flushed = self.gateway.flush(0, filter);
                self.tally.add("flushed", flushed);
            }
            Step::Standby(place) => {
                self.next += 1;
                let base = self.next;
                for n in 0..40 {
                    let far = at("198.51.100.20:53");
                    let source: SocketAddr = (ip(HOLDERS[*place]), base.wrapping_add(n)).into();
                    self.standby.workers[0].io().inject(INSIDE, &packet(Protocol::Udp, source, far));
                }
                self.standby.run();
                let all = images::<u32>(&self.standby.workers[0].tables().sessions, &self.standby);
                let copies = self.gateway.workers[0].tables().sessions.copies();
                take(&mut self.gateway, &all);
                let copies = self.gateway.workers[0].tables().sessions.copies().saturating_sub(copies);
                self.tally.add("standby", copies.into());
                self.standby.pass(10_000);
            }
            Step::Pass(ms) => {
                let idle = self.ended(EndReason::Idle);
                self.gateway.pass(*ms);
                self.tally.add("expired", self.ended(EndReason::Idle) - idle);
            }
            Step::Policy(has_vip) => {
                self.has_vip = *has_vip;
                self.set_policy();
                self.tally.count("policy changed");
            }
        }
        self.model();
        Ok(())
    }
}

#[test]
fn nobody_below_its_share_is_refused_or_loses_what_is_established() {
    let classes = [
        "opened",
        "refused",
        "below its share in a full table",
        "below its share, which others leave to it",
        "below its share of a VIP above",
        "above in a full table",
        "an established one of who has more",
        "an established one, for nobody else's end",
        "established",
        "flushed",
        "standby",
        "expired",
        "policy changed",
    ];
    let config = Config { cases: 60, ..Config::default() };
    property(config, &prop::collection::vec(step(), 1..100), &classes, |steps, tally| {
        let setup = Setup { capacity: CAPACITY, reserve: Some(RESERVE), embryonic: 200, ..Setup::default() };
        let mut standby = Gateway::new(&Setup::default());
        standby.counts_vary();
        let gateway = Gateway::new(&setup);
        let (next, left, begun) = (1024, vec![], vec![]);
        let mut run = Run { gateway, tally, next, left, begun, has_vip: true, standby };
        run.gateway.counts_vary();
        run.gateway.hostile = true;
        run.set_policy();
        for step in &steps {
            run.step(step)?;
        }
        Ok(())
    });
}
