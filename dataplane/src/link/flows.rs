//! Who among the workers has which flow, as one worker asks it.

use crate::fragments::Key;
use crate::ports::pool::WorkerId;
use crate::session::tuple::{HashKey, Tuple};
use crate::snapshot::policy::Family;

use super::directory::Directory;

/// Who among the workers has which flow.
#[derive(Clone, Copy, Debug)]
pub struct Flows<'a> {
    /// This worker.
    pub this: WorkerId,
    /// How many there are.
    pub workers: u8,
    /// The flows of all; `None` where there is one worker.
    pub directory: Option<&'a Directory>,
    /// Whether a flow that nobody has becomes this worker's when it is asked for: so for packets, but not for whoever only wants to know.
    pub claims: bool,
}

impl Flows<'_> {
    /// The other worker that has a pod's flow. Without one, the flow is this worker's if the packet may open a session.
    pub fn owner<A: Family>(self, flow: &Tuple<A>, opens: bool) -> Option<WorkerId> {
        let directory = self.directory?;
        let owner =
            if opens && self.claims { Some(directory.find_or_claim(flow, self.this)) } else { directory.find(flow) };
        owner.filter(|&owner| owner != self.this)
    }

    /// Notes that a flow is this worker's, whoever had it before.
    pub fn take_over<A: Family>(self, flow: &Tuple<A>) {
        if let Some(directory) = self.directory {
            directory.claim(flow, self.this);
        }
    }

    /// The other worker that gathers the fragments of a datagram. Fragments without ports come in on any queue, so one
    /// worker is agreed on by what they have in common.
    pub fn gatherer<A: Family>(self, key: &Key<A>) -> Option<WorkerId> {
        // Other bits than those that choose among gateways.
        let worker = WorkerId((((Self::spread(key) & 0xffff_ffff) * u64::from(self.workers)) >> 32) as u8);
        (worker != self.this).then_some(worker)
    }

    /// Spreads fragmented datagrams, the same for all workers and gateways. Who aims at one of them could do so with whole packets.
    pub fn spread<A: Family>(key: &Key<A>) -> u64 {
        const CHOICE: HashKey = HashKey::fixed();
        let (high, low) = ((key.id >> 16) as u16, key.id as u16);
        let Key { source, destination, protocol, .. } = *key;
        CHOICE.hash(&Tuple { source, destination, source_port: high, destination_port: low, protocol })
    }

    /// The worker to ask for a port after this one, if `asked` others haven't been asked in vain.
    pub fn lender(self, asked: u8) -> Option<WorkerId> {
        let others = self.workers.saturating_sub(1);
        (asked < others).then(|| WorkerId((self.this.0 + 1) % self.workers))
    }
}
