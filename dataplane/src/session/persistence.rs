//! Warm restart: the session tables are slabs of a file in shared memory, and the next process restores them.
//!
//! A process may die at any instruction. Its writes are in the file, in program order, so an entry with a tag is
//! complete; but one entry of a session may be missing or contradict its twin. So a restore keeps only pairs that agree
//! in everything, recomputes derived state (checksum deltas, table counts), clears what was valid only in the dead
//! process (next hops, generations), and wipes the rest. Whether policy still covers a session, and its port and quota,
//! are checked once ([`RestoreSession`]). Choices of clients with session affinity lie behind the tables, each with a
//! check of its own.

use bytemuck::{Pod, Zeroable};
use vipgate_mem::{Region, Slab, Storage, StorageError};

use super::affinity::Choice;
use super::entry::{Entry, Flags};
use super::fairness::Holder;
use super::pair::{Role, matching_twin};
use super::timeout::Timeouts;
use super::{SessionFamily, Sessions, deadline};
use crate::flow::address::V6;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::flow::tuple::HashKey;

/// Layout version: incremented whenever the bytes of a table, or their meaning, change.
const LAYOUT: u32 = 7;
const MAGIC: [u8; 8] = *b"vipgate\0";
/// Marks that the tables behind the header are complete.
const FINISHED: u32 = 0x600d_600d;

/// Identity of a worker's tables. Tables of another identity can't be restored in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of the worker.
    pub worker: u32,
    /// Number of workers.
    pub workers: u32,
    /// Capacity in sessions.
    pub capacity: u32,
    /// Boot ID of the kernel: the clock of ticks restarts with each boot.
    pub boot: [u8; 16],
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Header {
    magic: [u8; 8],
    layout: u32,
    finished: u32,
    worker: u32,
    workers: u32,
    capacity: u32,
    entry_bytes: [u16; 2],
    boot: [u8; 16],
    key: [u64; 4],
}

impl Header {
    /// Identity of the tables behind the header, and their hash key.
    pub(super) fn identity(&self) -> Result<(Identity, HashKey), Unusable> {
        if self.magic != MAGIC || self.finished != FINISHED {
            return Err(Unusable::Damaged);
        }
        if self.layout != LAYOUT || self.entry_bytes != ENTRY_BYTES {
            return Err(Unusable::Layout { found: self.layout });
        }
        let Self { worker, workers, capacity, boot, key, .. } = *self;
        Ok((Identity { worker, workers, capacity, boot }, HashKey::new(key)))
    }
}

/// Why the tables of a former process can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// Not session tables, or truncated.
    #[error("it is damaged, or was never finished")]
    Damaged,
    /// Written by a version with another layout.
    #[error("its layout is version {found}; this is version {LAYOUT}")]
    Layout {
        /// Layout version of the file.
        found: u32,
    },
    /// Written for another number of workers.
    #[error("it is of worker {worker} of {workers}")]
    Workers {
        /// Number of the worker.
        worker: u32,
        /// Number of workers.
        workers: u32,
    },
    /// Written for another capacity.
    #[error("it has a capacity of {found} sessions")]
    Capacity {
        /// Capacity of the file, in sessions.
        found: u32,
    },
    /// Written before the last boot.
    #[error("the machine has rebooted since")]
    Boot,
}

/// Why the tables of a former process can't be read.
#[derive(Debug, thiserror::Error)]
pub enum FormerError {
    /// The tables are unusable.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The storage can't be mapped.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Contents of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionContents {
    Empty,
    /// Unusable data, which was discarded.
    Unusable(Unusable),
    /// The tables of a former process: [`Sessions::restore`] must be called before the first packet.
    Tables,
}

/// Result of restoring the sessions of a former process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Active sessions.
    pub active: u32,
    /// Standby sessions.
    pub standby: u32,
    /// Quarantined sessions.
    pub quarantined: u32,
    /// Entries without a consistent twin: the process died while it changed them.
    pub torn: u32,
    /// Sessions that policy no longer covers.
    pub rejected: u32,
}

/// Restores what a session holds besides its table entries: port, quota, directory entry. And the backends of clients
/// with session affinity.
pub trait RestoreSession {
    /// Restores the holdings of a session; false if that is impossible, which removes the session. `is_port_only`: the
    /// session is quarantined or standby, and holds only its port.
    fn restore<A: SessionFamily>(&mut self, origin: &Entry<A>, is_port_only: bool) -> bool;

