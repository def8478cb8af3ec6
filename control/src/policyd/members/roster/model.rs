//! Worlds of gateways, messages that are late or lost, and servers that die, in which promises are checked at each step. Every
//! gateway computes its lease as the real ones do: from when it sent what was answered.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::members::{Commitment, Member, Wish};
use crate::tally::{Tally, property};

const TTL: u64 = 600;
const NAMES: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Time passes: milliseconds.
    Pass(u16),
    /// A gateway beats, if it lives: milliseconds to the server and back; none: lost.
    Beat(usize, Option<u16>, Option<u16>),
    /// It wants something else.
    Want(usize, Wish),
    /// It can't do what it serves for.
    Fail(usize),
    /// It dies, and another process takes its place; whether its end is seen, and whether that one knows its secret.
    Reborn(usize, bool, bool),
    /// Somebody else beats with a gateway's name: with the incarnation that views show, or one of its own.
    Impostor(usize, bool),
    /// The server's gateways: a bit each.
    Policy(u8),
    /// The server dies, and another one takes its place.
    NextServer,
}

fn step() -> impl Strategy<Value = Step> {
    let delay = || prop_oneof![9 => (0_u16..80).prop_map(Some), 1 => Just(None), 1 => (0_u16..900).prop_map(Some)];
    let wish = prop_oneof![4 => Just(Wish::Ready), 1 => Just(Wish::Joining), 1 => Just(Wish::Draining)];
    prop_oneof![
        30 => (0..NAMES.len(), delay(), delay()).prop_map(|(at, there, back)| Step::Beat(at, there, back)),
        20 => (1_u16..200).prop_map(Step::Pass),
        2 => (300_u16..1500).prop_map(Step::Pass),
        4 => (0..NAMES.len(), wish).prop_map(|(at, wish)| Step::Want(at, wish)),
        2 => (0..NAMES.len()).prop_map(Step::Fail),
        1 => (0..NAMES.len(), any::<bool>(), any::<bool>()).prop_map(|(at, is_seen, knows)| Step::Reborn(at, is_seen, knows)),
        3 => (0..NAMES.len(), any::<bool>()).prop_map(|(at, repeats)| Step::Impostor(at, repeats)),
        1 => (1_u8..8).prop_map(Step::Policy),
        1 => Just(Step::NextServer),
    ]
}

#[derive(Default)]
struct Gateway {
    incarnation: u64,
    /// The process whose secret it knows.
    before: Option<u64>,
    wish: Wish,
    is_unable: bool,
    view: Arc<View>,
    /// Whether the server that lives has been told its view.
    reported: bool,
    /// What its stream keeps of that until a beat has counted.
    known: Option<Arc<View>>,
    /// Until when it knows that it has a lease.
    lease_until: u64,
    /// When its last message arrives: a stream keeps the order.
    arrives: u64,
    returns: u64,
}

enum Message {
    Beat { beat: Beat, sent: u64, back: Option<u16> },
    View { to: usize, incarnation: u64, view: Arc<View>, lease_until: u64 },
}

struct World<'a> {
    tally: &'a Tally,
    start: Instant,
    now: u64,
    roster: Roster,
    is_stored: bool,
    policy: u8,
    gateways: [Gateway; NAMES.len()],
    messages: BTreeMap<(u64, u64), Message>,
    count: u64,
    /// Until when a process may hold a lease, whether or not it knows it yet.
    leases: BTreeMap<(usize, u64), u64>,
    /// Those to whom the server that lives has granted one.
    granted: BTreeSet<(usize, u64)>,
    /// Processes that were stopped because they or people wanted that.
    excused: BTreeSet<(usize, u64)>,
    impostors: u64,
}

/// A process's: what a secret is for, another number is enough for.
fn commitment(at: usize, incarnation: u64) -> Commitment {
    let mut commitment = [at as u8; 32];
    commitment[..8].copy_from_slice(&incarnation.to_be_bytes());
    commitment
}

