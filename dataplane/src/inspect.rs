//! Looking at sessions from outside, and ending them by hand: a slice of the table for each question.
//!
//! A cursor counts slots: first those of IPv4, then those of IPv6.

use crate::address::V6;
use crate::command::{FlushChunk, PortChunk, PortRecord, SessionChunk, SessionFilter, SessionRecord};
use crate::counters::{Direction, EndReason};
use crate::ports::allocator::Allocator;
use crate::session::entry::{Flags, Slot};
use crate::session::{SessionFamily, Sessions};
use crate::settle::Settle;
use crate::snapshot::policy::Policy;
use crate::time::Tick;

/// Slots that one question looks at.
const SLICE: u32 = 4096;

/// Copies matching sessions into the chunk, as many as it has room for, and moves its cursor on.
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
    records: &mut Vec<SessionRecord>,
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

/// Ends matching sessions and moves the chunk's cursor on.
pub fn flush(sessions: &mut Sessions, chunk: &mut FlushChunk, now: Tick, settle: &mut Settle<'_>) {
    let Some(cursor) = chunk.cursor else { return };
    let v4_slots = u64::from(u32::table(sessions).slots());
    chunk.cursor = if cursor < v4_slots {
        Some(flush_family::<u32>(sessions, cursor, chunk, now, settle))
    } else {
        let next = flush_family::<V6>(sessions, cursor - v4_slots, chunk, now, settle);
        (next < V6::table(sessions).slots().into()).then_some(next + v4_slots)
    };
}

fn flush_family<A: SessionFamily>(
    sessions: &mut Sessions,
    cursor: u64,
    chunk: &mut FlushChunk,
    now: Tick,
    settle: &mut Settle<'_>,
) -> u64 {
    for slot in slice::<A>(sessions, cursor) {
        let wanted = record::<A>(sessions, slot, now).is_some_and(|record| matches(&record, &chunk.filter));
        if wanted && !A::table(sessions).entry(slot).flags().has(Flags::QUARANTINED) {
            let expiry = sessions.end_because::<A>(slot, EndReason::Flushed, now);
            settle.settle(&expiry);
            chunk.ended += 1;
        }
    }
    end_of_slice::<A>(sessions, cursor)
}

pub(crate) fn slice<A: SessionFamily>(sessions: &Sessions, cursor: u64) -> impl Iterator<Item = Slot> + use<A> {
    let from = u32::try_from(cursor).unwrap_or(u32::MAX);
    (from..from.saturating_add(SLICE).min(A::table(sessions).slots())).map(Slot)
}

pub(crate) fn end_of_slice<A: SessionFamily>(sessions: &Sessions, cursor: u64) -> u64 {
    (cursor + u64::from(SLICE)).min(A::table(sessions).slots().into())
}

/// The session whose first direction is in a slot.
fn record<A: SessionFamily>(sessions: &Sessions, slot: Slot, now: Tick) -> Option<SessionRecord> {
    let table = A::table(sessions);
    // A deadline stands only in the slot of a session's first direction, so most slots are passed over unread.
    if table.deadline(slot) == 0 {
        return None;
    }
    if table.entry(slot).is_copy() {
        return None;
    }
    Some(describe::<A>(sessions, slot, now))
}

/// The session whose first direction is in a slot, or a copy of one.
pub(crate) fn describe<A: SessionFamily>(sessions: &Sessions, slot: Slot, now: Tick) -> SessionRecord {
    let table = A::table(sessions);
    let origin = table.entry(slot);
    let reply = table.entry(origin.twin());
    let (state, timeout) = sessions.state::<A>(slot);
    let idle_ms = now.since(origin.last_seen().later(reply.last_seen()));
    let [endpoint, remote, vip] = origin.ends();
    let [from_pod, to_pod] = match origin.direction() {
        Direction::Inbound => [reply, origin],
        _ => [origin, reply],
    };
    SessionRecord {
        protocol: origin.key().protocol,
        direction: origin.direction(),
        endpoint: (endpoint.0.to_ip(), endpoint.1).into(),
        vip: (vip.0.to_ip(), vip.1).into(),
        remote: (remote.0.to_ip(), remote.1).into(),
        state,
        idle_ms,
        expires_ms: timeout.saturating_sub(idle_ms),
        packets_out: from_pod.packets(),
        bytes_out: from_pod.bytes(),
        packets_in: to_pod.packets(),
        bytes_in: to_pod.bytes(),
    }
}

/// Counts the blocks in use, and the sessions, of as many VIPs as the chunk has room for, and moves its cursor on.
pub fn ports(policy: &Policy, ports: &Allocator, sessions: &Sessions, chunk: &mut PortChunk) {
    let Some(cursor) = chunk.cursor else { return };
    let mut next = None;
    for vip in policy.vips().filter(|vip| chunk.only.is_none_or(|only| only == vip.id)) {
        if u64::from(vip.id.0) < cursor {
            continue;
        }
        if chunk.records.len() == chunk.records.capacity() {
            next = Some(vip.id.0.into());
            break;
        }
        let used = ports.used_blocks(vip.id);
        chunk.records.push(PortRecord { vip: vip.id, used, sessions: sessions.of_vip_at(vip.address) });
    }
    chunk.cursor = next;
}

fn matches(record: &SessionRecord, filter: &SessionFilter) -> bool {
    filter.endpoint.is_none_or(|address| record.endpoint.ip() == address)
        && filter.vip.is_none_or(|address| record.vip.ip() == address)
        && filter.remote.is_none_or(|address| record.remote.ip() == address)
        && filter.protocol.is_none_or(|protocol| record.protocol == protocol)
        && filter.state.is_none_or(|state| record.state == state)
}
