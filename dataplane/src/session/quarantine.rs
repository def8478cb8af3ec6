//! Quarantine: sessions that have ended stay in the table until their port may be used again. A packet of the same pod to the same remote
//! revives one ([`Sessions::revive`]), or opens a new one with another VIP or port in its place ([`Sessions::vacate`]).

use super::entry::{Entry, Flags, Slot};
use super::{Ended, SessionFamily, Sessions, ended};
use crate::snapshot::network::HopId;
use crate::time::Tick;

impl Sessions {
    /// Takes a quarantined session up again for the same first packet: the same pod, the same port. Where its packets go, and where
    /// the answers come from, may have changed meanwhile.
    pub fn revive<A: SessionFamily>(
        &mut self,
        slot: Slot,
        (next_hop, reply_side): (Option<HopId>, u8),
        generation: u32,
        now: Tick,
    ) {
        let table = A::table_mut(self);
        let twin = table.entry(slot).twin();
        let gone = Flags::QUARANTINED.with(Flags::SYN).with(Flags::FIN).with(Flags::RST).with(Flags::SEEN);
        for at in [slot, twin] {
            let entry = table.entry_mut(at);
            entry.forget_told();
            entry.set_flags(entry.flags().without(gone));
            entry.set_generation(generation);
            entry.set_last_seen(now);
            entry.set_next_hop(None);
            entry.forget_numbers();
        }
        table.entry_mut(slot).set_next_hop(next_hop);
        let reply = table.entry_mut(twin);
        reply.set_flags(reply.flags().with_side(reply_side));
        self.open += 1;
        self.fairness.open(self.holder::<A>(slot));
        self.renew::<A>(slot, now);
    }

    /// Frees the ends of the first packet of a session that has ended for a new one. An egress session's port stays in quarantine to
    /// the same end: both directions are kept as if the VIP had been the pod, for that name is as unique as the port.
    ///
    /// # Errors
    /// When the table is full around that name: the session is gone from it, and its port must be released at once.
    pub fn vacate<A: SessionFamily>(&mut self, slot: Slot) -> Result<(), Ended<A>> {
        let (origin, _) = self.both::<A>(slot);
        if A::table(self).entry(origin).is_of_service() {
            // It has no port.
            self.remove::<A>(origin);
            return Ok(());
        }
        let (entry, deadline) = (*A::table(self).entry(origin), A::table(self).deadline(origin));
        let reply = *A::table(self).entry(entry.twin());
        debug_assert!(entry.flags().has(Flags::QUARANTINED), "only a session that has ended");
        let hashes = [entry.key(), entry.to(), reply.key()].map(|tuple| self.hash(&tuple));
        let table = A::table_mut(self);
        table.remove(hashes[0], origin);
        let mut renamed = Entry::new(entry.to(), entry.to(), entry.direction(), entry.flags());
        renamed.set_twin(entry.twin());
        renamed.set_last_seen(entry.last_seen());
        let Ok(slot) = table.insert(hashes[1], renamed) else {
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
