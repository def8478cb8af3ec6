//! Quarantine: an ended session stays in the table until its port may be reused. A packet from the same pod to the same
//! remote reopens it ([`Sessions::reopen`]), or replaces it with a session that has another VIP or port
//! ([`Sessions::free_tuple`]).

use super::entry::{Entry, Flags};
use super::{Ended, SessionFamily, Sessions, ended};
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::policy::network::NextHopId;

impl Sessions {
    /// Reopens a quarantined session for the same original-direction tuple: same pod, same port. The next hop and the
    /// ingress side of replies may have changed meanwhile.
    pub fn reopen<A: SessionFamily>(
        &mut self,
        slot: Slot,
        (next_hop, reply_side): (Option<NextHopId>, u8),
        generation: u32,
        now: Tick,
    ) {
        let table = A::table_mut(self);
        let twin = table.entry(slot).twin();
        let cleared = Flags::QUARANTINED.with(Flags::SYN).with(Flags::FIN).with(Flags::RST).with(Flags::SEEN);
        for at in [slot, twin] {
            let entry = table.entry_mut(at);
            entry.clear_replication();
            entry.set_flags(entry.flags().without(cleared));
            entry.set_generation(generation);
            entry.set_last_seen(now);
            entry.set_next_hop(None);
            entry.reset_numbers();
        }
        table.entry_mut(slot).set_next_hop(next_hop);
        let reply = table.entry_mut(twin);
        reply.set_flags(reply.flags().with_side(reply_side));
        self.open += 1;
        self.fairness.open(self.holder::<A>(slot));
        self.reset_deadline::<A>(slot, now);
    }

    /// Frees the original-direction tuple of a quarantined session for a new one. An egress session's port stays in
    /// quarantine toward the same remote: both entries are rekeyed as if the VIP were the pod, since that tuple is as
    /// unique as the port.
    ///
    /// # Errors
    /// If the table has no slot for that key: the session is removed, and its port must be released at once.
    pub fn free_tuple<A: SessionFamily>(&mut self, slot: Slot) -> Result<(), Ended<A>> {
        let (origin, _) = self.slot_pair::<A>(slot);
        if A::table(self).entry(origin).is_dnat() {
            // It holds no SNAT port.
            self.remove::<A>(origin);
            return Ok(());
        }
        let (entry, deadline) = (*A::table(self).entry(origin), A::table(self).deadline(origin));
        let reply = *A::table(self).entry(entry.twin());
        debug_assert!(entry.flags().has(Flags::QUARANTINED), "only a session that has ended");
        let hashes = [entry.key(), entry.translated(), reply.key()].map(|tuple| self.hash(&tuple));
        let table = A::table_mut(self);
        table.remove(hashes[0], origin);
        let mut rekeyed = Entry::new(entry.translated(), entry.translated(), entry.direction(), entry.flags());
        rekeyed.set_twin(entry.twin());
        rekeyed.set_last_seen(entry.last_seen());
        let Ok(slot) = table.insert(hashes[1], rekeyed) else {
            table.remove(hashes[2], entry.twin());
            return Err(ended(&entry));
        };
        table.set_deadline(slot, deadline);
        let mut twin = Entry::new(reply.key(), reply.key(), reply.direction(), reply.flags());
        twin.set_twin(slot);
        twin.set_last_seen(reply.last_seen());
        *table.entry_mut(entry.twin()) = twin;
        Ok(())
    }
}
