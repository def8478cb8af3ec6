//! Address conflicts: hosts that claim a VIP of this gateway on the link (RFC 5227 section 2.4, RFC 4862 section
//! 5.4.4). `stage/arp_nd.rs` detects them; the control thread logs them and defends the address.
//!
//! A worker queues them beside its counters. The queue is bounded, so a flood of claims only fills it.

use std::net::IpAddr;

use crossbeam::queue::ArrayQueue;

use crate::wire::ethernet::Mac;

/// Conflicts that wait for the control thread.
const MAX_QUEUED: usize = 64;

/// A claim of a VIP by another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressConflict {
    pub vip: IpAddr,
    /// MAC address of the host.
    pub mac: Mac,
}

/// The conflicts that one worker has detected and control has not read yet.
#[derive(Debug)]
pub struct ConflictQueue(ArrayQueue<AddressConflict>);

impl Default for ConflictQueue {
    fn default() -> Self {
        Self(ArrayQueue::new(MAX_QUEUED))
    }
}

impl ConflictQueue {
    /// Adds a conflict. A full queue drops it: a host that keeps claiming is detected again.
    pub fn push(&self, conflict: AddressConflict) {
        let _ = self.0.push(conflict);
    }

    /// Removes the oldest conflict.
    pub fn pop(&self) -> Option<AddressConflict> {
        self.0.pop()
    }
}
