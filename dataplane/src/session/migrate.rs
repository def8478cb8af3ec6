//! Migration of session tables to another number of workers or another capacity: the sessions of the former tables are
//! listed, and their replication records applied to the new ones.
//!
//! The former tables are only read: if the process dies during a migration, nothing has changed, and the next process
//! starts over. The new tables look as if a former process with the new numbers had left them: [`Sessions::restore`]
//! checks policy, reserves ports and sets timers, as after every restart. A record has all that a session keeps over a
//! restart, but for its role, and what other gateways have of it, which is taken from the former entries
//! (standby.rs). TCP numbers that aren't verified yet are in no record: the next segments bring them.
//!
//! Replies find their worker by the block of their port (`ports/pool.rs`), so all sessions of a block are assigned to
//! one worker, whichever worker had them before; inbound sessions have no block and are found in the directory. If not
//! all fit, those idle for longest are dropped. A client's choice of a backend goes to any worker: all of them read it.

use std::cmp::Reverse;
use std::net::IpAddr;

use foldhash::HashMap;

use super::affinity::stored::StoredChoices;
use super::pair::{Role, matching_twin};
use super::{SessionFamily, Sessions};
use crate::flow::address::{Address, V6};
use crate::flow::direction::Direction;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::ports::BlockId;

/// Result of a migration, in sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Migrated {
    /// Active sessions.
    pub active: u32,
    /// Standby sessions.
    pub standby: u32,
    /// Quarantined sessions.
    pub quarantined: u32,
    /// Dropped, since their new table was full.
    pub dropped: u32,
    /// Entries without a consistent twin.
    pub torn: u32,
}

/// A block of ports of a VIP.
type Block = (IpAddr, BlockId);

/// One session in a former table.
struct Candidate {
    role: Role,
    /// Milliseconds since its last packet.
    idle: u32,
    /// Index of its former table.
    from: usize,
    origin: Slot,
    is_v6: bool,
    /// The block of its port.
    block: Option<Block>,
    /// Source port of its original direction.
    port: u16,
}

/// Migrates the sessions of former tables to new, empty ones, evenly.
pub fn migrate(former: &[Sessions], into: &mut [Sessions], now: Tick) -> Migrated {
    migrate_choices(former, into, now);
    let (mut migrated, mut found) = (Migrated::default(), Vec::new());
    for (from, tables) in former.iter().enumerate() {
        migrated.torn += collect::<u32>(tables, from, now, &mut found) + collect::<V6>(tables, from, now, &mut found);
    }
    found.sort_unstable_by_key(|session| (session.role, session.idle));
    let capacity: usize = into.iter().map(|sessions| sessions.capacity as usize).sum();
    let open = found.partition_point(|session| session.role != Role::Quarantined);
    // They would only displace others in the worker that they are assigned to.
    migrated.dropped += found.drain(capacity.min(open)..open).len() as u32;

    let mut workers = Workers::new(&found, into.len());
    for session in &found {
        let (from, origin, role) = (&former[session.from], session.origin, session.role);
        let apply = if session.is_v6 { Sessions::apply_former::<V6> } else { Sessions::apply_former::<u32> };
        let worker = into.get_mut(workers.worker_of(session));
        let is_migrated = worker.is_some_and(|into| apply(into, from, origin, role, now));
        *match (is_migrated, role) {
            (false, _) => &mut migrated.dropped,
            (true, Role::Active) => &mut migrated.active,
            (true, Role::Standby) => &mut migrated.standby,
            (true, Role::Quarantined) => &mut migrated.quarantined,
        } += 1;
    }
    migrated
}

fn migrate_choices(former: &[Sessions], into: &mut [Sessions], now: Tick) {
    let mut into: Vec<&mut StoredChoices> = into.iter_mut().map(Sessions::choices_mut).collect();
    for sessions in former {
        sessions.choices().migrate(&mut into, now);
    }
}

/// Collects the sessions of one former table; returns the number of entries without a session.
fn collect<A: SessionFamily>(sessions: &Sessions, from: usize, now: Tick, found: &mut Vec<Candidate>) -> u32 {
    let table = A::table(sessions);
    let (mut occupied, mut in_sessions) = (0, 0);
    for origin in (0..table.slots()).map(Slot).filter(|slot| table.is_occupied(*slot)) {
        occupied += 1;
        let Some(twin) = matching_twin(table, sessions.key, origin) else { continue };
        // In a damaged table. No record has another one.
        if !matches!(table.entry(origin).direction(), Direction::Egress | Direction::Inbound) {
            continue;
        }
        in_sessions += 2;
        let last_seen = table.entry(origin).last_seen().later(table.entry(twin).last_seen());
        let to = table.entry(origin).translated();
        let is_egress = table.entry(origin).direction() == Direction::Egress;
        found.push(Candidate {
            role: Role::of(table, origin, twin),
            idle: now.since(last_seen),
            from,
            origin,
            is_v6: A::BITS == V6::BITS,
            block: is_egress.then(|| (to.source.to_ip(), BlockId::of(to.source_port))),
            port: table.entry(origin).key().source_port,
        });
    }
    occupied - in_sessions
}

/// Which worker gets which sessions.
struct Workers {
    /// Sessions assigned to each.
    loads: Vec<u32>,
    of_blocks: HashMap<Block, usize>,
}

impl Workers {
    /// Assigns a worker to each block, largest block first: no worker gets more than an even part and one block.
    fn new(found: &[Candidate], workers: usize) -> Self {
        let mut sizes: HashMap<Block, u32> = HashMap::default();
        for block in found.iter().filter_map(|session| session.block) {
            *sizes.entry(block).or_default() += 1;
        }
        let mut by_size: Vec<(Block, u32)> = sizes.into_iter().collect();
        by_size.sort_unstable_by_key(|(block, size)| (Reverse(*size), *block));
        let mut assigned = Self { loads: vec![0; workers], of_blocks: HashMap::default() };
        for (block, size) in by_size {
            let worker = assigned.least_loaded();
            assigned.add(worker, size);
            assigned.of_blocks.insert(block, worker);
        }
        assigned
    }

    fn worker_of(&mut self, session: &Candidate) -> usize {
        if let Some(worker) = session.block.and_then(|block| self.of_blocks.get(&block)) {
            return *worker;
        }
        let worker = match session.role {
            // The one that its owner's updates are sent to (`replication::apply::worker_of`).
            Role::Standby => usize::from(session.port) % self.loads.len().max(1),
            Role::Active | Role::Quarantined => self.least_loaded(),
        };
        self.add(worker, 1);
        worker
    }

    fn least_loaded(&self) -> usize {
        (0..self.loads.len()).min_by_key(|worker| self.loads[*worker]).unwrap_or_default()
    }

    fn add(&mut self, worker: usize, sessions: u32) {
        if let Some(load) = self.loads.get_mut(worker) {
            *load += sessions;
        }
    }
}

#[cfg(test)]
mod tests;
