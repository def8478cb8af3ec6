//! Replication queue: one worker's session records for peer gateways. New sessions are sent after a delay, since most
//! end before a failover could need them, or with their first reply; changes and ends are sent at once. It also tracks
//! which sessions a peer has acknowledged: without a valid lease, a gateway forwards packets of those sessions only.
//!
//! The backend of a client with session affinity is a record of its own: once the client is confirmed, it is sent to
//! every gateway that may get the client's next connection, also where sessions aren't replicated.
//!
//! Every queue is bounded: an overflow is recorded per peer and triggers a full resynchronization.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::flow::address::V6;
use crate::flow::direction::Direction;
use crate::flow::ids::{GatewayId, Owner, Slot};
use crate::flow::time::Tick;
use crate::io::batch::BATCH_SIZE;
use crate::policy::compiled::Policy;
use crate::replication::owner::owner;
use crate::replication::sender::{OutgoingRecord, ReplicationSender};
use crate::replication::targets;
use crate::session::affinity::Choice;
use crate::session::entry::{Entry, Flags};
use crate::session::query::SessionState;
use crate::session::record::{DirectionRecord, FamilyRecord, RecordState};
use crate::session::track::Progress;
use crate::session::{Ended, SessionFamily, Sessions};
use crate::wire::protocol;

/// Limit of sessions waiting to be sent.
const MAX_PENDING: usize = 1 << 16;
/// Limit of records sent and not yet acknowledged.
const MAX_UNACKNOWLEDGED: usize = 1 << 16;
/// Limit of records sent, and of acknowledgements processed, per turn.
const MAX_PER_TURN: usize = 64;
/// Delays after which a connection that is still embryonic is sent again, milliseconds: their sum exceeds the handshake
/// timeout.
const RESEND_MS: [u32; 5] = [1_000, 4_000, 16_000, 64_000, 256_000];
/// Age at which a session without a reply is sent if others are sent with their first reply, milliseconds.
const UNANSWERED_AGE_MS: u32 = 50;

/// When the first record of a session is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstRecord {
    /// Once the session has this age, milliseconds.
    AtAge(u32),
    /// With its first reply, so that no connection that its initiator knows to be open is lost with its gateway. A
    /// session without a reply, as those of a scan, is sent at an age of 50 ms.
    WithReply,
}

/// The replication queue of one worker.
#[derive(Debug)]
pub struct ReplicationQueue {
    sender: Arc<ReplicationSender>,
    /// Minimum age of a session without a reply before it is sent, milliseconds.
    age: u32,
    first_record: FirstRecord,
    /// Sessions to send at the end of this turn, at most one for each packet of a batch: they have received their first
    /// reply, or their endpoint belongs to another gateway.
    prompt: VecDeque<Pending>,
    /// New and changed sessions first; then embryonic connections, by the number of times they were sent. All sessions
    /// in one queue have the same delay, so each queue is ordered by due time.
    pending: [VecDeque<Pending>; RESEND_MS.len() + 1],
    unacknowledged: VecDeque<Sent>,
    /// The last sequence number for each peer.
    last_numbers: Box<[u64; 256]>,
    /// Whether there are peers.
    is_enabled: bool,
    /// Whether a peer is connected; kept up to date only if sessions are sent with their first reply.
    has_connected_peer: bool,
    /// Whether records were queued since the control thread was last woken.
    has_unannounced: bool,
}

/// A session waiting to be sent.
#[derive(Clone, Copy, Debug)]
struct Pending {
    due: Tick,
    slot: Slot,
    is_v6: bool,
}

/// A record that was sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    to: GatewayId,
    number: u64,
    slot: Slot,
    is_v6: bool,
    /// Detects reuse of the slot by another session.
    hash: u32,
}

impl ReplicationQueue {
    /// An empty queue.
    pub fn new(sender: Arc<ReplicationSender>, first_record: FirstRecord) -> Self {
        let age = match first_record {
            FirstRecord::AtAge(age) => age,
            FirstRecord::WithReply => UNANSWERED_AGE_MS,
        };
        Self {
            sender,
            age,
            first_record,
            prompt: VecDeque::with_capacity(BATCH_SIZE),
            pending: std::array::from_fn(|attempt| {
                VecDeque::with_capacity(if attempt == 0 { MAX_PENDING } else { MAX_PENDING / 8 })
            }),
            unacknowledged: VecDeque::with_capacity(MAX_UNACKNOWLEDGED),
            last_numbers: Box::new([0; 256]),
            is_enabled: false,
            has_connected_peer: false,
            has_unannounced: false,
        }
    }

