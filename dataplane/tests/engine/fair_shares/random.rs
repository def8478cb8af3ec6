//! Holders open, confirm, close and idle at random, in batches, checked against a slow model that recounts the table
//! after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::address::V6;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::ids::Slot;
use vipgate_dataplane::policy::spec::ServiceSpec;
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_dataplane::session::entry::Flags;
use vipgate_dataplane::session::query::{SessionFilter, SessionState};
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{apply_standby, session_records};

const CAPACITY: u32 = 384;
const RESERVE: u32 = 128;
const SHARED: u32 = CAPACITY - RESERVE;
/// Holders of sessions: pods, and VIPs for their clients.
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

/// One step of a scenario.
#[derive(Clone, Debug)]
enum Step {
    /// First packets of several holders in one batch.
    Open(Vec<(usize, u8)>),
    /// Receivers reply to the last new sessions, and their initiators send again.
    Confirm,
    /// A pod's sessions are flushed.
    Flush(usize),
    /// Another gateway replicates sessions of this pod.
    Standby(usize),
    /// Time passes.
    Pass(u32),
    /// A VIP is removed or added again.
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

/// Contents of a session table, counted entry by entry.
#[derive(Default)]
pub(super) struct Model {
    held: u32,
    vips: BTreeMap<IpAddr, u32>,
    members: BTreeMap<Holder, u32>,
    /// Established sessions, by source and destination of the first packet.
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
            let (pod, _, vip) = entry.pod_remote_vip();
            let is_inbound = entry.direction() == Direction::Inbound;
            let holder = (vip.to_ip(), if is_inbound { vip.to_ip() } else { pod.to_ip() });
            self.held += 1;
            *self.vips.entry(holder.0).or_default() += 1;
            *self.members.entry(holder).or_default() += 1;
            let (state, _) = sessions.state::<A>(slot);
            let is_confirmed = !is_inbound || entry.is_confirmed();
            if !entry.is_standby() && is_confirmed && state == SessionState::Established {
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

    /// Equal parts of a VIP and of a member of it, with these additional holders: the minimum that each can use.
    fn equal_parts(&self, holder: Holder, demand: &BTreeMap<Holder, u32>) -> (u32, u32) {
        let vips: BTreeSet<IpAddr> = self.vips.keys().copied().chain(demand.keys().map(|it| it.0)).collect();
        let members: BTreeSet<_> = self.members.keys().chain(demand.keys()).filter(|it| it.0 == holder.0).collect();
        let vips = vips.len() as u32;
        (SHARED / vips, SHARED / vips / members.len() as u32)
    }

    /// Whether a VIP, and a member of it, are within their fair shares with this additional demand.
    fn is_within(&self, demand: &BTreeMap<Holder, u32>) -> impl Fn(Holder) -> (bool, bool) {
        let (mut vips, mut members) = (self.vips.clone(), self.members.clone());
        for (&(vip, member), count) in demand {
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

/// Recounts a table, and compares with its own counts.
pub(super) fn recount(sessions: &Sessions) -> Model {
    let mut model = Model::default();
    model.count::<u32>(sessions);
    model.count::<V6>(sessions);
    assert_eq!(model.held, sessions.open_count() + sessions.standby_count());
    for vip in ["192.0.2.10", "192.0.2.11", "2001:db8::10"].map(ip) {
        let of_vip = match vip {
            IpAddr::V4(v4) => sessions.vip_sessions(v4.to_bits()),
            IpAddr::V6(v6) => sessions.vip_sessions(V6::from_bits(v6.to_bits())),
        };
        assert_eq!(of_vip, model.vips.get(&vip).copied().unwrap_or(0), "of {vip}");
    }
    for (&(vip, member), &count) in &model.members {
        let counted = match (vip, member) {
            (IpAddr::V4(vip), IpAddr::V4(member)) => sessions.member_sessions(vip.to_bits(), member.to_bits()),
            (IpAddr::V6(vip), IpAddr::V6(member)) => {
                sessions.member_sessions(V6::from_bits(vip.to_bits()), V6::from_bits(member.to_bits()))
            }
            _ => unreachable!("a session is of one family"),
        };
        assert_eq!(counted, (count, model.members_of(vip)), "of {member} at {vip}");
    }
    model
}

fn holder(index: usize) -> Holder {
    let address = ip(HOLDERS[index]);
    let vip = match HOLDERS[index] {
        "10.244.1.5" | "10.244.1.6" => "192.0.2.10",
        "10.244.1.21" => "192.0.2.11",
        pod if pod.starts_with("fd00") => "2001:db8::10",
        vip => vip,
    };
    (ip(vip), address)
}

struct Run<'a> {
    gateway: Gateway,
    coverage: &'a Coverage,
    next: u16,
    /// First packets of new sessions as sent, with their interface.
    sent: Vec<(vipgate_dataplane::flow::ids::InterfaceId, Vec<u8>)>,
    first_packets: Vec<(vipgate_dataplane::flow::ids::InterfaceId, Vec<u8>)>,
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

    fn packet(&mut self, index: usize) -> (vipgate_dataplane::flow::ids::InterfaceId, Vec<u8>) {
        self.next = if self.next == 60_000 { 1024 } else { self.next + 1 };
        let address = ip(HOLDERS[index]);
        let remote = if address.is_ipv4() { "198.51.100.10" } else { "2001:db8:51::10" };
        let remote: SocketAddr = (ip(remote), if index < 5 { 53 } else { self.next }).into();
        if index < 5 {
            return (INSIDE, packet(Protocol::Udp, (address, self.next).into(), remote));
        }
        (OUTSIDE, packet(Protocol::Udp, remote, (address, 53).into()))
    }

    /// Injects packets of new sessions; returns how many each holder demands.
    fn inject(&mut self, demands: &[(usize, u8)]) -> Result<BTreeMap<Holder, u32>, TestCaseError> {
        let mut wanted: BTreeMap<Holder, u32> = BTreeMap::new();
        for &(index, count) in demands {
            // A holder without a VIP opens nothing.
            if !self.has_vip && holder(index).0 == ip("192.0.2.11") {
                continue;
            }
            for _ in 0..count {
                let (interface, bytes) = self.packet(index);
                self.first_packets.push((interface, bytes.clone()));
                prop_assert!(self.gateway.workers[0].io().inject(interface, &bytes));
            }
            *wanted.entry(holder(index)).or_default() += u32::from(count);
        }
        Ok(wanted)
    }

    /// Checks that an established session of this holder had to end: the holder was above its equal part, and has its
    /// share now. `others` sessions ended besides.
    fn check_ended(
        &self,
        holder: Holder,
        wanted: &BTreeMap<Holder, u32>,
        (before, after): (&Model, &Model),
        others: u32,
    ) -> Result<(), TestCaseError> {
        let ((vip, member), (vip_part, member_part)) = (after.of(holder), before.equal_parts(holder, wanted));
        let has_its_part = vip + others >= vip_part && member + others >= member_part;
        prop_assert!(has_its_part, "{:?} has {} {}, of {} {}", holder, vip, member, vip_part, member_part);
        self.coverage.count("established session above its share ended");
        if others > 0 {
            return Ok(());
        }
        let with = |demand: u32| after.is_within(&BTreeMap::from([(holder, demand)]))(holder);
        // Shares are whole numbers: the VIP's may be up to one more now than it was.
        let is_within = (with(1).0, with(2).1);
        prop_assert_eq!(is_within, (false, false), "{:?}: {:?} {:?}", holder, after.vips, after.members);
        self.coverage.count("established session ended, and no other");
        Ok(())
    }

    fn open(&mut self, demands: &[(usize, u8)]) -> Result<(), TestCaseError> {
        let before = self.model();
        prop_assert!(
            before.held <= SHARED + RESERVE / 2,
            "at most half of the reserve is used by standby sessions: {}",
            before.held
        );
        let over_share = self.ended(EndReason::OverShare);
        let wanted = self.inject(demands)?;
        let created = self.gateway.workers[0].counters().sessions_created.get();
        self.sent.extend(self.gateway.run());
        let created = self.gateway.workers[0].counters().sessions_created.get() - created;
        let all: u32 = wanted.values().sum();
        let rejected = u64::from(all) - created;
        // A holder that is within its share with all its demand gets no rejection.
        let is_within = before.is_within(&wanted);
        let has_claim = |holder: Holder| {
            let (vip, member) = is_within(holder);
            if before.held + all > SHARED {
                self.coverage.count(match (vip, member) {
                    (true, _) => "VIP below its share in a full table",
                    (false, true) => "member below its share of a VIP above",
                    (false, false) => "above its share in a full table",
                });
                if vip && before.of(holder).0 > before.equal_parts(holder, &wanted).0 {
                    self.coverage.count("VIP above its equal part, below its share");
                }
            }
            vip || member
        };
        let least: u32 = wanted.iter().filter(|(holder, _)| has_claim(**holder)).map(|(_, count)| count).sum();
        let counts = (&before.members, &wanted);
        prop_assert!(
            created >= least.into(),
            "{} of {} opened, at least {} expected: {:?}",
            created,
            all,
            least,
            counts
        );
        self.coverage.add("opened", created);
        self.coverage.add("rejected", rejected);
        let after = self.model();
        let lost: Vec<Holder> = before
            .established
            .iter()
            .filter(|(key, _)| !after.established.contains_key(*key))
            .map(|(_, it)| *it)
            .collect();
        prop_assert_eq!(
            lost.len() as u64,
            self.ended(EndReason::OverShare) - over_share,
            "established sessions end only as over_share"
        );
        // Other sessions that ended meanwhile are capacity that wasn't there when these ended.
        let others = before.held + created as u32 - after.held - lost.len() as u32;
        for holder in lost {
            self.check_ended(holder, &wanted, (&before, &after), others)?;
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Open(demands) => {
                for demands in demands.chunks(3) {
                    self.open(demands)?;
                }
            }
            Step::Confirm => {
                let replies = std::mem::take(&mut self.sent).into_iter().map(|(interface, bytes)| {
                    (if interface == INSIDE { INSIDE } else { OUTSIDE }, reply_to(&bytes, Protocol::Udp))
                });
                let first_packets = std::mem::take(&mut self.first_packets);
                for part in replies.collect::<Vec<_>>().chunks(32).chain(first_packets.chunks(32)) {
                    for (interface, bytes) in part {
                        self.gateway.workers[0].io().inject(*interface, bytes);
                    }
                    // Sessions that were rejected before may be opened by this.
                    self.gateway.run();
                }
                self.coverage.add("established", self.model().established.len() as u64);
            }
            Step::Flush(index) => {
                let filter = SessionFilter { endpoint: Some(ip(HOLDERS[*index])), ..SessionFilter::default() };
                let flushed = self.gateway.flush(0, filter);
                self.coverage.add("flushed", flushed);
            }
            Step::Standby(index) => {
                self.next += 1;
                let base = self.next;
                for n in 0..40 {
                    let remote = at("198.51.100.20:53");
                    let source: SocketAddr = (ip(HOLDERS[*index]), base.wrapping_add(n)).into();
                    self.standby.workers[0].io().inject(INSIDE, &packet(Protocol::Udp, source, remote));
                }
                self.standby.run();
                let all = session_records::<u32>(&self.standby.workers[0].tables().sessions, &self.standby);
                let before = self.gateway.workers[0].tables().sessions.standby_count();
                apply_standby(&mut self.gateway, &all);
                let after = self.gateway.workers[0].tables().sessions.standby_count();
                self.coverage.add("standby", after.saturating_sub(before).into());
                self.standby.advance(10_000);
            }
            Step::Pass(ms) => {
                let idle = self.ended(EndReason::Idle);
                self.gateway.advance(*ms);
                self.coverage.add("expired", self.ended(EndReason::Idle) - idle);
            }
            Step::Policy(has_vip) => {
                self.has_vip = *has_vip;
                self.set_policy();
                self.coverage.count("policy changed");
            }
        }
        self.model();
        Ok(())
    }
}

#[test]
fn holders_below_their_share_are_never_rejected_or_evicted() {
    let classes = [
        "opened",
        "rejected",
        "VIP below its share in a full table",
        "VIP above its equal part, below its share",
        "member below its share of a VIP above",
        "above its share in a full table",
        "established session above its share ended",
        "established session ended, and no other",
        "established",
        "flushed",
        "standby",
        "expired",
        "policy changed",
    ];
    let config = Config { cases: 60, ..Config::default() };
    property(config, &prop::collection::vec(step(), 1..100), &classes, |steps, coverage| {
        let setup = Setup { capacity: CAPACITY, reserve: Some(RESERVE), embryonic: 200, ..Setup::default() };
        let mut standby = Gateway::new(&Setup::default());
        standby.skip_counter_check();
        let gateway = Gateway::new(&setup);
        let (next, sent, first_packets) = (1024, vec![], vec![]);
        let mut run = Run { gateway, coverage, next, sent, first_packets, has_vip: true, standby };
        run.gateway.skip_counter_check();
        run.gateway.hostile = true;
        run.set_policy();
        for step in &steps {
            run.step(step)?;
        }
        Ok(())
    });
}
