//! Sessions that outlive the process: the tables lie in a file in memory, and the next process takes them up.
//!
//! A process may die at any instruction. What it wrote before is there, in the order in which it wrote, so an entry with a
//! tag is complete; but of a session's two entries one may be missing, or say other than its twin. Whoever takes the tables
//! up therefore believes only pairs that agree in everything, computes again what follows from them (checksum deltas, counts
//! of the table), forgets what only the dead process knew (next hops, generations), and wipes the rest. Whose session it is,
//! and whether policy still knows it, is asked once ([`Adopt`]).

use bytemuck::{Pod, Zeroable};
use vipgate_mem::{Region, Slab, Storage, StorageError};

use super::entry::{Entry, Flags, Slot};
use super::fairness::Holder;
use super::migrate::Role;
use super::table::Table;
use super::timeout::Timeouts;
use super::tuple::HashKey;
use super::{SessionFamily, Sessions, deadline};
use crate::address::V6;
use crate::time::Tick;

/// Moves on whenever the bytes of a table, or their meaning, change.
const LAYOUT: u32 = 5;
const MAGIC: [u8; 8] = *b"vipgate\0";
/// The tables behind the header are complete.
const FINISHED: u32 = 0x600d_600d;

/// Whose tables they are: tables of others are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The worker.
    pub worker: u32,
    /// Of how many.
    pub workers: u32,
    /// Sessions that fit.
    pub capacity: u32,
    /// The run of the kernel: its clock begins anew with the next one.
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
    /// Whose tables are behind it, and by which key they are hashed.
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

/// Why the tables of a former process are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// Not tables at all, or cut short.
    #[error("it is damaged, or was never finished")]
    Damaged,
    /// Made by a version with other tables.
    #[error("its layout is version {found}; this is version {LAYOUT}")]
    Layout {
        /// The other version.
        found: u32,
    },
    /// Made for another number of workers.
    #[error("it was made for worker {worker} of {workers}")]
    Workers {
        /// The worker.
        worker: u32,
        /// Of how many.
        workers: u32,
    },
    /// Made for another number of sessions.
    #[error("it was made for {found} sessions")]
    Capacity {
        /// How many.
        found: u32,
    },
    /// Made before the machine started.
    #[error("the machine was started since")]
    Boot,
}

/// What was in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// Something of no use; it is forgotten.
    Unusable(Unusable),
    /// The tables of a former process: [`Sessions::take_up`] must be called before the first packet.
    Tables,
}

/// What became of the sessions of a former process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenUp {
    /// Sessions that go on.
    pub sessions: u32,
    /// Copies of other gateways' sessions.
    pub copies: u32,
    /// Sessions that had ended and whose port rests.
    pub resting: u32,
    /// Entries without a twin that agrees: the process died while it changed them.
    pub torn: u32,
    /// Sessions that policy doesn't know any more.
    pub refused: u32,
}

/// Who knows what a session holds besides its place in the table.
pub trait Adopt {
    /// Takes what the session holds; false if it can't be had, which ends the session. `resting`: it has ended already,
    /// only its port is held.
    fn adopt<A: SessionFamily>(&mut self, origin: &Entry<A>, resting: bool) -> bool;
}

