//! Failover: the first packet of a standby session whose shard this gateway owns now activates the session. Packets of
//! other standby sessions are classified like those without a session: they go to the owner.

use crate::flow::ids::Owner;
use crate::io::batch::Batch;
use crate::replication::accounting::SessionAccounting;
use crate::replication::owner::owner;
use crate::session::Sessions;
use crate::stage::context::{Context, PacketFamily};

/// Activates standby sessions of the batch's packets whose owner this gateway is now.
pub fn run<A: PacketFamily>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    context: &Context<'_>,
    accounting: &mut SessionAccounting<'_>,
) {
    let Context { snapshot, now, .. } = *context;
    for i in batch.undecided_of::<A>().and(batch.standby) {
        let slot = batch.slots[i];
        let entry = *A::table(sessions).entry(slot);
        batch.session_owners[i] = owner(&entry, &snapshot.policy);
        // An earlier packet of the batch may have activated it.
        if entry.is_standby() {
            if batch.session_owners[i] != Owner::This {
                continue;
            }
            sessions.promote::<A>(slot, now);
            accounting.restore(&entry);
            accounting.replication_queue.changed::<A>(slot, sessions, now);
            accounting.counters.sessions_failed_over.add(1);
        }
        batch.directions[i] = entry.direction();
        batch.stale.insert(i);
    }
}
