//! What a worker still has to tell other gateways of its sessions: those that are new, after a while, since most end before anybody could
//! need them elsewhere; those that have changed or ended, at once. It notes which sessions another gateway has a copy of, too: a
//! gateway that can't be sure that its ports are still its own serves no others.
//!
//! Bounded everywhere: what isn't told is noted, and all is told again.

use std::collections::VecDeque;
use std::sync::Arc;

use super::outlet::{Outgoing, Outlet};
use crate::address::V6;
use crate::command::SessionState;
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::image::{Fate, Half, ImageOf};
use crate::session::{Ended, SessionFamily, Sessions};
use crate::snapshot::members::GatewayId;
use crate::snapshot::policy::Policy;
use crate::snapshot::shares::Share;
use crate::time::Tick;
use crate::wire::protocol;

/// Sessions that wait to be told.
const PENDING: usize = 1 << 16;
/// Sessions that were told and not acknowledged.
const UNCONFIRMED: usize = 1 << 16;
/// Sessions that are told in one turn, and acknowledgements that are noted.
const IN_ONE_TURN: usize = 64;
/// A connection that hasn't opened yet is told again after so long, and again: longer than it may take to open.
const AGAIN_MS: [u32; 5] = [1_000, 4_000, 16_000, 64_000, 256_000];

/// One worker's news.
#[derive(Debug)]
pub struct Outbox {
    outlet: Arc<Outlet>,
    /// Sessions younger than this aren't told, milliseconds.
    age: u32,
    /// New and changed sessions; behind them, by how often they were told, connections that haven't opened yet. Each waits as long as
    /// all others in its queue.
    pending: [VecDeque<Pending>; AGAIN_MS.len() + 1],
    unconfirmed: VecDeque<Told>,
    numbers: Box<[u64; 256]>,
    /// Whether there is anybody to tell.
    is_on: bool,
}

/// A session that waits to be told.
#[derive(Clone, Copy, Debug)]
struct Pending {
    due: Tick,
    slot: Slot,
    is_v6: bool,
}

/// A session that was told.
#[derive(Clone, Copy, Debug)]
struct Told {
    to: GatewayId,
    number: u64,
    slot: Slot,
    is_v6: bool,
    /// Tells it from another one that came into the same slot.
    hash: u32,
}

impl Outbox {
    /// An empty one; sessions are told when they are `age` milliseconds old.
    pub fn new(outlet: Arc<Outlet>, age: u32) -> Self {
        Self {
            outlet,
            age,
            pending: std::array::from_fn(|again| {
                VecDeque::with_capacity(if again == 0 { PENDING } else { PENDING / 8 })
            }),
            unconfirmed: VecDeque::with_capacity(UNCONFIRMED),
            numbers: Box::new([0; 256]),
            is_on: false,
        }
    }

