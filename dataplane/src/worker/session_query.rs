//! Session queries and flushes from control, one slice of the session table per command.
//!
//! A cursor counts slots: first those of IPv4, then those of IPv6.

use crate::flow::address::V6;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::policy::compiled::Policy;
use crate::ports::allocator::Allocator;
use crate::replication::accounting::SessionAccounting;
use crate::session::end_reason::EndReason;
use crate::session::entry::Flags;
use crate::session::query::{SessionFilter, SessionInfo, describe, end_of_slice, slice};
use crate::session::{Accounting, SessionFamily, Sessions};
use crate::worker::command::{FlushChunk, PortChunk, PortUsage, SessionChunk};

/// Writes matching sessions into the chunk, up to its capacity, and advances its cursor.
pub fn list(sessions: &Sessions, chunk: &mut SessionChunk, now: Tick) {
    let Some(cursor) = chunk.cursor else { return };
    let v4_slots = u64::from(u32::table(sessions).slots());
    chunk.cursor = if cursor < v4_slots {
        Some(list_family::<u32>(sessions, cursor, &chunk.filter, &mut chunk.records, now))
    } else {
        let next = list_family::<V6>(sessions, cursor - v4_slots, &chunk.filter, &mut chunk.records, now);
        (next < V6::table(sessions).slots().into()).then_some(next + v4_slots)
    };
}

fn list_family<A: SessionFamily>(
    sessions: &Sessions,
    cursor: u64,
    filter: &SessionFilter,
    records: &mut Vec<SessionInfo>,
    now: Tick,
) -> u64 {
    for slot in slice::<A>(sessions, cursor) {
        if records.len() == records.capacity() {
            return slot.0.into();
        }
        records.extend(record::<A>(sessions, slot, now).filter(|record| matches(record, filter)));
    }
    end_of_slice::<A>(sessions, cursor)
}

/// Ends matching sessions and advances the chunk's cursor.
pub fn flush(sessions: &mut Sessions, chunk: &mut FlushChunk, now: Tick, accounting: &mut SessionAccounting<'_>) {
    let Some(cursor) = chunk.cursor else { return };
    let v4_slots = u64::from(u32::table(sessions).slots());
    chunk.cursor = if cursor < v4_slots {
        Some(flush_family::<u32>(sessions, cursor, chunk, now, accounting))
    } else {
        let next = flush_family::<V6>(sessions, cursor - v4_slots, chunk, now, accounting);
        (next < V6::table(sessions).slots().into()).then_some(next + v4_slots)
    };
}

fn flush_family<A: SessionFamily>(
    sessions: &mut Sessions,
    cursor: u64,
    chunk: &mut FlushChunk,
    now: Tick,
    accounting: &mut SessionAccounting<'_>,
) -> u64 {
    for slot in slice::<A>(sessions, cursor) {
        let is_match = record::<A>(sessions, slot, now).is_some_and(|record| matches(&record, &chunk.filter));
        if is_match && !A::table(sessions).entry(slot).flags().has(Flags::QUARANTINED) {
            let expiry = sessions.end_with_reason::<A>(slot, EndReason::Flushed, now);
            accounting.release(&expiry);
            chunk.ended += 1;
        }
    }
    end_of_slice::<A>(sessions, cursor)
}

/// The active session whose original direction is in a slot.
fn record<A: SessionFamily>(sessions: &Sessions, slot: Slot, now: Tick) -> Option<SessionInfo> {
    let table = A::table(sessions);
    // Only the slot of the original direction has a deadline, so most slots are skipped without reading the entry.
    if table.deadline(slot) == 0 {
        return None;
    }
    if table.entry(slot).is_standby() {
        return None;
    }
    Some(describe::<A>(sessions, slot, now))
}

/// Counts the used blocks and the sessions of each VIP, up to the capacity of the chunk, and advances its cursor.
pub fn port_usage(policy: &Policy, ports: &Allocator, sessions: &Sessions, chunk: &mut PortChunk) {
    let Some(cursor) = chunk.cursor else { return };
    let mut next = None;
    for vip in policy.vips().filter(|vip| chunk.only.is_none_or(|only| only == vip.ports.id)) {
        if u64::from(vip.ports.id.0) < cursor {
            continue;
        }
        if chunk.records.len() == chunk.records.capacity() {
            next = Some(vip.ports.id.0.into());
            break;
        }
        let used = ports.used_blocks(vip.ports.id);
        chunk.records.push(PortUsage { vip: vip.ports.id, used, sessions: sessions.vip_sessions_at(vip.address) });
    }
    chunk.cursor = next;
}

fn matches(record: &SessionInfo, filter: &SessionFilter) -> bool {
    filter.endpoint.is_none_or(|address| record.endpoint.ip() == address)
        && filter.vip.is_none_or(|address| record.vip.ip() == address)
        && filter.remote.is_none_or(|address| record.remote.ip() == address)
        && filter.protocol.is_none_or(|protocol| record.protocol == protocol)
        && filter.state.is_none_or(|state| record.state == state)
}
