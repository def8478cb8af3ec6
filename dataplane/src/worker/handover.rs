//! Handover queue: packets that arrive while the ownership of a shard changes. Either this gateway is the owner and the
//! former owner has not released the shard yet, or other gateways already have the membership view that makes this
//! gateway the owner, and it has not. Packets are deferred until then, so that a drain delays no connection by a SYN
//! retransmission timeout.

use std::collections::VecDeque;

use crate::flow::drop_reason::DropReason;
use crate::flow::time::Tick;
use crate::io::Received;
use crate::policy::members::Members;

/// Deferred packets at most: a quarter of a second at 2000 new connections per second.
const MAX_DEFERRED: usize = 512;
/// How long a packet is deferred: TCP retransmits a SYN after one second (RFC 6298 section 2.1).
const DEFER_TIMEOUT_MS: u32 = 1_000;

/// The deferred packets of one worker.
#[derive(Debug)]
pub struct HandoverQueue {
    deferred: VecDeque<Deferred>,
    /// The ownership state under which they were deferred.
    state: OwnershipState,
}

/// The state that decides whether sessions may be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnershipState {
    /// Address of the membership in memory; only compared.
    members: usize,
    lease_expired: bool,
}

impl OwnershipState {
    /// The state of this membership, with or without a lease.
    pub fn of(members: &Members, lease_expired: bool) -> Self {
        Self { members: std::ptr::from_ref(members) as usize, lease_expired }
    }
}

#[derive(Debug)]
struct Deferred {
    received: Received,
    /// Drop reason if it expires.
    reason: DropReason,
    since: Tick,
}

impl Default for HandoverQueue {
    fn default() -> Self {
        Self { deferred: VecDeque::with_capacity(MAX_DEFERRED), state: OwnershipState::default() }
    }
}

impl HandoverQueue {
    /// Deferred packets.
    pub fn len(&self) -> usize {
        self.deferred.len()
    }

    /// Whether no packet is deferred.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.deferred.is_empty()
    }

    /// Defers a packet until the ownership state changes.
    ///
    /// # Errors
    /// Returns the packet when the queue is full.
    pub fn defer(
        &mut self,
        received: Received,
        reason: DropReason,
        state: OwnershipState,
        now: Tick,
    ) -> Result<(), Received> {
        if self.deferred.len() == MAX_DEFERRED {
            return Err(received);
        }
        self.state = state;
        self.deferred.push_back(Deferred { received, reason, since: now });
        Ok(())
    }

    /// Moves all packets to the front of `queue`, in order, if the ownership state has changed.
    pub fn retry(&mut self, state: OwnershipState, queue: &mut VecDeque<Received>) {
        if self.state != state {
            self.deferred.drain(..).rev().for_each(|entry| queue.push_front(entry.received));
        }
    }

    /// Removes the first packet if it has expired; returns it with its drop reason.
    pub fn expired(&mut self, now: Tick) -> Option<(Received, DropReason)> {
        let first = self.deferred.front()?;
        if now.since(first.since) < DEFER_TIMEOUT_MS {
            return None;
        }
        self.deferred.pop_front().map(|entry| (entry.received, entry.reason))
    }
}
