//! Copies of sessions, as control asks for them and brings them: a slice of the table for each command. Cursors count slots: first those
//! of IPv4, then those of IPv6.

use crate::address::V6;
use crate::command::{CopyChunk, PurgeChunk};
use crate::counters::Direction;
use crate::inspect::{end_of_slice, slice};
use crate::link::directory::Directory;
use crate::link::outbox;
use crate::ports::BlockId;
use crate::ports::allocator::Allocator;
use crate::ports::pool::WorkerId;
use crate::session::copies::{Refused, Taken};
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::image::{Fate, Image, ImageOf};
use crate::session::{SessionFamily, Sessions};
use crate::settle;
use crate::snapshot::members::GatewayId;
use crate::snapshot::policy::Policy;
use crate::snapshot::shares::Owner;
use crate::stage::takeover::owner;
use crate::time::Tick;

/// Copies the sessions whose copies belong at a gateway into the chunk, as many as it has room for, and moves its cursor on.
pub fn list(sessions: &mut Sessions, chunk: &mut CopyChunk, policy: &Policy, now: Tick) {
    let Some(cursor) = chunk.cursor else { return };
    let (epoch, since) = (policy.members().replication_epoch(), policy.members().since());
    chunk.listed_by = (epoch, since);
    let (begun_by, expected) = chunk.begun_by;
    if since > begun_by || expected.is_some_and(|expected| epoch != expected) {
        return;
    }
    let v4_slots = u64::from(u32::table(sessions).slots());
    chunk.cursor = if cursor < v4_slots {
        Some(list_family::<u32>(sessions, cursor, chunk, policy, now))
    } else {
        let next = list_family::<V6>(sessions, cursor - v4_slots, chunk, policy, now);
        (next < V6::table(sessions).slots().into()).then_some(next + v4_slots)
    };
}

fn list_family<A: SessionFamily>(
    sessions: &mut Sessions,
    cursor: u64,
    chunk: &mut CopyChunk,
    policy: &Policy,
    now: Tick,
) -> u64 {
    for slot in slice::<A>(sessions, cursor) {
        if chunk.images.len() == chunk.images.capacity() {
            return slot.0.into();
        }
        let Some(entry) = first_direction::<A>(sessions, slot) else { continue };
        let belongs = match owner(&entry, policy) {
            // A copy of a share that is this gateway's by now is as good as a session of its own.
            Owner::This => outbox::share(&entry, policy).is_some_and(|share| share.is_heir(chunk.to, policy.members())),
            // Its share has moved there before it was told, or others were told of it instead.
            Owner::Other(new) => new == chunk.to && (entry.has_news() || is_untold(&entry, policy, chunk.told_by)),
            Owner::Nobody => false,
        };
        if !belongs {
            continue;
        }
        chunk.images.push(A::image(sessions.image(slot, now)));
        let is_kept = policy.members().is_serving(chunk.to);
        for at in [slot, entry.twin()] {
            let entry = A::table_mut(sessions).entry_mut(at);
            entry.note_said();
            if is_kept {
                entry.note_told();
            }
        }
    }
    end_of_slice::<A>(sessions, cursor)
}

/// Whether a session's share has passed to a gateway that may not know of it, whoever else does.
fn is_untold<A: SessionFamily>(entry: &Entry<A>, policy: &Policy, told_by: u64) -> bool {
    outbox::share(entry, policy).is_some_and(|share| share.is_untold(told_by))
}

/// Where copies are taken in.
#[derive(Debug)]
pub struct Taking<'a> {
    /// The worker's sessions.
    pub sessions: &'a mut Sessions,
    /// Its ports.
    pub ports: &'a mut Allocator,
    /// The policy in force.
    pub policy: &'a Policy,
    /// The flows of all workers.
    pub directory: Option<&'a Directory>,
    /// The worker.
    pub worker: WorkerId,
    /// The gateway that tells.
    pub from: GatewayId,
    /// The moment.
    pub now: Tick,
}