impl<'a> World<'a> {
    fn new(is_stored: bool, tally: &'a Tally) -> Self {
        let gateways = NAMES.map(|_| Gateway { incarnation: 1, wish: Wish::Ready, ..Gateway::default() });
        let mut world = Self {
            tally,
            start: Instant::now(),
            now: 0,
            roster: Roster::new(Duration::from_millis(TTL)),
            is_stored,
            policy: 7,
            gateways,
            messages: BTreeMap::new(),
            count: 0,
            leases: BTreeMap::new(),
            granted: BTreeSet::new(),
            excused: BTreeSet::new(),
            impostors: 1000,
        };
        world.set_policy(7);
        world
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    fn set_policy(&mut self, policy: u8) {
        self.policy = policy;
        let names = (0..NAMES.len()).filter(|at| policy & (1 << at) != 0).map(|at| Arc::from(NAMES[at]));
        self.roster.set_policy(names);
    }

    /// Nobody may remember who leaves the policy before a server knows where the one before it stopped.
    fn excuse_strangers(&mut self) {
        let strangers = (0..NAMES.len()).filter(|at| self.policy & (1 << at) == 0);
        self.excused.extend(strangers.map(|at| (at, self.gateways[at].incarnation)));
    }

    /// The next server without a memory believes the gateway with the latest view; but the last one may have granted by another view,
    /// since it heard of that one late, or never.
    fn excuse_granted_by_another_view(&mut self, last: &Roster) {
        let is_later = |view: &View| view.number >= last.view.number && *view != *last.view;
        let on_its_way = |message: &Message| matches!(message, Message::View { view, .. } if is_later(view));
        let never_heard =
            self.gateways.iter().any(|gateway| is_later(&gateway.view)) || self.messages.values().any(on_its_way);
        let heard_late = last.grants_from.is_some_and(|from| from > self.instant());
        let granted = std::mem::take(&mut self.granted);
        if !granted.is_empty() && !self.is_stored && (never_heard || heard_late) {
            self.excused.extend(granted);
            self.tally.count("granted by another view than the latest");
        }
    }

    fn post(&mut self, at: u64, message: Message) {
        self.count += 1;
        self.messages.insert((at, self.count), message);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Pass(ms) => self.pass(self.now + u64::from(ms)),
            Step::Beat(at, there, back) => self.send(at, there, back),
            Step::Want(at, wish) => (self.gateways[at].wish, self.gateways[at].is_unable) = (wish, false),
            Step::Fail(at) => (self.gateways[at].wish, self.gateways[at].is_unable) = (Wish::Draining, true),
            Step::Impostor(at, repeats) => self.impostor(at, repeats),
            Step::Reborn(at, is_seen, knows) => {
                let incarnation = self.gateways[at].incarnation;
                self.leases.remove(&(at, incarnation));
                // What it has sent arrives before its end is seen; or neither does.
                self.messages.retain(|_, message| !message.is_from(NAMES[at]));
                if is_seen {
                    self.roster.left(NAMES[at], incarnation);
                }
                let before = knows.then_some(incarnation);
                let (incarnation, wish) = (incarnation + 1, Wish::Joining);
                self.gateways[at] = Gateway { incarnation, before, wish, ..Gateway::default() };
            }
            Step::Policy(policy) => {
                self.set_policy(policy);
                if !self.is_stored && !self.roster.settled {
                    self.excuse_strangers();
                }
                self.decide(|_, _| {});
            }
            Step::NextServer => {
                let last = self.roster.clone();
                self.tally.count(if self.is_stored {
                    "next server with a store"
                } else {
                    "next server without a memory"
                });
                self.roster = Roster::new(Duration::from_millis(TTL));
                if self.is_stored {
                    self.roster.load(self.instant(), Some(last.view.clone()));
                }
                self.set_policy(self.policy);
                self.excuse_strangers();
                self.excuse_granted_by_another_view(&last);
                self.messages.retain(|_, message| matches!(message, Message::View { .. }));
                self.gateways.iter_mut().for_each(|gateway| gateway.reported = false);
            }
        }
    }