impl Sessions {
    /// The sessions in a region: those of a former process if it was this worker, else none. `key` is for new tables.
    ///
    /// # Errors
    /// When there is no room in the region.
    pub fn in_region(
        region: &mut Region,
        identity: Identity,
        timeouts: Timeouts,
        key: HashKey,
    ) -> Result<(Self, Found), StorageError> {
        let found = if region.is_empty() { Found::Nothing } else { inspect(region, identity)? };
        if let (Found::Tables, length) = (found, region.len()) {
            let header: Slab<Header> = region.slab(1)?;
            let key = HashKey::new(header[0].key);
            let sessions = Self::in_storage(identity.capacity, timeouts, key, &mut Storage::Region(region))?;
            // Longer than it was: somebody had cut it short.
            if region.len() == length {
                return Ok((sessions, found));
            }
        }
        let found = if found == Found::Tables { Found::Unusable(Unusable::Damaged) } else { found };
        region.clear()?;
        let mut header: Slab<Header> = region.slab(1)?;
        let sessions = Self::in_storage(identity.capacity, timeouts, key, &mut Storage::Region(region))?;
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

    /// Takes up the sessions of a former process.
    pub fn take_up(&mut self, now: Tick, adopt: &mut impl Adopt) -> TakenUp {
        let mut taken = TakenUp::default();
        self.take_up_family::<u32>(now, adopt, &mut taken);
        self.take_up_family::<V6>(now, adopt, &mut taken);
        (self.open, self.copies) = (taken.sessions, taken.copies);
        taken
    }

    fn take_up_family<A: SessionFamily>(&mut self, now: Tick, adopt: &mut impl Adopt, taken: &mut TakenUp) {
        let (key, timeouts) = (self.key, self.timeouts);
        let (table, fairness) = A::parts_mut(self);
        table.forget_counts();
        let mut kept = vec![false; table.slots() as usize];
        for origin in (0..table.slots()).map(Slot) {
            let Some(twin) = whole(table, key, origin) else { continue };
            let entry = *table.entry(origin);
            // Of a standby session only its port is held here, as of one that is quarantined.
            let (resting, is_copy) = match Role::of(table, origin, twin) {
                Role::Active => (false, false),
                Role::Standby => (false, true),
                Role::Quarantined => (true, false),
            };
            if !adopt.adopt(&entry, resting || is_copy) {
                taken.refused += 1;
                table.wipe(origin);
                table.wipe(twin);
                continue;
            }
            for at in [origin, twin] {
                let entry = table.entry_mut(at);
                entry.renew(now);
                if entry.is_copy() && !is_copy {
                    entry.unmark_copy();
                } else if !entry.is_copy() && is_copy {
                    entry.mark_copy();
                }
                if resting {
                    entry.set_flags(entry.flags().with(Flags::QUARANTINED));
                }
                kept[at.0 as usize] = true;
            }
            let heard = table.entry(origin).last_seen().later(table.entry(twin).last_seen());
            let (_, timeout) = timeouts.state(table.entry(origin), table.entry(twin));
            let (since, count) = if resting {
                (now, &mut taken.resting)
            } else if is_copy {
                (heard, &mut taken.copies)
            } else {
                (heard, &mut taken.sessions)
            };
            table.set_deadline(twin, 0);
            table.set_deadline(origin, deadline(since.plus(timeout)));
            *count += 1;
            if !resting {
                fairness.open(Holder::of(&entry, &key));
            }
        }
        for slot in (0..table.slots()).map(Slot) {
            if kept[slot.0 as usize] {
                let hash = key.hash(&table.entry(slot).key());
                table.recount(hash, slot);
                continue;
            }
            // An empty slot, too, may still have the deadline of an entry that was being removed.
            if table.is_occupied(slot) {
                table.wipe(slot);
                taken.torn += 1;
            } else if table.deadline(slot) != 0 {
                table.set_deadline(slot, 0);
            }
        }
    }
}

const ENTRY_BYTES: [u16; 2] = [size_of::<Entry<u32>>() as u16, size_of::<Entry<V6>>() as u16];

/// What a region that isn't empty holds. Cuts nothing from it.
fn inspect(region: &mut Region, identity: Identity) -> Result<Found, StorageError> {
    let header: Slab<Header> = region.slab(1)?;
    let found = header[0];
    drop(header);
    region.rewind();
    let former = match found.identity() {
        Ok((former, _)) => former,
        Err(unusable) => return Ok(Found::Unusable(unusable)),
    };
    let unusable = if (former.worker, former.workers) != (identity.worker, identity.workers) {
        Unusable::Workers { worker: former.worker, workers: former.workers }
    } else if former.capacity != identity.capacity {
        Unusable::Capacity { found: former.capacity }
    } else if former.boot != identity.boot {
        Unusable::Boot
    } else {
        return Ok(Found::Tables);
    };
    Ok(Found::Unusable(unusable))
}

/// The twin of a session's first direction, if both are there and agree in everything.
pub(super) fn whole<A: SessionFamily>(table: &Table<A>, key: HashKey, origin: Slot) -> Option<Slot> {
    let entry = table.is_occupied(origin).then(|| table.entry(origin))?;
    let twin_slot = entry.twin();
    let twin = (twin_slot != origin && table.is_occupied(twin_slot)).then(|| table.entry(twin_slot))?;
    let agree = entry.flags().has(Flags::ORIGIN)
        && !twin.flags().has(Flags::ORIGIN)
        && twin.twin() == origin
        && entry.key() == twin.to().reversed()
        && entry.to() == twin.key().reversed()
        && entry.has_way()
        && twin.has_way()
        && table.is_at_home(key.hash(&entry.key()), origin)
        && table.is_at_home(key.hash(&twin.key()), twin_slot);
    agree.then_some(twin_slot)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;
    use crate::counters::Direction;
    use crate::session::entry::{Flags, Tracking};
    use crate::session::tuple::Tuple;
    use crate::session::{Draft, tests};

    struct Everything;

    impl Adopt for Everything {
        fn adopt<A: SessionFamily>(&mut self, _: &Entry<A>, _: bool) -> bool {
            true
        }
    }

    const IDENTITY: Identity = Identity { worker: 0, workers: 2, capacity: 500, boot: [7; 16] };

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("vipgate-sessions-{}-{name}", std::process::id()))
    }

    fn open(path: &std::path::Path, identity: Identity) -> (Sessions, Found, Region) {
        let mut region = Region::open(path).unwrap();
        let key = HashKey::new([11, 22, 33, 44]);
        let (sessions, found) = Sessions::in_region(&mut region, identity, Timeouts::default(), key).unwrap();
        (sessions, found, region)
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
                assert_eq!(table.entry(origin).to(), draft.translated);
                assert_eq!((table.entry(origin).twin(), table.entry(reply).twin()), (reply, origin));
                true
            }
            (None, None) => false,
            halves => panic!("half a session: {halves:?}"),
        }
    }

    #[test]
    fn the_next_process_finds_what_was_there() {
        let path = scratch("kept");
        {
            let (mut sessions, found, _region) = open(&path, IDENTITY);
            assert_eq!(found, Found::Nothing);
            for n in 0..300 {
                sessions.commit(&draft(n), Tick(1000)).unwrap();
            }
            let ended = sessions.find(sessions.hash(&draft(7).origin), &draft(7).origin).unwrap();
            sessions.end::<u32>(ended, Tick(1001));
        }
        let (mut sessions, found, _region) = open(&path, IDENTITY);
        assert_eq!(found, Found::Tables);
        let taken = sessions.take_up(Tick(2000), &mut Everything);
        assert_eq!(taken, TakenUp { sessions: 299, copies: 0, resting: 1, torn: 0, refused: 0 });
        assert_eq!(sessions.open_count(), 299);
        assert!((0..300).all(|n| is_whole(&sessions, n)));
        for n in 300..500 {
            sessions.commit(&draft(n), Tick(2000)).unwrap();
        }
        std::fs::remove_file(&path).unwrap();
    }

    /// Adopts sessions of ports below this one.
    struct Below(u16);

    impl Adopt for Below {
        fn adopt<A: SessionFamily>(&mut self, entry: &Entry<A>, _: bool) -> bool {
            entry.key().source_port < self.0
        }
    }

    #[test]
    fn nothing_is_left_of_what_is_refused_or_was_being_removed() {
        let path = scratch("refused");
        let removed = {
            let (mut sessions, _, _region) = open(&path, IDENTITY);
            for n in 0..20 {
                sessions.commit(&draft(n), Tick(1000)).unwrap();
            }
            let table = u32::table_mut(&mut sessions);
            let empty = (0..table.slots()).map(Slot).find(|slot| !table.is_occupied(*slot)).unwrap();
            table.set_deadline(empty, 77);
            empty
        };
        let (mut sessions, _, _region) = open(&path, IDENTITY);
        let taken = sessions.take_up(Tick(2000), &mut Below(12));
        assert_eq!(taken, TakenUp { sessions: 12, copies: 0, resting: 0, torn: 0, refused: 8 });
        assert!((0..20).all(|n| is_whole(&sessions, n) == (n < 12)));
        let table = u32::table(&sessions);
        assert_eq!((table.occupied(), table.deadline(removed)), (24, 0));
        let with_deadline = (0..table.slots()).map(Slot).filter(|slot| table.deadline(*slot) != 0);
        assert_eq!(with_deadline.count(), 12, "one for both directions");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn both_halves_are_copies_or_neither_is() {
        let path = scratch("copies");
        let (origin, quarantined) = (|n: u16| draft(n).origin, |n| n == 4);
        {
            let (mut sessions, _, _region) = open(&path, IDENTITY);
            // Marked: the first half, the second one, both, none, and both of one that has ended.
            for (n, marked) in (0..).zip([[true, false], [false, true], [true; 2], [false; 2], [true; 2]]) {
                sessions.commit(&draft(n), Tick(1000)).unwrap();
                let slot = sessions.find(sessions.hash(&origin(n)), &origin(n)).unwrap();
                let table = u32::table_mut(&mut sessions);
                for (at, is_marked) in [slot, table.entry(slot).twin()].into_iter().zip(marked) {
                    let entry = table.entry_mut(at);
                    if is_marked {
                        entry.mark_copy();
                    }
                    if quarantined(n) {
                        entry.set_flags(entry.flags().with(Flags::QUARANTINED));
                    }
                }
            }
        }
        let (mut sessions, _, _region) = open(&path, IDENTITY);
        let taken = sessions.take_up(Tick(2000), &mut Everything);
        assert_eq!(taken, TakenUp { sessions: 1, copies: 3, resting: 1, torn: 0, refused: 0 });
        for n in 0..5 {
            let slot = sessions.find(sessions.hash(&origin(n)), &origin(n)).unwrap();
            let table = u32::table(&sessions);
            let both = [slot, table.entry(slot).twin()].map(|at| table.entry(at).is_copy());
            assert_eq!(both, [n < 3; 2], "{n}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn directions_and_sides_that_mean_nothing_are_seen() {
        let entry = |flags: Flags, direction: u8| -> Entry<u32> {
            let mut bytes = [0; size_of::<Entry<u32>>()];
            (bytes[13], bytes[14]) = (flags.0, direction);
            bytemuck::pod_read_unaligned(&bytes)
        };
        for direction in 0..=u8::MAX {
            // Beside a direction's number stands how far it is to be believed, whatever that is.
            let means_something = usize::from(direction & !Tracking::ALL.0) < Direction::ALL.len();
            assert_eq!(entry(Flags::INSIDE, direction).has_way(), means_something, "{direction}");
        }
        let around = Flags::ORIGIN.with(Flags::SYN);
        for side in [around, around.with(Flags::INSIDE), around.with(Flags::OUTSIDE)] {
            assert!(entry(side, 0).has_way(), "{side:?}");
        }
        assert!(!entry(Flags::INSIDE.with(Flags::OUTSIDE), 0).has_way());
    }

    #[test]
    fn tables_of_others_are_named_and_forgotten() {
        let path = scratch("others");
        drop(open(&path, IDENTITY));
        for (identity, expected) in [
            (Identity { workers: 3, ..IDENTITY }, Unusable::Workers { worker: 0, workers: 2 }),
            (Identity { workers: 3, capacity: 501, ..IDENTITY }, Unusable::Capacity { found: 500 }),
            (Identity { workers: 3, capacity: 501, boot: [8; 16], ..IDENTITY }, Unusable::Boot),
        ] {
            let (sessions, found, _region) = open(&path, identity);
            assert_eq!((found, sessions.open_count()), (Found::Unusable(expected), 0));
        }
        for bytes in [&b"something else entirely"[..], &[0; 5000]] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(open(&path, IDENTITY).1, Found::Unusable(Unusable::Damaged));
        }
        let length = std::fs::metadata(&path).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
        assert_eq!(open(&path, IDENTITY).1, Found::Unusable(Unusable::Damaged), "cut short");
        std::fs::remove_file(&path).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Bytes change at random: what is taken up is whole and was there; the table works on.
        #[test]
        fn damage_never_makes_a_wrong_session(hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40)) {
            let path = scratch("damaged");
            let _ = std::fs::remove_file(&path);
            {
                let (mut sessions, _, _region) = open(&path, Identity { capacity: 40, ..IDENTITY });
                for n in 0..40 {
                    sessions.commit(&draft(n), Tick(1000)).unwrap();
                }
            }
            let mut bytes = std::fs::read(&path).unwrap();
            // Behind the header, the groups, and behind the next 2 MiB, the entries.
            let places: Vec<usize> = (0..160).map(|at| (2 << 20) + at).chain((0..7000).map(|at| (4 << 20) + at)).collect();
            for (at, byte) in hits {
                bytes[*at.get(&places)] = byte;
            }
            std::fs::write(&path, &bytes).unwrap();
            let (mut sessions, found, _region) = open(&path, Identity { capacity: 40, ..IDENTITY });
            prop_assert_eq!(found, Found::Tables);
            let taken = sessions.take_up(Tick(2000), &mut Everything);
            let whole = (0..40).filter(|&n| is_whole(&sessions, n)).count();
            prop_assert_eq!(whole, (taken.sessions + taken.copies + taken.resting) as usize);
            for n in 100..120 {
                // Full or not, it answers.
                let _ = sessions.commit(&draft(n), Tick(2000));
            }
            sessions.sweep::<u32>(0, u32::MAX, Tick(10_000_000), |_| true, |_| ());
            sessions.sweep::<u32>(0, u32::MAX, Tick(20_000_000), |_| true, |_| ());
            prop_assert_eq!(u32::table(&sessions).occupied(), 0);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
