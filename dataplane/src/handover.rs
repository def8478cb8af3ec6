//! Handover queue: packets that arrive while a share changes hands. This gateway is its owner, and the former owner has not released it
//! yet; or other gateways have the view by which it is the owner, and this one has not. They are kept until then, so that a drain delays no
//! connection by a SYN's retransmission timeout.

use std::collections::VecDeque;

use crate::counters::DropReason;
use crate::io::Received;
use crate::snapshot::members::Members;
use crate::time::Tick;

/// Packets that are kept at once: a quarter of a second of 2000 new connections a second.
const MOST: usize = 512;
/// How long a packet is kept: a client that hears nothing asks again after a second (RFC 6298 section 2.1).
const PATIENCE_MS: u32 = 1_000;

/// The packets of one worker that wait for a share.
#[derive(Debug)]
pub struct HandoverQueue {
    deferred: VecDeque<Deferred>,
    /// As this gateway stood when they were deferred.
    standing: Standing,
}

/// What decides whether sessions may be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Where the members lie, to be compared only.
    members: usize,
    is_lapsed: bool,
}

impl Standing {
    /// As gateways stand, and whether this one has no lease.
    pub fn of(members: &Members, is_lapsed: bool) -> Self {
        Self { members: std::ptr::from_ref(members) as usize, is_lapsed }
    }
}

#[derive(Debug)]
struct Deferred {
    received: Received,
    /// Why it is dropped in the end.
    reason: DropReason,
    since: Tick,
}

impl Default for HandoverQueue {
    fn default() -> Self {
        Self { deferred: VecDeque::with_capacity(MOST), standing: Standing::default() }
    }
}

impl HandoverQueue {
    /// Packets in it.
    pub fn len(&self) -> usize {
        self.deferred.len()
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.deferred.is_empty()
    }

    /// Keeps a packet until something of this is different.
    ///
    /// # Errors
    /// Gives it back when there is no room for it.
    pub fn defer(
        &mut self,
        received: Received,
        reason: DropReason,
        standing: Standing,
        now: Tick,
    ) -> Result<(), Received> {
        if self.deferred.len() == MOST {
            return Err(received);
        }
        self.standing = standing;
        self.deferred.push_back(Deferred { received, reason, since: now });
        Ok(())
    }

    /// Puts all packets before those in `queue`, in their order, if something is different by now.
    pub fn retry(&mut self, standing: Standing, queue: &mut VecDeque<Received>) {
        if self.standing != standing {
            self.deferred.drain(..).rev().for_each(|it| queue.push_front(it.received));
        }
    }

    /// The first one, if it was kept for too long, and why it is dropped.
    pub fn expired(&mut self, now: Tick) -> Option<(Received, DropReason)> {
        let first = self.deferred.front()?;
        if now.since(first.since) < PATIENCE_MS {
            return None;
        }
        self.deferred.pop_front().map(|it| (it.received, it.reason))
    }
}
