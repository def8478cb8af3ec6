//! Session accounting: counts opened and ended sessions, releases the quota of an ended session at once and its port
//! after the quarantine, and passes both events to the session log and to replication.

use crate::flow::direction::Direction;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::flow::tuple::Tuple;
use crate::observe::counters::Counters;
use crate::observe::session_log::SessionLog;
use crate::policy::compiled::Policy;
use crate::ports::allocator::Allocator;
use crate::replication::queue::ReplicationQueue;
use crate::session::entry::Entry;
use crate::session::{Accounting, Ended, Expiry, SessionFamily, Sessions};

/// The tables and counters that sessions are accounted in.
#[derive(Debug)]
pub struct SessionAccounting<'a> {
    /// The policy in force.
    pub policy: &'a Policy,
    /// The worker's ports.
    pub ports: &'a mut Allocator,
    /// The worker's counters.
    pub counters: &'a Counters,
    /// Records for other gateways.
    pub replication_queue: &'a mut ReplicationQueue,
    pub session_log: &'a SessionLog,
}

impl Accounting for SessionAccounting<'_> {
    fn release<A: SessionFamily>(&mut self, expiry: &Expiry<A>) {
        match expiry {
            Expiry::Ended(reason, session) => {
                self.counters.sessions_ended[*reason as usize].add(1);
                release_quota(self.policy, &session.origin, &session.translated, session.direction);
                self.session_log.ended(&session.origin, &session.translated, session.direction);
                self.replication_queue.ended(session, self.policy);
            }
            Expiry::Released(session) => release_port(self.policy, self.ports, session),
        }
    }

    fn standby_evicted(&mut self, is_entitled: bool) {
        self.counters.standby_rejected.add(1);
        if is_entitled {
            self.replication_queue.count_evicted();
        }
    }
}

impl SessionAccounting<'_> {
    /// Accounts for a session that was opened just now, in `slot`.
    #[inline]
    pub fn opened<A: SessionFamily>(&mut self, slot: Slot, sessions: &Sessions, now: Tick) {
        if self.session_log.is_enabled() {
            let entry = A::table(sessions).entry(slot);
            self.session_log.opened(&entry.key(), &entry.translated(), entry.direction());
        }
        self.replication_queue.opened::<A>(slot, now);
        self.counters.sessions_created.add(1);
    }

    /// Counts a standby session that has become active here in its quota. Whether policy allows it is checked by its
    /// first packet.
    pub fn restore<A: SessionFamily>(&self, entry: &Entry<A>) {
        let [(endpoint, _), ..] = entry.transport_addresses();
        if entry.is_dnat() {
            let (key, to) = if entry.direction() == Direction::Inbound {
                (entry.key(), entry.translated())
            } else {
                (entry.translated().reversed(), entry.key().reversed())
            };
            if let Some((_, target)) = self.policy.permitted_backend(&key.receiver(), &to.receiver()) {
                target.usage.restore();
            }
        } else if let Some(usage) = self.policy.usage(endpoint) {
            usage.restore();
        }
    }
}

/// Releases the SNAT port of a session that was removed from the table; an inbound session has none.
pub fn release_port<A: SessionFamily>(policy: &Policy, ports: &mut Allocator, session: &Ended<A>) {
    if session.direction != Direction::Egress {
        return;
    }
    let vip = policy.vip(session.translated.source);
    debug_assert!(vip.is_some(), "a VIP was removed while {} used it", session.origin.source.to_ip());
    if let Some(vip) = vip {
        ports.release(&vip.ports, &session.translated);
    }
}

/// Frees the tuple of an ended session for a new one; its port stays quarantined if the table has space to record that.
pub fn free_tuple<A: SessionFamily>(slot: Slot, sessions: &mut Sessions, policy: &Policy, ports: &mut Allocator) {
    if let Err(gone) = sessions.free_tuple::<A>(slot) {
        release_port(policy, ports, &gone);
    }
}

/// Releases the quota of a session, given by its first packet before and after translation.
pub fn release_quota<A: SessionFamily>(
    policy: &Policy,
    origin: &Tuple<A>,
    translated: &Tuple<A>,
    direction: Direction,
) {
    match direction {
        Direction::Egress => {
            if let Some(usage) = policy.usage(origin.source) {
                usage.close();
            }
        }
        Direction::Inbound => {
            if let Some((_, target)) = policy.permitted_backend(&origin.receiver(), &translated.receiver()) {
                target.usage.close();
            }
        }
        _ => {}
    }
}
