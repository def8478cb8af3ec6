//! Who serves, decided: beats and the policy's gateways come in, a view and leases come out. Time is an argument.
//!
//! A lease runs from when its beat was sent, a gateway's silence from when it was received, and a lease is shorter than the silence
//! that is taken for death: so whoever stops to serve by silence knows it before we say so.
//!
//! A server without a memory learns from gateways where the one before it stopped. Until it knows, it changes nothing; it knows
//! when all that it could ask have said what they know, or after two TTLs. It gives no leases before that either, but after one TTL:
//! by then the leases of the one before are over, so no two of them can contradict each other. What it can't know, only a store does:
//! who left the policy in that time, and by which view the server before granted if a gateway knows a later one.

mod decide;
#[cfg(test)]
mod model;
mod seat;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::seat::Seat;
use crate::members::{Beat, Member, View};

/// Numbers of views that are believed of gateways stay below this, half of what a view may have: whatever one of them claims, there are
/// always further ones.
pub(crate) const MOST_TOLD: u64 = 1 << 61;

/// What became of a beat that wasn't refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It counts.
    Counts,
    /// Another process of this name was heard a moment ago: whether it is gone will show.
    Waits,
    /// The policy has no gateway of this name.
    Stranger,
}

/// Why a beat is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Two processes that both live have one name.
    #[error(
        "another process is gateway {gateway}, and it lives (incarnation {incarnation:016x}): stop one of them, or give each a \
         name of its own"
    )]
    UsedTwice {
        /// The name.
        gateway: Arc<str>,
        /// The process that has it.
        incarnation: u64,
    },
    /// Somebody repeats what views show of a process.
    #[error(
        "this is not the process {incarnation:016x} of gateway {gateway}, which it claims to be: it doesn't know that one's secret"
    )]
    Forged {
        /// The name.
        gateway: Arc<str>,
        /// The process that it claims to be.
        incarnation: u64,
    },
}

/// All that decides who serves.
#[derive(Clone, Debug)]
pub struct Roster {
    ttl: Duration,
    /// The gateways of the policy; none while there is no policy.
    policy: Option<BTreeSet<Arc<str>>>,
    view: Arc<View>,
    seats: BTreeMap<Arc<str>, Seat>,
    /// When the first gateway was heard.
    begun: Option<Instant>,
    /// Whether it is known where the server before stopped.
    settled: bool,
    /// Whether the view is one that a store keeps: then no gateway can know a later one.
    stored: bool,
    /// The next number is higher than this: somebody knows it.
    floor: u64,
    /// Since when the view is what it is by another's word: who was never heard is silent since then.
    taken_over: Option<Instant>,
    /// Leases under another view than this one may last until then.
    grants_from: Option<Instant>,
    /// Silence before this moment was ours, not the gateways'.
    deaf_until: Option<Instant>,
    granted: bool,
}

