//! Copies of sessions whose share has become this gateway's: the first packet that comes for one makes it live. Packets of other copies
//! are looked at like those that no session knows: they go to the gateway that has the session.

use crate::batch::{Batch, Lane};
use crate::counters::Direction;
use crate::pipeline::Context;
use crate::session::entry::Entry;
use crate::session::{SessionFamily, Sessions};
use crate::settle::Settle;
use crate::snapshot::policy::Policy;
use crate::snapshot::shares::Owner;

/// Makes the copies live that the batch's packets are of, and that are this gateway's by now.
pub fn run<A: Lane>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>, settle: &mut Settle<'_>) {
    let Context { view, now, .. } = *context;
    for i in batch.open_of::<A>().and(batch.copies) {
        let slot = batch.slots[i];
        let entry = *A::table(sessions).entry(slot);
        batch.elsewhere[i] = owner(&entry, &view.policy);
        // An earlier packet of the batch may have done it.
        if entry.is_copy() {
            if batch.elsewhere[i] != Owner::This {
                continue;
            }
            sessions.promote::<A>(slot, now);
            settle.adopt(&entry);
            settle.outbox.changed::<A>(slot, sessions, now);
            settle.counters.sessions_taken_over.add(1);
        }
        batch.directions[i] = entry.direction();
        batch.stale.insert(i);
    }
}

/// Whose a session is.
pub fn owner<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Owner {
    let [_, _, (vip, port)] = entry.ends();
    let Some(vip) = policy.vip(vip) else { return Owner::This };
    if !matches!(entry.direction(), Direction::Inbound | Direction::ServiceReply) {
        return vip.shares.owner_of_port(port);
    }
    // Where all announce a VIP, a client's session stays where it began.
    if vip.shares.is_shared() { Owner::This } else { vip.shares.owner() }
}
