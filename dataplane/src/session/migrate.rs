//! Migration: the sessions of a former process into tables for another number of workers, or of sessions.
//!
//! The former tables are only read, so a process that dies in the middle has changed nothing, and the next one begins anew. What
//! comes out are tables as a former process with the new numbers would have left them: [`Sessions::take_up`] asks policy, takes
//! ports, and sets timers, as after every restart.
//!
//! Answers find their worker by the block of their port (`ports/pool.rs`), so all sessions of a block come to one worker, whichever
//! had it before; clients' sessions have no block, and the directory finds them. Where not all fit, those last seen longest ago end.

use foldhash::HashMap;
use vipgate_mem::{Region, Slab, Storage, StorageError};

use super::entry::{Entry, Flags, Slot};
use super::region::{Header, Identity, Unusable, whole};
use super::table::Table;
use super::timeout::Timeouts;
use super::{SessionFamily, Sessions};
use crate::address::{Address, V6};
use crate::counters::Direction;
use crate::ports::BlockId;
use crate::time::Tick;

/// What a session is to this gateway. Those that matter most come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// It is open here.
    Active,
    /// It is replicated from another gateway.
    Standby,
    /// It has ended; its port isn't given out yet.
    Quarantined,
}

impl Role {
    /// That of a session with both entries. A process that died between the two halves of an end, or of a revival, has ended it;
    /// between those of a change of owners, another gateway has it.
    pub(super) fn of<A: Address>(table: &Table<A>, origin: Slot, twin: Slot) -> Self {
        let both = [table.entry(origin), table.entry(twin)];
        if both.iter().any(|entry| entry.flags().has(Flags::QUARANTINED)) {
            Self::Quarantined
        } else if both.iter().any(|entry| entry.is_copy()) {
            Self::Standby
        } else {
            Self::Active
        }
    }
}

/// Why the tables of a former process can't be read.
#[derive(Debug, thiserror::Error)]
pub enum FormerError {
    /// They are of no use.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The kernel refuses.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// The tables that a process of this run of the kernel left in a region, and whose they are, whatever its numbers were. They are to be
/// read only; nothing in the region is changed.
///
/// # Errors
/// When they can't be read by this version, or not at all.
pub fn open_former(region: &mut Region, boot: [u8; 16]) -> Result<(Sessions, Identity), FormerError> {
    region.rewind();
    if region.len() < Region::bytes_of::<Header>(1) {
        return Err(Unusable::Damaged.into());
    }
    let header: Slab<Header> = region.slab(1).map_err(StorageError::from)?;
    let (identity, key) = header[0].identity()?;
    if identity.boot != boot {
        return Err(Unusable::Boot.into());
    }
    // Slabs beyond its end would make it longer.
    if Sessions::region_bytes(identity.capacity).is_none_or(|bytes| bytes > region.len()) {
        return Err(Unusable::Damaged.into());
    }
    let sessions = Sessions::in_storage(identity.capacity, Timeouts::default(), key, &mut Storage::Region(region))?;
    Ok((sessions, identity))
}

/// What became of the sessions of a former process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Migrated {
    /// Sessions of this gateway.
    pub active: u32,
    /// Those replicated from other gateways.
    pub standby: u32,
    /// Those that had ended and whose port isn't given out yet.
    pub quarantined: u32,
    /// Of the new tables, one had no room for them.
    pub dropped: u32,
    /// Entries without a twin that agrees.
    pub torn: u32,
}

/// One session in a former table.
struct Candidate {
    role: Role,
    /// Milliseconds since its last packet.
    idle: u32,
    /// The place of its table among the former ones.
    from: u32,
    origin: Slot,
    twin: Slot,
    is_v6: bool,
    /// The block that its port is in, as a place in the list of their sizes.
    block: Option<u32>,
    /// The port of its first packet's sender.
    port: u16,
}

/// The blocks in which sessions hold ports, by VIP.
#[derive(Default)]
struct Blocks {
    numbers: HashMap<(std::net::IpAddr, BlockId), u32>,
}

impl Blocks {
    fn number<A: Address>(&mut self, origin: &Entry<A>) -> Option<u32> {
        let to = origin.to();
        let next = self.numbers.len() as u32;
        let is_egress = origin.direction() == Direction::Egress;
        is_egress.then(|| *self.numbers.entry((to.source.to_ip(), BlockId::of(to.source_port))).or_insert(next))
    }
}