    /// Restores a client's choice of a backend.
    fn restore_choice<A: SessionFamily>(&mut self, choice: &Choice<A>, now: Tick);
}

impl Sessions {
    /// Opens the tables in a region: those of a former process if they are this worker's, else empty ones. `key` is for
    /// new tables.
    ///
    /// # Errors
    /// If the region can't hold the tables; without space for them it is left empty.
    pub fn in_region(
        mut region: Region,
        identity: Identity,
        timeouts: Timeouts,
        key: HashKey,
    ) -> Result<(Self, RegionContents), StorageError> {
        let bytes = Self::region_bytes(identity.capacity).unwrap_or(u64::MAX);
        let (found, former_key) = if region.is_empty() {
            (RegionContents::Empty, None)
        } else {
            match check_header(&region, identity, bytes)? {
                Ok(key) => (RegionContents::Tables, Some(key)),
                Err(unusable) => (RegionContents::Unusable(unusable), None),
            }
        };
        if former_key.is_none() {
            region.clear()?;
        }
        if let Err(error) = region.allocate(bytes) {
            // The lack of space is the error to report.
            let _ = region.clear();
            return Err(error);
        }
        let mut slabs = region.into_slabs();
        let mut header: Slab<Header> = slabs.slab(1)?;
        let storage = &mut Storage::Region(&mut slabs);
        let sessions = Self::in_storage(identity.capacity, timeouts, former_key.unwrap_or(key), storage)?;
        if former_key.is_some() {
            return Ok((sessions, found));
        }
        header[0] = Header {
            magic: MAGIC,
            layout: LAYOUT,
            finished: FINISHED,
            worker: identity.worker,
            workers: identity.workers,
            capacity: identity.capacity,
            entry_bytes: ENTRY_BYTES,
            boot: identity.boot,
            key: key.words(),
        };
        Ok((sessions, found))
    }

    /// Restores the sessions of a former process.
    pub fn restore(&mut self, now: Tick, holdings: &mut impl RestoreSession) -> Restored {
        let mut restored = Restored::default();
        self.restore_family::<u32>(now, holdings, &mut restored);
        self.restore_family::<V6>(now, holdings, &mut restored);
        (self.open, self.standby) = (restored.active, restored.standby);
        self.restore_choices(now, holdings);
        restored
    }

    fn restore_choices(&mut self, now: Tick, holdings: &mut impl RestoreSession) {
        for slot in 0..self.choices.slots() {
            if let Some(choice) = self.choices.get::<u32>(slot) {
                holdings.restore_choice(&choice, now);
            } else if let Some(choice) = self.choices.get::<V6>(slot) {
                holdings.restore_choice(&choice, now);
            } else {
                continue;
            }
            self.choices.mark_used();
        }
    }

    fn restore_family<A: SessionFamily>(
        &mut self,
        now: Tick,
        holdings: &mut impl RestoreSession,
        restored: &mut Restored,
    ) {
        let (key, timeouts) = (self.key, self.timeouts);
        let (table, fairness) = A::parts_mut(self);
        table.reset_counts();
        let mut kept = vec![false; table.slots() as usize];
        for origin in (0..table.slots()).map(Slot) {
            let Some(twin) = matching_twin(table, key, origin) else { continue };
            let entry = *table.entry(origin);
            // A standby session holds only its port, like a quarantined one.
            let role = Role::of(table, origin, twin);
            let (is_quarantined, is_standby) = (role == Role::Quarantined, role == Role::Standby);
            if !holdings.restore(&entry, is_quarantined || is_standby) {
                restored.rejected += 1;
                table.clear_slot(origin);
                table.clear_slot(twin);
                continue;
            }
            for at in [origin, twin] {
                let entry = table.entry_mut(at);
                entry.rebuild(now);
                if entry.is_standby() && !is_standby {
                    entry.mark_active();
                } else if !entry.is_standby() && is_standby {
                    entry.mark_standby();
                }
                if is_quarantined {
                    entry.set_flags(entry.flags().with(Flags::QUARANTINED));
                }
                kept[at.0 as usize] = true;
            }
            let last_seen = table.entry(origin).last_seen().later(table.entry(twin).last_seen());
            let (_, timeout) = timeouts.state(table.entry(origin), table.entry(twin));
            let (since, count) = if is_quarantined {
                (now, &mut restored.quarantined)
            } else if is_standby {
                (last_seen, &mut restored.standby)
            } else {
                (last_seen, &mut restored.active)
            };
            table.set_deadline(twin, 0);
            table.set_deadline(origin, deadline(since.plus(timeout)));
            *count += 1;
            if !is_quarantined {
                fairness.open(Holder::of(&entry, &key));
            }
        }
        for slot in (0..table.slots()).map(Slot) {
            if kept[slot.0 as usize] {
                let hash = key.hash(&table.entry(slot).key());
                table.recount(hash, slot);
                continue;
            }
            // An empty slot may still have the deadline of an entry that was being removed.
            if table.is_occupied(slot) {
                table.clear_slot(slot);
                restored.torn += 1;
            } else if table.deadline(slot) != 0 {
                table.set_deadline(slot, 0);
            }
        }
    }
}

