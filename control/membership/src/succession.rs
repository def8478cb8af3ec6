//! Succession without the policy server: which process of a peer counts, and which one gets this gateway's promises.
//!
//! A view names a process of each member. If that restarts while the server is away, no view can name the next process.
//! So this one takes the place of its predecessor by itself: it has inherited the key of the certificate in the view, and
//! each peer accepts it on its own. Members, shards and the number of the view stay as they are.
//!
//! That two processes never both hold the lease of one shard rests on three rules:
//!
//! 1. *A process claims only places of processes that have ended.* Key, claim and view are left in one file, written under
//!    a lock that the kernel holds for a process until that has ended; they count on the same boot and for the same
//!    directory only (`gateway/succession.rs`). So a file that was copied elsewhere, is of before a reboot, or is of a process
//!    that still runs gives no claim. One that was rolled back gives an old one, which no peer accepts: rule 2. Of a
//!    predecessor that has ended, no lease and no promise is left to be broken: its successor counts the promises as made
//!    when it started itself (`GroupState`), and gets a lease by new ones only.
//! 2. *A claim names the process that it replaces.* A peer accepts it if that is the one that counts for it, and no link to
//!    that one is up; from then on only the successor counts. So of two successors of one process a peer accepts one, and
//!    a predecessor that runs in spite of rule 1 is accepted nowhere again. A successor of a successor names both, since it
//!    may be the first one that a peer learns of. A view that names another process than the one before decides: what was
//!    accepted until then doesn't count any more.
//! 3. *Promises of one gateway to two processes of a member don't overlap.* After the last one to the former process, the
//!    next one gets none for the duration of a lease, be the change by a claim or by a view. A lease from peers needs the
//!    promises of all of them, under one view. So of two processes of a member, one has none as long as the other one may
//!    have a lease from peers: also if rule 1 is broken, and however peers disagree about which one counts.
//!
//! What rule 1 alone excludes is a predecessor that lives on with leases of a server that its successor and all peers
//! don't reach. It would have to be another process with a copied key: of a machine that was cloned with its memory, or
//! of somebody who has read what only root can read.

use thiserror::Error;
use vipgate_dataplane::flow::time::Tick;

/// Predecessors in a claim, at most; the oldest ones are left out.
pub const MAX_PREDECESSORS: usize = 128;

/// What a process says about itself to a peer, over a link that its certificate has authenticated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The process.
    pub incarnation: u64,
    /// The processes of this gateway that have ended before it has started, on this host and since the last boot; the
    /// oldest one first.
    pub predecessors: Vec<u64>,
}

impl Claim {
    /// The claim of a process that knows these predecessors.
    pub fn new(incarnation: u64, mut predecessors: Vec<u64>) -> Self {
        let excess = predecessors.len().saturating_sub(MAX_PREDECESSORS);
        predecessors.drain(..excess);
        Self { incarnation, predecessors }
    }

    /// Whether it succeeds this process.
    pub fn succeeds(&self, process: u64) -> bool {
        self.predecessors.contains(&process)
    }
}

/// Why a peer doesn't accept a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ClaimRefusal {
    /// Another one counts, and it doesn't succeed that.
    #[error("another process of this gateway counts")]
    OtherProcess,
    /// The process that it succeeds is linked.
    #[error("the process that it succeeds is still linked")]
    PredecessorLinked,
}

/// A process of a peer that has succeeded the one in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownSuccessor {
    /// The process in the view.
    pub named: u64,
    /// The process that counts instead.
    pub successor: u64,
}

/// The processes of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// The one in the view; 0: none.
    named: u64,
    /// The one that has succeeded it, and counts instead.
    successor: Option<u64>,
    /// The one that got the last promise, and when.
    promised: (u64, Tick),
}

impl PeerProcess {
    /// A peer whose process in the first view is `named`. The previous process of this gateway, which has ended before
    /// `started`, may have promised something to it, or to a successor that this gateway has accepted.
    pub fn new(named: u64, known: Option<KnownSuccessor>, started: Tick) -> Self {
        let successor = known.filter(|it| it.named == named).map(|it| it.successor);
        Self { named, successor, promised: (successor.unwrap_or(named), started) }
    }

    /// A view names this process.
    pub fn set_named(&mut self, named: u64) {
        if self.promised.0 == 0 {
            // There was no process to promise anything to.
            self.promised.0 = named;
        }
        if self.named != named {
            (self.named, self.successor) = (named, None);
        }
    }

    /// The process that counts.
    pub fn current(&self) -> u64 {
        self.successor.unwrap_or(self.named)
    }

    /// The process that has succeeded the one in the view.
    pub fn successor(&self) -> Option<KnownSuccessor> {
        self.successor.map(|successor| KnownSuccessor { named: self.named, successor })
    }

    /// Checks a claim; `linked` is the process to which there is a link.
    ///
    /// # Errors
    /// When another process counts and the claim isn't that of its successor, or comes while that one may be alive.
    pub fn check(&self, claim: &Claim, linked: Option<u64>) -> Result<(), ClaimRefusal> {
        let current = self.current();
        if claim.incarnation == current {
            Ok(())
        } else if !claim.succeeds(current) {
            Err(ClaimRefusal::OtherProcess)
        } else if linked == Some(current) {
            Err(ClaimRefusal::PredecessorLinked)
        } else {
            Ok(())
        }
    }

    /// Accepts a process whose claim was checked; returns whether another one counted until now.
    pub fn accept(&mut self, process: u64) -> bool {
        let is_new = process != self.current();
        if is_new {
            self.successor = Some(process);
        }
        is_new
    }

    /// Notes a promise to a process, for a lease of this duration; false: it must not be made. `named` is the process in
    /// the view that the promise is made under, which may be a later one than the view here.
    pub fn promise(&mut self, process: u64, named: u64, now: Tick, lease_ms: u32) -> bool {
        let counts = process == self.current() && (named == self.named || named == process);
        let (last, at) = self.promised;
        // Ticks are never in the future here, so this is right for 49 days; `Tick::since` would be for half of them.
        let is_fenced = last != process && now.0.wrapping_sub(at.0) < lease_ms;
        if !counts || is_fenced {
            return false;
        }
        self.promised = (process, now);
        true
    }
}

#[cfg(test)]
mod tests;