    fn send(&mut self, at: usize, there: Option<u16>, back: Option<u16>) {
        let now = self.now;
        if !self.gateways[at].reported {
            // Another stream: of what the last one had to say, it hears nothing more.
            self.messages.retain(|_, message| !matches!(message, Message::View { to, .. } if *to == at));
            let gateway = &self.gateways[at];
            self.leases.insert((at, gateway.incarnation), gateway.lease_until);
        }
        let gateway = &mut self.gateways[at];
        if !gateway.reported {
            gateway.known = (gateway.view.number > 0).then(|| gateway.view.clone());
        }
        let beat = Beat {
            gateway: NAMES[at].into(),
            incarnation: gateway.incarnation,
            commitment: Some(commitment(at, gateway.incarnation)),
            predecessor: gateway.before.map(|before| Box::new(commitment(at, before))),
            wish: gateway.wish,
            seen_view: gateway.view.number,
            fingerprint: None,
            peer: None,
            tunnel_key: None,
            unable: gateway.is_unable.then(|| "a link is down".into()),
            view: gateway.known.clone(),
        };
        let Some(there) = there else { return self.tally.count("beat lost") };
        gateway.reported = true;
        gateway.arrives = gateway.arrives.max(now + u64::from(there));
        let arrives = gateway.arrives;
        self.post(arrives, Message::Beat { beat, sent: now, back });
    }

    /// Somebody wants to be a gateway. While that one's process may have a lease, or was heard within a TTL and its end not seen, it
    /// gets nothing.
    fn impostor(&mut self, at: usize, repeats: bool) {
        self.impostors += 1;
        let incarnation = if repeats { self.gateways[at].incarnation } else { self.impostors };
        let beat = Beat {
            gateway: NAMES[at].into(),
            incarnation,
            commitment: Some(commitment(9, self.impostors)),
            predecessor: None,
            wish: Wish::Ready,
            seen_view: self.roster.view().number,
            fingerprint: Some([9; 32]),
            peer: None,
            tunnel_key: None,
            unable: None,
            view: None,
        };
        let (now, process) = (self.instant(), (at, self.gateways[at].incarnation));
        let known = self.roster.seat(NAMES[at]).filter(|seat| seat.incarnation == process.1);
        // A server without a memory that has heard nobody takes whoever comes first: only certificates help there.
        let Some(seat) = known else { return };
        let is_silent = now.saturating_duration_since(seat.last) > Duration::from_millis(TTL);
        let is_alive = !seat.left && !is_silent;
        let has_lease =
            self.leases.get(&process).is_some_and(|until| *until > self.now) && !self.excused.contains(&process);
        let tally = self.tally;
        let mut outcome = None;
        self.decide(|roster, now| outcome = Some(roster.beat(now, &beat)));
        let counts = match outcome {
            Some(Ok(Heard::Counts)) => true,
            Some(Ok(Heard::Waits | Heard::Stranger) | Err(_)) | None => false,
        };
        assert!(!(counts && (repeats || is_alive || has_lease)), "{process:?} is replaced: {is_alive} {has_lease}");
        assert!(!repeats || matches!(outcome, Some(Err(Refusal::Forged { .. }))), "{outcome:?}");
        tally.count(match (repeats, counts) {
            (true, _) => "impostor repeats an incarnation",
            (false, true) => "impostor gets a free name",
            (false, false) => "impostor gets nothing",
        });
    }