/// Opens the tables that a process left in a region since the last boot, whatever their identity. They are read only;
/// nothing in the region is changed.
///
/// # Errors
/// If this version can't read them, or they are damaged.
pub fn open_former(region: Region, boot: [u8; 16]) -> Result<(Sessions, Identity), FormerError> {
    if region.len() < Region::bytes_of::<Header>(1) {
        return Err(Unusable::Damaged.into());
    }
    let header = region.read_start::<Header>()?.ok_or(Unusable::Damaged)?;
    let (identity, key) = header.identity()?;
    if identity.boot != boot {
        return Err(Unusable::Boot.into());
    }
    // Slabs beyond its end would extend it.
    if Sessions::region_bytes(identity.capacity).is_none_or(|bytes| bytes > region.len()) {
        return Err(Unusable::Damaged.into());
    }
    let mut slabs = region.into_slabs();
    let _header: Slab<Header> = slabs.slab(1)?;
    let storage = &mut Storage::Region(&mut slabs);
    let sessions = Sessions::in_storage(identity.capacity, Timeouts::default(), key, storage)?;
    Ok((sessions, identity))
}

const ENTRY_BYTES: [u16; 2] = [size_of::<Entry<u32>>() as u16, size_of::<Entry<V6>>() as u16];

/// The hash key of the tables in a region that isn't empty, if they have this identity and are complete: `bytes` long.
fn check_header(region: &Region, identity: Identity, bytes: u64) -> Result<Result<HashKey, Unusable>, StorageError> {
    let Some(header) = region.read_start::<Header>()? else { return Ok(Err(Unusable::Damaged)) };
    Ok(header.identity().and_then(|(former, key)| {
        if (former.worker, former.workers) != (identity.worker, identity.workers) {
            Err(Unusable::Workers { worker: former.worker, workers: former.workers })
        } else if former.capacity != identity.capacity {
            Err(Unusable::Capacity { found: former.capacity })
        } else if former.boot != identity.boot {
            Err(Unusable::Boot)
        } else if region.len() < bytes {
            Err(Unusable::Damaged)
        } else {
            Ok(key)
        }
    }))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;
    use crate::flow::direction::Direction;
    use crate::flow::tuple::Tuple;
    use crate::session::entry::{Flags, Tracking};
    use crate::session::{Draft, tests};

    struct RestoreAll;

    impl RestoreSession for RestoreAll {
        fn restore<A: SessionFamily>(&mut self, _: &Entry<A>, _: bool) -> bool {
            true
        }

        fn restore_choice<A: SessionFamily>(&mut self, _: &Choice<A>, _: Tick) {}
    }

    const IDENTITY: Identity = Identity { worker: 0, workers: 2, capacity: 500, boot: [7; 16] };

    fn temp_path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("vipgate-sessions-{}-{name}", std::process::id()))
    }

    fn open(path: &std::path::Path, identity: Identity) -> (Sessions, RegionContents) {
        let region = Region::open(path).unwrap();
        let key = HashKey::new([11, 22, 33, 44]);
        Sessions::in_region(region, identity, Timeouts::default(), key).unwrap()
    }

    fn draft(n: u16) -> Draft<u32> {
        tests::draft(n, n ^ 0x5555)
    }

    fn is_whole(sessions: &Sessions, n: u16) -> bool {
        let draft = draft(n);
        let find = |tuple: &Tuple<u32>| sessions.find(sessions.hash(tuple), tuple);
        match (find(&draft.origin), find(&draft.translated.reversed())) {
            (Some(origin), Some(reply)) => {
                let table = u32::table(sessions);
                assert_eq!(table.entry(origin).translated(), draft.translated);
                assert_eq!((table.entry(origin).twin(), table.entry(reply).twin()), (reply, origin));
                true
            }
            (None, None) => false,
            entries => panic!("incomplete session: {entries:?}"),
        }
    }

    #[test]
    fn the_next_process_restores_all_sessions() {
        let path = temp_path("restored");
        {
            let (mut sessions, found) = open(&path, IDENTITY);
            assert_eq!(found, RegionContents::Empty);
            for n in 0..300 {
                sessions.commit(&draft(n), Tick(1000)).unwrap();
            }
            let ended = sessions.find(sessions.hash(&draft(7).origin), &draft(7).origin).unwrap();
            sessions.end::<u32>(ended, Tick(1001));
        }
        let (mut sessions, found) = open(&path, IDENTITY);
        assert_eq!(found, RegionContents::Tables);
        let restored = sessions.restore(Tick(2000), &mut RestoreAll);
        assert_eq!(restored, Restored { active: 299, standby: 0, quarantined: 1, torn: 0, rejected: 0 });
        assert_eq!(sessions.open_count(), 299);
        assert!((0..300).all(|n| is_whole(&sessions, n)));
        for n in 300..500 {
            sessions.commit(&draft(n), Tick(2000)).unwrap();
        }
        std::fs::remove_file(&path).unwrap();
    }

    /// Restores only sessions with source ports below this one.
    struct RestoreBelow(u16);

    impl RestoreSession for RestoreBelow {
        fn restore<A: SessionFamily>(&mut self, entry: &Entry<A>, _: bool) -> bool {
            entry.key().source_port < self.0
        }

        fn restore_choice<A: SessionFamily>(&mut self, _: &Choice<A>, _: Tick) {}
    }

    #[test]
    fn rejected_sessions_and_partly_removed_entries_leave_nothing_behind() {
        let path = temp_path("refused");
        let removed = {
            let (mut sessions, _) = open(&path, IDENTITY);
            for n in 0..20 {
                sessions.commit(&draft(n), Tick(1000)).unwrap();
            }
            let table = u32::table_mut(&mut sessions);
            let empty = (0..table.slots()).map(Slot).find(|slot| !table.is_occupied(*slot)).unwrap();
            table.set_deadline(empty, 77);
            empty
        };
        let (mut sessions, _) = open(&path, IDENTITY);
        let restored = sessions.restore(Tick(2000), &mut RestoreBelow(12));
        assert_eq!(restored, Restored { active: 12, standby: 0, quarantined: 0, torn: 0, rejected: 8 });
        assert!((0..20).all(|n| is_whole(&sessions, n) == (n < 12)));
        let table = u32::table(&sessions);
        assert_eq!((table.occupied(), table.deadline(removed)), (24, 0));
        let with_deadline = (0..table.slots()).map(Slot).filter(|slot| table.deadline(*slot) != 0);
        assert_eq!(with_deadline.count(), 12, "one per session");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn both_entries_of_a_restored_session_are_standby_or_neither_is() {
        let path = temp_path("standby");
        let (origin, quarantined) = (|n: u16| draft(n).origin, |n| n == 4);
        {
            let (mut sessions, _) = open(&path, IDENTITY);
            // Marked standby: the first entry, the second one, both, none, and both of a quarantined session.
            for (n, marked) in (0..).zip([[true, false], [false, true], [true; 2], [false; 2], [true; 2]]) {
                sessions.commit(&draft(n), Tick(1000)).unwrap();
                let slot = sessions.find(sessions.hash(&origin(n)), &origin(n)).unwrap();
                let table = u32::table_mut(&mut sessions);
                for (at, is_marked) in [slot, table.entry(slot).twin()].into_iter().zip(marked) {
                    let entry = table.entry_mut(at);
                    if is_marked {
                        entry.mark_standby();
                    }
                    if quarantined(n) {
                        entry.set_flags(entry.flags().with(Flags::QUARANTINED));
                    }
                }
            }
        }
        let (mut sessions, _) = open(&path, IDENTITY);
        let restored = sessions.restore(Tick(2000), &mut RestoreAll);
        assert_eq!(restored, Restored { active: 1, standby: 3, quarantined: 1, torn: 0, rejected: 0 });
        for n in 0..5 {
            let slot = sessions.find(sessions.hash(&origin(n)), &origin(n)).unwrap();
            let table = u32::table(&sessions);
            let both = [slot, table.entry(slot).twin()].map(|at| table.entry(at).is_standby());
            assert_eq!(both, [n < 3; 2], "{n}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn invalid_directions_and_sides_are_detected() {
        let entry = |flags: Flags, direction: u8| -> Entry<u32> {
            let mut bytes = [0; size_of::<Entry<u32>>()];
            (bytes[13], bytes[14]) = (flags.0, direction);
            bytemuck::pod_read_unaligned(&bytes)
        };
        for direction in 0..=u8::MAX {
            // The direction's byte also has the tracking bits, whatever these are.
            let is_valid = usize::from(direction & !Tracking::ALL.0) < Direction::ALL.len();
            assert_eq!(entry(Flags::INSIDE, direction).has_valid_direction(), is_valid, "{direction}");
        }
        let hairpin = Flags::ORIGIN.with(Flags::SYN);
        for side in [hairpin, hairpin.with(Flags::INSIDE), hairpin.with(Flags::OUTSIDE)] {
            assert!(entry(side, 0).has_valid_direction(), "{side:?}");
        }
        assert!(!entry(Flags::INSIDE.with(Flags::OUTSIDE), 0).has_valid_direction());
    }

    #[test]
    fn tables_of_another_identity_are_reported_and_discarded() {
        let path = temp_path("identity");
        drop(open(&path, IDENTITY));
        for (identity, expected) in [
            (Identity { workers: 3, ..IDENTITY }, Unusable::Workers { worker: 0, workers: 2 }),
            (Identity { workers: 3, capacity: 501, ..IDENTITY }, Unusable::Capacity { found: 500 }),
            (Identity { workers: 3, capacity: 501, boot: [8; 16], ..IDENTITY }, Unusable::Boot),
        ] {
            let (sessions, found) = open(&path, identity);
            assert_eq!((found, sessions.open_count()), (RegionContents::Unusable(expected), 0));
        }
        for bytes in [&b"something else entirely"[..], &[0; 5000]] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(open(&path, IDENTITY).1, RegionContents::Unusable(Unusable::Damaged));
        }
        let length = std::fs::metadata(&path).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
        assert_eq!(open(&path, IDENTITY).1, RegionContents::Unusable(Unusable::Damaged), "truncated");
        std::fs::remove_file(&path).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Random bytes are overwritten: only complete, correct sessions are restored, and the table works.
        #[test]
        fn a_damaged_table_never_yields_a_wrong_session(
            hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40),
        ) {
            let path = temp_path("damaged");
            let _ = std::fs::remove_file(&path);
            {
                let (mut sessions, _) = open(&path, Identity { capacity: 40, ..IDENTITY });
                for n in 0..40 {
                    sessions.commit(&draft(n), Tick(1000)).unwrap();
                }
            }
            let mut bytes = std::fs::read(&path).unwrap();
            // The header takes the first 2 MiB, the groups the next 2 MiB; then come the entries.
            let (groups, entries) = (2 << 20, 4 << 20);
            let offsets: Vec<usize> = (groups..groups + 160).chain(entries..entries + 7000).collect();
            for (at, byte) in hits {
                bytes[*at.get(&offsets)] = byte;
            }
            std::fs::write(&path, &bytes).unwrap();
            let (mut sessions, found) = open(&path, Identity { capacity: 40, ..IDENTITY });
            prop_assert_eq!(found, RegionContents::Tables);
            let restored = sessions.restore(Tick(2000), &mut RestoreAll);
            let whole = (0..40).filter(|&n| is_whole(&sessions, n)).count();
            prop_assert_eq!(whole, (restored.active + restored.standby + restored.quarantined) as usize);
            for n in 100..120 {
                // Whether full or not, it must not panic.
                let _ = sessions.commit(&draft(n), Tick(2000));
            }
            sessions.sweep::<u32>(0, u32::MAX, Tick(10_000_000), |_| true, |_| ());
            sessions.sweep::<u32>(0, u32::MAX, Tick(20_000_000), |_| true, |_| ());
            prop_assert_eq!(u32::table(&sessions).occupied(), 0);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
