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

use foldhash::HashMap;

use super::affinity::stored::StoredChoices;
use super::entry::Entry;
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

/// One session in a former table.
struct Candidate {
    role: Role,
    /// Milliseconds since its last packet.
    idle: u32,
    /// Index of its former table.
    from: u32,
    origin: Slot,
    is_v6: bool,
    /// The block of its port, as an index into the list of block sizes.
    block: Option<u32>,
    /// Source port of its original direction.
    port: u16,
}

/// Numbers of the blocks in which sessions hold ports.
#[derive(Default)]
struct BlockNumbers {
    numbers: HashMap<(std::net::IpAddr, BlockId), u32>,
}

impl BlockNumbers {
    fn number<A: Address>(&mut self, origin: &Entry<A>) -> Option<u32> {
        let to = origin.translated();
        let next = self.numbers.len() as u32;
        let is_egress = origin.direction() == Direction::Egress;
        is_egress.then(|| *self.numbers.entry((to.source.to_ip(), BlockId::of(to.source_port))).or_insert(next))
    }
}

/// Migrates the sessions of former tables to new, empty ones, evenly.
pub fn migrate(former: &[Sessions], into: &mut [Sessions], now: Tick) -> Migrated {
    migrate_choices(former, into, now);
    let mut migrated = Migrated::default();
    let (mut found, mut blocks) = (Vec::new(), BlockNumbers::default());
    for (from, tables) in (0..).zip(former) {
        migrated.torn += collect::<u32>(tables, from, now, &mut blocks, &mut found);
        migrated.torn += collect::<V6>(tables, from, now, &mut blocks, &mut found);
    }
    found.sort_unstable_by_key(|session| (session.role, session.idle));
    let capacity: usize = into.iter().map(|sessions| sessions.capacity as usize).sum();
    let open = found.partition_point(|session| session.role != Role::Quarantined);
    // They would only displace others in the worker that they are assigned to.
    migrated.dropped += found.drain(capacity.min(open)..open).len() as u32;

    let mut load = Load::new(into.len());
    let workers = load.assign_blocks(&found, blocks.numbers.len());
    for session in &found {
        let worker = match session.block {
            Some(block) => workers[block as usize],
            // The worker that its owner's updates are sent to (`worker_of`).
            None if session.role == Role::Standby => load.add_to(u32::from(session.port) % into.len().max(1) as u32, 1),
            None => load.add_to_least(1),
        };
        let (from, origin, role) = (&former[session.from as usize], session.origin, session.role);
        let apply = if session.is_v6 { Sessions::apply_former::<V6> } else { Sessions::apply_former::<u32> };
        let is_migrated = into.get_mut(worker as usize).is_some_and(|into| apply(into, from, origin, role, now));
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
fn collect<A: SessionFamily>(
    sessions: &Sessions,
    from: u32,
    now: Tick,
    blocks: &mut BlockNumbers,
    found: &mut Vec<Candidate>,
) -> u32 {
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
        found.push(Candidate {
            role: Role::of(table, origin, twin),
            idle: now.since(last_seen),
            from,
            origin,
            is_v6: A::BITS == V6::BITS,
            block: blocks.number(table.entry(origin)),
            port: table.entry(origin).key().source_port,
        });
    }
    occupied - in_sessions
}

/// Sessions assigned to each worker.
struct Load(Vec<u32>);

impl Load {
    fn new(workers: usize) -> Self {
        Self(vec![0; workers])
    }

    /// Assigns sessions to a worker; returns the worker.
    fn add_to(&mut self, worker: u32, sessions: u32) -> u32 {
        if let Some(load) = self.0.get_mut(worker as usize) {
            *load += sessions;
        }
        worker
    }

    /// Assigns sessions to the least loaded worker; returns the worker.
    fn add_to_least(&mut self, sessions: u32) -> u32 {
        let least = (0..).zip(&mut self.0).min_by_key(|(_, load)| **load);
        least.map_or(0, |(worker, load)| {
            *load += sessions;
            worker
        })
    }

    /// Assigns a worker to each block, largest block first: no worker gets more than an even part and one block.
    fn assign_blocks(&mut self, found: &[Candidate], blocks: usize) -> Vec<u32> {
        let mut sizes = vec![0_u32; blocks];
        for block in found.iter().filter_map(|session| session.block) {
            sizes[block as usize] += 1;
        }
        let mut by_size: Vec<u32> = (0..blocks as u32).collect();
        by_size.sort_by_key(|block| std::cmp::Reverse(sizes[*block as usize]));
        let mut workers = vec![0; blocks];
        for block in by_size {
            workers[block as usize] = self.add_to_least(sizes[block as usize]);
        }
        workers
    }
}

#[cfg(test)]
mod tests;