    /// Lets time pass, with all that happens meanwhile.
    fn pass(&mut self, until: u64) {
        loop {
            let message = self.messages.first_key_value().map(|((at, _), _)| *at);
            let due = self.roster.due().map(|due| due.saturating_duration_since(self.start).as_millis() as u64);
            let due = due.filter(|due| *due > self.now);
            let next = message.into_iter().chain(due).min().filter(|next| *next <= until);
            let Some(next) = next else { break };
            self.now = self.now.max(next);
            if message == Some(next) {
                let (_, message) = self.messages.pop_first().unwrap();
                self.deliver(message);
            } else {
                self.decide(|_, _| {});
            }
        }
        self.now = until;
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::View { to, incarnation, view, lease_until } => {
                let gateway = &mut self.gateways[to];
                if gateway.incarnation == incarnation {
                    gateway.lease_until = gateway.lease_until.max(lease_until);
                    if view.number > gateway.view.number {
                        gateway.view = view;
                    }
                }
            }
            Message::Beat { beat, sent, back } => {
                let at = NAMES.iter().position(|name| *name == &*beat.gateway).unwrap();
                let mut heard = Ok(Heard::Stranger);
                self.decide(|roster, now| heard = roster.beat(now, &beat));
                if heard != Ok(Heard::Stranger) && self.gateways[at].incarnation == beat.incarnation {
                    self.gateways[at].known = None;
                }
                // Each process is alone here, so the newer one comes in sooner or later.
                self.tally.count(match heard {
                    Ok(Heard::Counts) => "counts",
                    Ok(Heard::Waits) => "waits",
                    Ok(Heard::Stranger) => "stranger",
                    Err(_) => "refused",
                });
                self.answer(at, &beat, sent, back);
            }
        }
    }

    fn answer(&mut self, at: usize, beat: &Beat, sent: u64, back: Option<u16>) {
        let process = (at, beat.incarnation);
        let mut lease_until = 0;
        if let Some(lease) = self.roster.grant(self.instant(), &beat.gateway, beat.incarnation) {
            let until = sent + lease.as_millis() as u64;
            let known = self.leases.entry(process).or_default();
            *known = until.max(*known);
            self.granted.insert(process);
            lease_until = until;
            self.excused.remove(&process);
            self.check_leases();
            self.tally.count("lease granted");
        } else {
            self.tally.count("lease refused");
        }
        let Some(back) = back else { return self.tally.count("answer lost") };
        let gateway = &mut self.gateways[at];
        gateway.returns = gateway.returns.max(self.now + u64::from(back));
        let returns = gateway.returns;
        let view = self.roster.view().clone();
        self.post(returns, Message::View { to: at, incarnation: beat.incarnation, view, lease_until });
    }

    /// Whoever may hold a lease serves.
    fn check_leases(&self) {
        for (process, until) in self.leases.iter().filter(|(_, until)| **until > self.now) {
            let member = self.roster.view().member(NAMES[process.0]);
            let serves = member.is_some_and(|member| member.serving && member.incarnation == process.1);
            assert!(
                serves || self.excused.contains(process),
                "{process:?} has a lease until {until}, now {}",
                self.now
            );
        }
    }

    /// Something happens to the roster; what that does to the view is checked.
    fn decide(&mut self, what: impl FnOnce(&mut Roster, Instant)) {
        let now = self.instant();
        what(&mut self.roster, now);
        let before = self.roster.view().clone();
        self.roster.decide(now);
        let after = self.roster.view().clone();
        if before == after {
            return;
        }
        assert!(after.number > before.number);
        self.tally.add("numbers overtaken", u64::from(after.number > before.number + 1));
        for old in &before.members {
            let new = after.member(&old.name);
            assert!(new.is_none_or(|new| new.epoch >= old.epoch));
            if old.serving && !new.is_some_and(|new| new.serving) {
                assert!(new.is_none_or(|new| new.epoch == after.number && new.epoch > old.epoch));
                self.check_stop(old);
            }
        }
        for new in after.serving().filter(|new| before.member(&new.name).is_some_and(|old| !old.serving)) {
            let seat = self.roster.seat(&new.name).unwrap();
            assert_eq!(seat.seen_view, before.number);
            assert!(seat.wish == Wish::Ready || seat.is_unable());
            self.tally.count("came to serve");
            if seat.is_unable() {
                // Only where nobody else does; and it doesn't go and come back.
                let is_in_policy = |name: &str| {
                    NAMES.iter().position(|known| *known == name).is_some_and(|at| self.policy & (1 << at) != 0)
                };
                let mut others = after.serving().filter(|it| is_in_policy(&it.name));
                assert!(others.all(|it| self.roster.seat(&it.name).is_some_and(Seat::is_unable)));
                self.tally.count("came to serve though unable");
            }
        }
        self.check_able(&before, &after);
    }

    /// Nobody stops because it is unable, unless an able one serves.
    fn check_able(&self, before: &View, after: &View) {
        let is_unable = |name: &str| self.roster.seat(name).is_some_and(Seat::is_unable);
        let goes_on = |name: &str| after.member(name).is_some_and(|it| it.serving);
        let same = |old: &Member| after.member(&old.name).is_some_and(|it| it.incarnation == old.incarnation);
        for old in before.serving().filter(|old| is_unable(&old.name) && !goes_on(&old.name) && same(old)) {
            if after.member(&old.name).is_some_and(|it| it.lapsed) {
                continue;
            }
            let able = after.serving().any(|it| !is_unable(&it.name));
            assert!(able, "{} stopped, and nobody serves who is able", old.name);
            self.tally.count("stopped: unable");
        }
    }

    /// Nobody stops to serve while it may hold a lease, unless it wants to, or people want it.
    fn check_stop(&mut self, old: &Member) {
        let at = NAMES.iter().position(|name| *name == &*old.name).unwrap();
        let process = (at, old.incarnation);
        let seat = self.roster.seat(&old.name).filter(|seat| seat.incarnation == old.incarnation);
        self.tally.count(match seat {
            None => "stopped: another process",
            Some(seat) if seat.wish == Wish::Draining => "stopped: draining",
            Some(_) => "stopped: silent",
        });
        if seat.is_some_and(|seat| seat.wish == Wish::Draining) {
            self.excused.insert(process);
        }
        let until = self.leases.get(&process).copied().unwrap_or_default();
        assert!(until <= self.now || self.excused.contains(&process), "{process:?} until {until}, now {}", self.now);
    }
}