impl Roster {
    /// One that knows nobody yet. Silence for longer than `ttl` is taken for death.
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            policy: None,
            view: Arc::default(),
            seats: BTreeMap::new(),
            begun: None,
            settled: false,
            stored: false,
            floor: 0,
            taken_over: None,
            grants_from: None,
            deaf_until: None,
            granted: false,
        }
    }

    /// Who serves now.
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// What was last heard of a gateway.
    pub fn seat(&self, name: &str) -> Option<&Seat> {
        self.seats.get(name)
    }

    /// Whether the policy names any gateway.
    pub fn has_policy(&self) -> bool {
        self.policy.as_ref().is_some_and(|names| !names.is_empty())
    }

    /// These are the gateways of the policy.
    pub fn set_policy(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.policy = Some(names.into_iter().collect());
    }

    /// This is in the store; none: nothing is.
    pub fn load(&mut self, now: Instant, view: Option<Arc<View>>) {
        let stored = view.unwrap_or_default();
        if stored.number < self.view.number {
            // The store has lost what was in it; what everybody was told can't be taken back.
            self.floor = self.floor.max(self.view.number);
            return;
        }
        self.stored = stored.number > 0;
        if stored != self.view {
            self.view = stored;
            self.taken_over = Some(now);
        }
    }

    /// Another server has acknowledged this beat.
    pub fn observe(&mut self, now: Instant, beat: &Beat) {
        self.begun.get_or_insert(now);
        if !self.has_a_place(&beat.gateway) {
            return;
        }
        match self.seats.get_mut(&beat.gateway).filter(|seat| seat.incarnation == beat.incarnation) {
            Some(seat) => seat.observe(beat, now),
            None => drop(self.seats.insert(beat.gateway.clone(), Seat::of(beat, now))),
        }
    }

    /// Takes in a beat.
    ///
    /// # Errors
    /// When it comes from another process than the one that has the name, and that one lives; or than it claims.
    pub fn beat(&mut self, now: Instant, beat: &Beat) -> Result<Heard, Refusal> {
        if self.is_forged(beat) {
            return Err(Refusal::Forged { gateway: beat.gateway.clone(), incarnation: beat.incarnation });
        }
        self.begun.get_or_insert(now);
        // What somebody says of views whom the policy doesn't know changes nothing.
        if let Some(known) = &beat.view
            && (self.policy.is_none() || self.is_in_policy(&beat.gateway))
        {
            self.learn(now, known);
        }
        if !self.is_in_policy(&beat.gateway) {
            return Ok(Heard::Stranger);
        }
        let is_gone = self.is_gone(now, &beat.gateway);
        let served = !self.settled && self.served_before(beat);
        match self.seats.get_mut(&beat.gateway) {
            Some(seat) if seat.incarnation == beat.incarnation => seat.renew(beat, now),
            // Somebody else was faster to reach a server without a memory.
            Some(seat) if served => *seat = Seat::of(beat, now),
            Some(seat) if !is_gone => return seat.contend(beat, now, self.ttl),
            _ => {
                self.seats.insert(beat.gateway.clone(), Seat::of(beat, now));
            }
        }
        Ok(Heard::Counts)
    }

    /// Whether a beat claims to be a process that it isn't. Views say whose processes have secrets even to a server that has heard nobody
    /// yet; but what another gateway says of them in its view locks nobody out who shows a secret of this incarnation.
    fn is_forged(&self, beat: &Beat) -> bool {
        let seat = self.seats.get(&beat.gateway).filter(|seat| seat.incarnation == beat.incarnation);
        let member = self.view.member(&beat.gateway).filter(|member| member.incarnation == beat.incarnation);
        let has_secret = member.is_some_and(|member| member.commitment.is_some());
        seat.is_some_and(|seat| !seat.is_of(beat)) || has_secret && beat.commitment.is_none()
    }

    /// Whether a beat is of the process that serves by what the server before has said, and shows that.
    fn served_before(&self, beat: &Beat) -> bool {
        self.view.member(&beat.gateway).is_some_and(|member| {
            member.serving && member.incarnation == beat.incarnation && member.commitment.is_some()
        })
    }

    /// Whether nobody has a name any more, if another process wants it: its stream has ended and no lease holds, or it is silent for so
    /// long. Who serves has had a lease for each beat.
    fn is_gone(&self, now: Instant, name: &str) -> bool {
        let Some(seat) = self.seats.get(name) else { return true };
        let may_serve = |member: &Member| member.serving && member.incarnation == seat.incarnation;
        let has_lease = self.view.member(name).is_some_and(may_serve) && now < seat.last + lease(self.ttl);
        self.is_silent(name, now) || seat.left && !has_lease
    }

    /// The stream of a process has ended. It may come back; if another one comes, this one is gone.
    pub fn left(&mut self, name: &str, incarnation: u64) {
        if let Some(seat) = self.seats.get_mut(name).filter(|seat| seat.incarnation == incarnation) {
            seat.left = true;
        }
    }

    /// Nobody could be heard until now: their silence is no sign.
    pub fn was_deaf(&mut self, now: Instant) {
        self.deaf_until = Some(now);
    }

    /// How long the lease is that a process gets for a beat that has counted, from when that was sent.
    pub fn grant(&mut self, now: Instant, name: &str, incarnation: u64) -> Option<Duration> {
        let of_this = |it: u64| it == incarnation;
        let serves = self.view.member(name).is_some_and(|member| member.serving && of_this(member.incarnation));
        let heard = self.seats.get(name).is_some_and(|seat| of_this(seat.incarnation));
        if !(serves && heard && self.is_in_policy(name) && self.may_grant(now)) {
            return None;
        }
        self.granted = true;
        Some(lease(self.ttl))
    }

    /// What a gateway was told by another server.
    fn learn(&mut self, now: Instant, known: &Arc<View>) {
        if known.number < self.view.number || *known == self.view || known.number >= MOST_TOLD {
            return;
        }
        if self.settled || self.stored || known.number == self.view.number {
            // Nobody can act by it any more, or it would have been told in time; but its numbers are used up.
            self.floor = self.floor.max(known.number);
            return;
        }
        self.view = known.clone();
        self.taken_over = Some(now);
        if self.granted {
            self.grants_from = Some(now + self.ttl);
        }
    }

    fn may_grant(&self, now: Instant) -> bool {
        let old_ones_are_over = self.begun.is_some_and(|begun| now >= begun + self.ttl);
        (self.settled || self.stored || old_ones_are_over) && self.grants_from.is_none_or(|from| now >= from)
    }

    /// While there is no policy, the gateways are those that are known.
    fn is_in_policy(&self, name: &str) -> bool {
        match &self.policy {
            Some(names) => names.contains(name),
            None => self.view.member(name).is_some(),
        }
    }

    fn has_a_place(&self, name: &str) -> bool {
        self.is_in_policy(name) || self.view.member(name).is_some()
    }
}

/// A tenth of the time is for clocks that run at different speeds, and for a batch of packets that is on its way when it ends.
fn lease(ttl: Duration) -> Duration {
    ttl * 9 / 10
}