    /// A session has begun, or begun anew.
    #[inline]
    pub fn born<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        self.note::<A>(slot, now.plus(self.age));
    }

    /// A session's state has changed.
    #[inline]
    pub fn changed<A: SessionFamily>(&mut self, slot: Slot, sessions: &mut Sessions, now: Tick) {
        let (origin, _) = sessions.both::<A>(slot);
        A::table_mut(sessions).entry_mut(origin).note_changed();
        self.note::<A>(slot, now);
    }

    fn note<A: SessionFamily>(&mut self, slot: Slot, due: Tick) {
        if !self.is_on {
            return;
        }
        let [pending, ..] = &mut self.pending;
        if pending.len() == PENDING {
            // Which gateway would have heard of it, nobody knows: all are told everything.
            (0..=u8::MAX).for_each(|at| self.outlet.lose(GatewayId(at)));
            return;
        }
        pending.push_back(Pending { due, slot, is_v6: A::BITS == 128 });
    }

    /// A session has ended.
    pub fn ended<A: SessionFamily>(&mut self, session: &Ended<A>, policy: &Policy) {
        if !self.is_on {
            return;
        }
        let Ended { origin, translated, direction } = *session;
        let entry = Entry::new(origin, translated, direction, Flags::default());
        let Some(share) = share(&entry, policy) else { return };
        for to in share.heirs(policy.members()) {
            let image = ImageOf { fate: Fate::Ended, direction, origin, translated, halves: [Half::default(); 2] };
            self.tell::<A>(to, image);
            self.outlet.ring();
        }
    }

    /// A standby session has ended to make room.
    pub fn evicted(&self) {
        self.outlet.note_evicted();
    }

    /// Takes notice of whether there is anybody to tell.
    #[inline]
    pub fn follow(&mut self, policy: &Policy) {
        self.is_on = policy.members().this().is_some();
    }

    /// Tells what is due, and notes what has arrived.
    pub fn turn(&mut self, sessions: &mut Sessions, policy: &Policy, now: Tick) {
        let mut told = false;
        for again in 0..self.pending.len() {
            for _ in 0..IN_ONE_TURN {
                let next = self.pending[again].front().copied();
                let Some(pending) = next.filter(|pending| now.reached(pending.due)) else { break };
                self.pending[again].pop_front();
                told |= if pending.is_v6 {
                    self.tell_pending::<V6>(pending, again, sessions, policy, now)
                } else {
                    self.tell_pending::<u32>(pending, again, sessions, policy, now)
                };
            }
        }
        for _ in 0..IN_ONE_TURN {
            let arrived = |told: &Told| self.outlet.acknowledged(told.to) >= told.number;
            let Some(told) = self.unconfirmed.front().copied().filter(arrived) else { break };
            self.unconfirmed.pop_front();
            // Who doesn't serve doesn't keep anybody from giving its port to another session.
            if !policy.members().is_serving(told.to) {
                continue;
            }
            if told.is_v6 { confirm::<V6>(told, sessions) } else { confirm::<u32>(told, sessions) }
        }
        if told {
            self.outlet.ring();
        }
    }

    fn tell_pending<A: SessionFamily>(
        &mut self,
        pending: Pending,
        again: usize,
        sessions: &mut Sessions,
        policy: &Policy,
        now: Tick,
    ) -> bool {
        let table = A::table(sessions);
        if !table.is_occupied(pending.slot) {
            return false;
        }
        let (slot, _) = sessions.both::<A>(pending.slot);
        let entry = table.entry(slot);
        if !entry.is_live() {
            return false;
        }
        let Some(share) = share(entry, policy) else { return false };
        let (hash, protocol) = (sessions.hash(&entry.key()) as u32, entry.key().protocol);
        let image = sessions.image(slot, now);
        let mut told = false;
        for to in share.heirs(policy.members()) {
            let number = self.tell::<A>(to, image);
            if self.unconfirmed.len() == UNCONFIRMED {
                self.unconfirmed.pop_front();
            }
            self.unconfirmed.push_back(Told { to, number, slot, is_v6: pending.is_v6, hash });
            told = true;
        }
        if !told {
            return false;
        }
        A::table_mut(sessions).entry_mut(slot).note_said();
        let (state, _) = sessions.state::<A>(slot);
        let is_connection = matches!(protocol, protocol::TCP | protocol::SCTP);
        if let Some(&after) = AGAIN_MS.get(again)
            && state == SessionState::Opening
            && is_connection
        {
            let later = &mut self.pending[again + 1];
            // Where so many don't open, few ever will.
            if later.len() < later.capacity() {
                later.push_back(Pending { due: now.plus(after), slot, ..pending });
            }
        }
        true
    }

    fn tell<A: SessionFamily>(&mut self, to: GatewayId, image: ImageOf<A>) -> u64 {
        let number = &mut self.numbers[usize::from(to.0)];
        *number += 1;
        self.outlet.push(Outgoing { to, number: *number, image: A::image(image) });
        *number
    }
}

/// The share whose heirs are told of a session.
pub fn share<'a, A: SessionFamily>(entry: &Entry<A>, policy: &'a Policy) -> Option<&'a Share> {
    let [_, _, (vip, port)] = entry.ends();
    let shares = &policy.vip(vip)?.shares;
    if entry.is_of_service() {
        // Where all gateways announce a VIP, any of them serves its clients without a session.
        return shares.list().first().filter(|_| !shares.is_shared());
    }
    shares.of_port(port)
}

fn confirm<A: SessionFamily>(told: Told, sessions: &mut Sessions) {
    if !A::table(sessions).is_occupied(told.slot) {
        return;
    }
    let (origin, twin) = sessions.both::<A>(told.slot);
    let is_same = sessions.hash(&A::table(sessions).entry(origin).key()) as u32 == told.hash;
    if is_same && !A::table(sessions).entry(origin).is_copy() {
        for at in [origin, twin] {
            A::table_mut(sessions).entry_mut(at).note_told();
        }
    }
}
