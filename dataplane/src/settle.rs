//! What the end of a session gives back: its place in the endpoint's quota at once, its port when it has rested. And who hears of it.

use crate::counters::{Counters, Direction};
use crate::link::outbox::Outbox;
use crate::ports::allocator::Allocator;
use crate::session::entry::{Entry, Slot};
use crate::session::tuple::Tuple;
use crate::session::{Ended, Expiry, SessionFamily, Sessions};
use crate::snapshot::policy::Policy;
use crate::time::Tick;
use crate::watch::log::SessionLog;

/// Where things are given back to.
#[derive(Debug)]
pub struct Settle<'a> {
    /// The policy in force.
    pub policy: &'a Policy,
    /// The worker's ports.
    pub ports: &'a mut Allocator,
    /// The worker's counters.
    pub counters: &'a Counters,
    /// What other gateways are to hear.
    pub outbox: &'a mut Outbox,
    /// Who logs sessions.
    pub log: &'a SessionLog,
}

impl Settle<'_> {
    /// Gives back what a session held.
    pub fn settle<A: SessionFamily>(&mut self, expiry: &Expiry<A>) {
        match expiry {
            Expiry::Ended(reason, session) => {
                self.counters.sessions_ended[*reason as usize].add(1);
                close(self.policy, &session.origin, &session.translated, session.direction);
                self.log.ended(&session.origin, &session.translated, session.direction);
                self.outbox.ended(session, self.policy);
            }
            Expiry::Released(session) => release(self.policy, self.ports, session),
        }
    }

    /// Notes a session that was opened here just now, in `slot`.
    #[inline]
    pub fn born<A: SessionFamily>(&mut self, slot: Slot, sessions: &Sessions, now: Tick) {
        if self.log.is_on() {
            let entry = A::table(sessions).entry(slot);
            self.log.began(&entry.key(), &entry.to(), entry.direction());
        }
        self.outbox.born::<A>(slot, now);
        self.counters.sessions_created.add(1);
    }

    /// Counts a session that was another gateway's, and is this one's now. Whether policy wants it, its first packet asks.
    pub fn adopt<A: SessionFamily>(&self, entry: &Entry<A>) {
        let [(endpoint, _), ..] = entry.ends();
        if entry.is_of_service() {
            let (key, to) = if entry.direction() == Direction::Inbound {
                (entry.key(), entry.to())
            } else {
                (entry.to().reversed(), entry.key().reversed())
            };
            if let Some((_, target)) = self.policy.target(&key.receiver(), &to.receiver()) {
                target.usage.adopt();
            }
        } else if let Some(usage) = self.policy.usage(endpoint) {
            usage.adopt();
        }
    }
}

/// Gives back the port of a session that is in no table any more; a client's session has none.
pub fn release<A: SessionFamily>(policy: &Policy, ports: &mut Allocator, session: &Ended<A>) {
    if session.direction != Direction::Egress {
        return;
    }
    let vip = policy.vip(session.translated.source);
    debug_assert!(vip.is_some(), "a VIP was forgotten while {} used it", session.origin.source.to_ip());
    if let Some(vip) = vip {
        ports.release(vip, &session.translated);
    }
}

/// Frees the ends of a session that has ended for a new one; its port stays in quarantine, if the table has room to say so.
pub fn vacate<A: SessionFamily>(slot: Slot, sessions: &mut Sessions, policy: &Policy, ports: &mut Allocator) {
    if let Err(gone) = sessions.vacate::<A>(slot) {
        release(policy, ports, &gone);
    }
}

/// Gives back what a session counts for, which was opened by this first packet, as it came and as it went.
pub fn close<A: SessionFamily>(policy: &Policy, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
    match direction {
        Direction::Egress => {
            if let Some(usage) = policy.usage(origin.source) {
                usage.close();
            }
        }
        Direction::Inbound => {
            if let Some((_, target)) = policy.target(&origin.receiver(), &translated.receiver()) {
                target.usage.close();
            }
        }
        _ => {}
    }
}