impl Taking<'_> {
    /// Takes in what other gateways tell; leaves what should have a place and found none. Says how many found none, those included whose
    /// holders have no claim to more.
    pub fn take(&mut self, images: &mut Vec<Image>, round: u8) -> u64 {
        let mut refused = 0;
        images.retain(|image| {
            let taken = match image {
                Image::V4(image) => self.take_one(image, round),
                Image::V6(image) => self.take_one(image, round),
            };
            refused += u64::from(taken.is_err());
            taken == Err(Refused::NoRoom)
        });
        refused
    }

    fn take_one<A: SessionFamily>(&mut self, image: &ImageOf<A>, round: u8) -> Result<(), Refused> {
        let entry = Entry::new(image.origin, image.translated, image.direction, Flags::default());
        let owner = owner(&entry, self.policy);
        if owner == Owner::Other(self.from) && image.fate == Fate::Open {
            self.make_way(image);
        }
        let Some(vip) = self.policy.vip(entry.ends()[2].0) else { return Err(Refused::NoRoom) };
        let known = self.sessions.find(self.sessions.hash(&image.origin), &image.origin);
        // Several gateways tell of what has become ours, and who had it last knows it best.
        if owner == Owner::This && known.is_some_and(|slot| self.is_older(image, slot)) {
            return Ok(());
        }
        let was_live = known.is_some_and(|slot| A::table(self.sessions).entry(slot).is_live());
        let slot = match self.sessions.take(image, round, owner == Owner::This, self.now)? {
            Taken::New(slot) => slot,
            taken => {
                if was_live && taken != Taken::Unwanted {
                    self.close(&entry);
                }
                return Ok(());
            }
        };
        if image.direction == Direction::Egress && !self.ports.adopt(vip, image.translated.source_port) {
            // Another worker has the block by now: it is told when all is told the next time.
            self.sessions.remove::<A>(slot);
            return Err(Refused::NoRoom);
        }
        if let Some(directory) = self.directory {
            directory.claim(&image.origin, self.worker);
            if image.direction == Direction::Inbound {
                directory.claim(&image.translated.reversed(), self.worker);
            }
        }
        Ok(())
    }

    /// Whoever has a share knows what is in it. What stands in the way of that here, of shares that aren't this gateway's, is left from
    /// before: by a process that has died, or of a session whose end nobody told.
    fn make_way<A: SessionFamily>(&mut self, image: &ImageOf<A>) {
        for tuple in [image.origin, image.translated.reversed()] {
            let Some(slot) = self.sessions.find(self.sessions.hash(&tuple), &tuple) else { continue };
            let (slot, _) = self.sessions.both::<A>(slot);
            let entry = *A::table(self.sessions).entry(slot);
            let is_it = (entry.key(), entry.to()) == (image.origin, image.translated);
            if is_it {
                continue;
            }
            if owner(&entry, self.policy) == Owner::This {
                // Its pod has got another VIP: only its port is in quarantine here.
                if entry.key() == image.origin && entry.flags().has(Flags::QUARANTINED) {
                    settle::vacate::<A>(slot, self.sessions, self.policy, self.ports);
                }
                continue;
            }
            if entry.is_live() {
                self.close(&entry);
            }
            let ended = self.sessions.remove::<A>(slot);
            settle::release(self.policy, self.ports, &ended);
        }
    }

    /// Whether what is told of a copy is older than what was told of it before.
    fn is_older<A: SessionFamily>(&self, image: &ImageOf<A>, slot: Slot) -> bool {
        let table = A::table(self.sessions);
        let entry = table.entry(slot);
        if image.fate != Fate::Open || !entry.is_copy() || entry.to() != image.translated {
            return false;
        }
        let known = entry.last_seen().later(table.entry(entry.twin()).last_seen());
        let [there, back] = &image.halves;
        let told = Tick(self.now.0.wrapping_sub(there.idle_ms.min(back.idle_ms)));
        !told.reached(known)
    }

    /// What was this gateway's is another one's: it counts there.
    fn close<A: SessionFamily>(&self, entry: &Entry<A>) {
        settle::close(self.policy, &entry.key(), &entry.to(), entry.direction());
    }
}

/// Forgets what a gateway hasn't named in its last round of the shares that it owns, and moves the chunk's cursor on. Whose shares they
/// are must be as it was when the round began: what has become its own since then, it may have had no reason to name.
pub fn purge(sessions: &mut Sessions, chunk: &mut PurgeChunk, policy: &Policy, now: Tick) {
    let Some(cursor) = chunk.cursor else { return };
    if policy.members().since() > chunk.view {
        (chunk.cursor, chunk.outdated) = (None, true);
        return;
    }
    let v4_slots = u64::from(u32::table(sessions).slots());
    chunk.cursor = if cursor < v4_slots {
        Some(purge_family::<u32>(sessions, cursor, chunk, policy, now))
    } else {
        let next = purge_family::<V6>(sessions, cursor - v4_slots, chunk, policy, now);
        (next < V6::table(sessions).slots().into()).then_some(next + v4_slots)
    };
}

fn purge_family<A: SessionFamily>(
    sessions: &mut Sessions,
    cursor: u64,
    chunk: &mut PurgeChunk,
    policy: &Policy,
    now: Tick,
) -> u64 {
    for slot in slice::<A>(sessions, cursor) {
        let Some(entry) = first_direction::<A>(sessions, slot) else { continue };
        let is_of = owner(&entry, policy) == Owner::Other(chunk.owner);
        // Whatever is still live here of a share that isn't ours any more was not told either. What its gateway hasn't heard of yet, it
        // can't have named.
        if !is_of || entry.has_news() || (entry.is_copy() && entry.round() == chunk.round & 0x0f) {
            continue;
        }
        if is_untold(&entry, policy, chunk.told_by) {
            chunk.spared = true;
            continue;
        }
        if !entry.is_copy() {
            settle::close(policy, &entry.key(), &entry.to(), entry.direction());
            sessions.demote::<A>(slot, now);
        }
        sessions.end_copy::<A>(slot, now);
        chunk.forgotten += 1;
    }
    end_of_slice::<A>(sessions, cursor)
}

/// The worker that an image is for: whoever owns its port, else the one whose turn the block is.
pub fn worker_of(image: &Image, policy: &Policy, workers: u8) -> WorkerId {
    let (vip, port) = image.by_way_of();
    let workers = workers.max(1);
    if image.direction() == Direction::Egress {
        let owner = policy.vip_at(vip).and_then(|vip| vip.pool.owner(port));
        return owner.unwrap_or(WorkerId((BlockId::of(port).0 % u16::from(workers)) as u8));
    }
    WorkerId((image.origin_port() % u16::from(workers)) as u8)
}

/// The entry of a session's first direction in a slot, unless it has ended.
fn first_direction<A: SessionFamily>(sessions: &Sessions, slot: Slot) -> Option<Entry<A>> {
    let table = A::table(sessions);
    // A deadline stands only in the slot of a session's first direction, so most slots are passed over unread.
    let entry = (table.deadline(slot) != 0).then(|| *table.entry(slot))?;
    (!entry.flags().has(Flags::QUARANTINED)).then_some(entry)
}