    /// A session has been opened, or reopened.
    #[inline]
    pub fn opened<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        self.enqueue::<A>(slot, now.plus(self.age));
    }

    /// A session has been opened for an endpoint of another gateway that has no port: that one needs it for the packets
    /// behind the first one, so it is sent at the end of this turn.
    #[cold]
    pub fn opened_for_other<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        if self.is_enabled && self.prompt.len() < BATCH_SIZE {
            self.prompt.push_back(Pending { due: now, slot, is_v6: A::BITS == 128 });
        }
    }

    /// A session has changed state.
    #[inline]
    pub fn changed<A: SessionFamily>(&mut self, slot: Slot, sessions: &mut Sessions, now: Tick) {
        let (origin, _) = sessions.slot_pair::<A>(slot);
        A::table_mut(sessions).entry_mut(origin).note_changed();
        self.enqueue::<A>(slot, now);
    }

    /// A session has been received from the former owner of its shard.
    pub fn moved<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        self.enqueue::<A>(slot, now);
    }

    /// Whether [`ReplicationQueue::progressed`] has an effect.
    #[inline]
    pub fn follows_progress(&self) -> bool {
        // Known only if sessions are sent with their first reply.
        self.has_connected_peer
    }

    /// A session has received its first reply, or its initiator is confirmed. The former is sent at the end of this
    /// turn; the latter later, since it only extends a timeout.
    pub fn progressed<A: SessionFamily>(&mut self, slot: Slot, progress: Progress, sessions: &mut Sessions, now: Tick) {
        if !self.follows_progress() || progress == Progress::None {
            return;
        }
        let (origin, _) = sessions.slot_pair::<A>(slot);
        let entry = A::table_mut(sessions).entry_mut(origin);
        match progress {
            Progress::Confirmed => {
                entry.note_changed();
                self.enqueue::<A>(origin, now.plus(self.age));
            }
            Progress::Replied if !entry.is_confirmed() && self.prompt.len() < BATCH_SIZE => {
                entry.note_changed();
                self.prompt.push_back(Pending { due: now, slot: origin, is_v6: A::BITS == 128 });
            }
            // A confirmed initiator has received an earlier reply: this is the first one since a gap.
            Progress::Replied | Progress::None => {}
        }
    }

    fn enqueue<A: SessionFamily>(&mut self, slot: Slot, due: Tick) {
        if !self.is_enabled {
            return;
        }
        let [pending, ..] = &mut self.pending;
        if pending.len() == MAX_PENDING {
            // Which peers it was for is unknown here, so every peer is resynchronized.
            (0..=u8::MAX).for_each(|at| self.sender.mark_lost(GatewayId(at)));
            return;
        }
        pending.push_back(Pending { due, slot, is_v6: A::BITS == 128 });
    }

    /// A session has ended.
    pub fn ended<A: SessionFamily>(&mut self, session: &Ended<A>, policy: &Policy) {
        if !self.is_enabled {
            return;
        }
        let Ended { origin, translated, direction } = *session;
        let entry = Entry::new(origin, translated, direction, Flags::default());
        for to in targets::of(&entry, policy).connected(policy.members()) {
            let record = FamilyRecord {
                state: RecordState::Ended,
                direction,
                origin,
                translated,
                directions: [DirectionRecord::default(); 2],
            };
            self.send::<A>(to, record);
        }
    }

    /// A standby session was evicted.
    pub fn count_evicted(&self) {
        self.sender.count_evicted();
    }

    /// Enables the queue if this gateway is part of a group.
    #[inline]
    pub fn update_enabled(&mut self, policy: &Policy) {
        self.is_enabled = policy.members().this().is_some();
        self.has_connected_peer = self.first_record == FirstRecord::WithReply && policy.members().has_connected_peer();
    }

    /// Sends due records and processes acknowledgements. Call [`ReplicationQueue::announce`] afterwards.
    pub fn flush(&mut self, sessions: &mut Sessions, policy: &Policy, now: Tick) {
        if self.is_empty() {
            return;
        }
        while let Some(pending) = self.prompt.pop_front() {
            self.send_pending(pending, None, sessions, policy, now);
        }
        for attempt in 0..self.pending.len() {
            for _ in 0..MAX_PER_TURN {
                let next = self.pending[attempt].front().copied();
                let Some(pending) = next.filter(|pending| now.reached(pending.due)) else { break };
                self.pending[attempt].pop_front();
                self.send_pending(pending, Some(attempt), sessions, policy, now);
            }
        }
        for _ in 0..MAX_PER_TURN {
            let is_acknowledged = |sent: &Sent| self.sender.acknowledged(sent.to) >= sent.number;
            let Some(sent) = self.unacknowledged.front().copied().filter(is_acknowledged) else { break };
            self.unacknowledged.pop_front();
            if sent.is_v6 {
                mark_acknowledged::<V6>(sent, sessions, policy);
            } else {
                mark_acknowledged::<u32>(sent, sessions, policy);
            }
        }
    }

    /// Whether nothing waits to be sent or acknowledged.
    #[inline]
    fn is_empty(&self) -> bool {
        let pending: usize = self.pending.iter().map(VecDeque::len).sum();
        pending + self.prompt.len() + self.unacknowledged.len() == 0
    }

    /// Wakes the control thread if records were queued. A system call at times, so only once the turn's packets have
    /// left.
    #[inline]
    pub fn announce(&mut self) {
        if std::mem::take(&mut self.has_unannounced) {
            self.sender.notify();
        }
    }

    /// Sends a session and queues it for the next attempt if it may be necessary. `attempt`: how often it was sent
    /// because of its age; `None`: it is sent because of its first reply, apart from those attempts.
    fn send_pending(
        &mut self,
        pending: Pending,
        attempt: Option<usize>,
        sessions: &mut Sessions,
        policy: &Policy,
        now: Tick,
    ) {
        if pending.is_v6 {
            self.send_session::<V6>(pending, attempt, sessions, policy, now);
        } else {
            self.send_session::<u32>(pending, attempt, sessions, policy, now);
        }
    }

    fn send_session<A: SessionFamily>(
        &mut self,
        pending: Pending,
        attempt: Option<usize>,
        sessions: &mut Sessions,
        policy: &Policy,
        now: Tick,
    ) {
        let table = A::table(sessions);
        if !table.is_occupied(pending.slot) {
            return;
        }
        let (slot, _) = sessions.slot_pair::<A>(pending.slot);
        let entry = table.entry(slot);
        if !(entry.is_active() || entry.is_standby() && owner(entry, policy) == Owner::This) {
            return;
        }
        let is_connection = matches!(entry.key().protocol, protocol::TCP | protocol::SCTP);
        let is_opening = is_connection && sessions.state::<A>(slot).0 == SessionState::Opening;
        // Numbers of a connection that isn't open change without notice.
        let may_have_changed =
            self.first_record != FirstRecord::WithReply || !entry.is_sent() || (is_opening && attempt > Some(0));
        let has_unsent_choice = self.send_choice::<A>(slot, sessions, policy, now);
        if may_have_changed && !self.send_record::<A>(slot, sessions, policy, now) && !has_unsent_choice {
            return;
        }
        if let Some(attempt) = attempt
            && let Some(&after) = RESEND_MS.get(attempt)
            && (is_opening || has_unsent_choice)
        {
            let next = &mut self.pending[attempt + 1];
            // With that many embryonic connections, few will ever be established.
            if next.len() < next.capacity() {
                next.push_back(Pending { due: now.plus(after), slot, ..pending });
            }
        }
    }

    /// Sends the record of a session to its replica targets; returns whether there are any.
    fn send_record<A: SessionFamily>(
        &mut self,
        slot: Slot,
        sessions: &mut Sessions,
        policy: &Policy,
        now: Tick,
    ) -> bool {
        let entry = A::table(sessions).entry(slot);
        let targets = targets::of(entry, policy);
        let hash = sessions.hash(&entry.key()) as u32;
        let record = sessions.record(slot, now);
        let mut any_sent = false;
        for to in targets.connected(policy.members()) {
            let number = self.send::<A>(to, record);
            if self.unacknowledged.len() == MAX_UNACKNOWLEDGED {
                self.unacknowledged.pop_front();
            }
            self.unacknowledged.push_back(Sent { to, number, slot, is_v6: A::BITS == 128, hash });
            any_sent = true;
        }
        if any_sent {
            A::table_mut(sessions).entry_mut(slot).note_sent();
        }
        any_sent
    }

    /// Sends the backend of a client with session affinity to the gateways that may get its next connection; not before
    /// the client is confirmed, so that spoofed ones displace nobody's there. Returns whether it still waits for that.
    fn send_choice<A: SessionFamily>(
        &mut self,
        slot: Slot,
        sessions: &mut Sessions,
        policy: &Policy,
        now: Tick,
    ) -> bool {
        let entry = A::table(sessions).entry(slot);
        if entry.direction() != Direction::Inbound || !sessions.choices().is_used() {
            return false;
        }
        let session = Choice::of(&entry.key(), &entry.translated(), now);
        let is_confirmed = entry.is_confirmed();
        if session.in_force(policy, now).is_none() {
            return false;
        }
        if !is_confirmed {
            return true;
        }
        let Some(choice) = sessions.choices_mut().confirm(&session) else { return false };
        let record = FamilyRecord::of_choice(&choice, now);
        for to in targets::of_choice(choice.frontend.address, policy) {
            // A lost one is sent with the client's next session, so it is worth no full round.
            if policy.members().is_connected(to) && self.sender.has_room() {
                self.send::<A>(to, record);
            }
        }
        false
    }

    fn send<A: SessionFamily>(&mut self, to: GatewayId, record: FamilyRecord<A>) -> u64 {
        self.has_unannounced = true;
        let number = &mut self.last_numbers[usize::from(to.0)];
        *number += 1;
        self.sender.push(OutgoingRecord { to, number: *number, record: A::record(record) });
        *number
    }
}

/// Notes that the gateway that would own a session next has it. The acknowledgement of any other one proves nothing: it
/// can't reuse the port.
fn mark_acknowledged<A: SessionFamily>(sent: Sent, sessions: &mut Sessions, policy: &Policy) {
    if !A::table(sessions).is_occupied(sent.slot) {
        return;
    }
    let (origin, twin) = sessions.slot_pair::<A>(sent.slot);
    let is_same = sessions.hash(&A::table(sessions).entry(origin).key()) as u32 == sent.hash;
    let entry = A::table(sessions).entry(origin);
    if is_same && !entry.is_standby() && targets::successor(entry, policy) == Some(sent.to) {
        for at in [origin, twin] {
            A::table_mut(sessions).entry_mut(at).note_acknowledged();
        }
    }
}