/// Brings sessions of former tables into new, empty ones, of which each gets about as many.
pub fn migrate(former: &[Sessions], into: &mut [Sessions], now: Tick) -> Migrated {
    let mut migrated = Migrated::default();
    let (mut found, mut blocks) = (Vec::new(), Blocks::default());
    for (from, tables) in (0..).zip(former) {
        migrated.torn += collect::<u32>(tables, from, now, &mut blocks, &mut found);
        migrated.torn += collect::<V6>(tables, from, now, &mut blocks, &mut found);
    }
    found.sort_unstable_by_key(|session| (session.role, session.idle));
    let room: usize = into.iter().map(|sessions| sessions.capacity as usize).sum();
    let open = found.partition_point(|session| session.role != Role::Quarantined);
    // They would only take the place of others in the worker that they belong to.
    migrated.dropped += found.drain(room.min(open)..open).len() as u32;

    let mut load = Load::new(into.len());
    let workers = load.deal(&found, blocks.numbers.len());
    for session in &found {
        let worker = match session.block {
            Some(block) => workers[block as usize],
            // Where its gateway's updates look for it (`copies::worker_of`).
            None if session.role == Role::Standby => load.add_to(u32::from(session.port) % into.len().max(1) as u32, 1),
            None => load.add_to_least(1),
        };
        let from = &former[session.from as usize];
        let is_in = into.get_mut(worker as usize).is_some_and(|into| {
            if session.is_v6 { into.restore::<V6>(from, session) } else { into.restore::<u32>(from, session) }
        });
        *match (is_in, session.role) {
            (false, _) => &mut migrated.dropped,
            (true, Role::Active) => &mut migrated.active,
            (true, Role::Standby) => &mut migrated.standby,
            (true, Role::Quarantined) => &mut migrated.quarantined,
        } += 1;
    }
    migrated
}

/// Lists the sessions of one former table; returns how many entries belong to none.
fn collect<A: SessionFamily>(
    sessions: &Sessions,
    from: u32,
    now: Tick,
    blocks: &mut Blocks,
    found: &mut Vec<Candidate>,
) -> u32 {
    let table = A::table(sessions);
    let (mut occupied, mut in_sessions) = (0, 0);
    for origin in (0..table.slots()).map(Slot).filter(|slot| table.is_occupied(*slot)) {
        occupied += 1;
        let Some(twin) = whole(table, sessions.key, origin) else { continue };
        in_sessions += 2;
        let last_seen = table.entry(origin).last_seen().later(table.entry(twin).last_seen());
        found.push(Candidate {
            role: Role::of(table, origin, twin),
            idle: now.since(last_seen),
            from,
            origin,
            twin,
            is_v6: A::BITS == V6::BITS,
            block: blocks.number(table.entry(origin)),
            port: table.entry(origin).key().source_port,
        });
    }
    occupied - in_sessions
}

/// Sessions that the workers get.
struct Load(Vec<u32>);

impl Load {
    fn new(workers: usize) -> Self {
        Self(vec![0; workers])
    }

    /// Gives so many to a worker, and says which.
    fn add_to(&mut self, worker: u32, sessions: u32) -> u32 {
        if let Some(load) = self.0.get_mut(worker as usize) {
            *load += sessions;
        }
        worker
    }

    /// Gives so many to whoever has least, and says who that is.
    fn add_to_least(&mut self, sessions: u32) -> u32 {
        let least = (0..).zip(&mut self.0).min_by_key(|(_, load)| **load);
        least.map_or(0, |(worker, load)| {
            *load += sessions;
            worker
        })
    }

    /// A worker for each block, the largest ones first, which fills all evenly: no worker gets more than an even part and one block.
    fn deal(&mut self, found: &[Candidate], blocks: usize) -> Vec<u32> {
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

impl Sessions {
    /// Takes in a session as it was; false if it has no room, or one of its ends is another session's.
    fn restore<A: SessionFamily>(&mut self, from: &Self, session: &Candidate) -> bool {
        let is_open = session.role != Role::Quarantined;
        if (is_open && self.held() >= self.capacity) || !A::table(self).has_room(2) {
            return false;
        }
        let [mut origin, mut twin] = [session.origin, session.twin].map(|slot| *A::table(from).entry(slot));
        let keys = [origin.key(), twin.key()];
        let [origin_hash, twin_hash] = keys.map(|key| self.hash(&key));
        if keys.iter().any(|key| !self.is_free(key)) {
            return false;
        }
        let table = A::table_mut(self);
        let Ok(twin_slot) = table.insert(twin_hash, twin) else { return false };
        origin.set_twin(twin_slot);
        let Ok(slot) = table.insert(origin_hash, origin) else {
            table.remove(twin_hash, twin_slot);
            return false;
        };
        twin.set_twin(slot);
        *table.entry_mut(twin_slot) = twin;
        match session.role {
            Role::Active => self.open += 1,
            Role::Standby => self.copies += 1,
            Role::Quarantined => {}
        }
        true
    }
}

#[cfg(test)]
mod tests;