impl Message {
    fn is_from(&self, name: &str) -> bool {
        matches!(self, Self::Beat { beat, .. } if *beat.gateway == *name)
    }
}

#[test]
fn a_lease_ends_before_serving_does_and_numbers_only_grow() {
    let classes = [
        "lease granted",
        "lease refused",
        "beat lost",
        "answer lost",
        "waits",
        "stranger",
        "came to serve",
        "stopped: silent",
        "stopped: draining",
        "stopped: another process",
        "stopped: unable",
        "came to serve though unable",
        "impostor repeats an incarnation",
        "impostor gets a free name",
        "impostor gets nothing",
        "next server without a memory",
        "next server with a store",
    ];
    property(
        ProptestConfig::with_cases(600),
        &(proptest::collection::vec(step(), 1..250), any::<bool>()),
        &classes,
        |(steps, is_stored), tally| {
            let mut world = World::new(is_stored, tally);
            for step in steps {
                world.step(step);
            }
            Ok(())
        },
    );
}

/// Without disturbance everybody serves, and goes on over the restart of a server.
#[test]
fn all_serve_in_the_end() {
    let tally = Tally::default();
    let mut world = World::new(false, &tally);
    for round in 0..60 {
        if round == 30 {
            world.step(Step::NextServer);
        }
        for at in 0..NAMES.len() {
            world.step(Step::Beat(at, Some(5), Some(5)));
        }
        world.step(Step::Pass(150));
        assert!(round < 5 || world.roster.view().serving().count() == NAMES.len(), "round {round}");
    }
}
