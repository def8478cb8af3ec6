//! Hosts that claim a VIP of ours on the link (RFC 5227 section 2.4, RFC 4862 section 5.4.4): seen by `stage/answer.rs`, and
//! told to the control thread, which says so and defends the address.
//!
//! They stand in a small queue beside the counters of the worker: who floods the link with claims fills it and no more.

use std::net::IpAddr;

use crossbeam::queue::ArrayQueue;

use crate::wire::ethernet::Mac;

/// Claims that wait for the control thread.
const MOST: usize = 64;

/// A claim of somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The VIP.
    pub vip: IpAddr,
    /// Who says that he has it.
    pub mac: Mac,
}

/// The claims that one worker has seen and nobody has taken yet.
#[derive(Debug)]
pub struct Conflicts(ArrayQueue<Conflict>);

impl Default for Conflicts {
    fn default() -> Self {
        Self(ArrayQueue::new(MOST))
    }
}

impl Conflicts {
    /// Tells of a claim. When there are too many it is left out: who goes on claiming is seen again.
    pub fn tell(&self, conflict: Conflict) {
        let _ = self.0.push(conflict);
    }

    /// The oldest claim that nobody has taken yet.
    pub fn take(&self) -> Option<Conflict> {
        self.0.pop()
    }
}
