//! Flow ownership among workers: which worker owns a flow, reassembles a datagram or lends a port.

use crate::flow::ids::WorkerId;
use crate::flow::tuple::{HashKey, Tuple};
use crate::policy::compiled::Family;
use crate::reassembly::DatagramKey;
use crate::session::flow_directory::FlowDirectory;
use crate::session::lending::Lender;

/// One worker's view of flow ownership.
#[derive(Clone, Copy, Debug)]
pub struct FlowOwners<'a> {
    /// This worker.
    pub this: WorkerId,
    /// Number of workers.
    pub workers: u8,
    /// The flows of all workers; `None` with one worker.
    pub directory: Option<&'a FlowDirectory>,
    /// Whether [`FlowOwners::owner`] claims an unowned flow: true for packets, false for queries (`trace`).
    pub claims: bool,
}

impl FlowOwners<'_> {
    /// The other worker that owns a pod's flow. An unowned flow is claimed for this worker if the packet may open a
    /// session.
    pub fn owner<A: Family>(self, flow: &Tuple<A>, opens: bool) -> Option<WorkerId> {
        let directory = self.directory?;
        let owner =
            if opens && self.claims { Some(directory.find_or_claim(flow, self.this)) } else { directory.find(flow) };
        owner.filter(|&owner| owner != self.this)
    }

    /// Claims a flow for this worker, also if another worker owned it.
    pub fn claim<A: Family>(self, flow: &Tuple<A>) {
        if let Some(directory) = self.directory {
            directory.claim(flow, self.this);
        }
    }

    /// The other worker that reassembles a datagram. Later fragments have no ports and arrive on any queue, so the
    /// worker follows from the key that all fragments share.
    pub fn reassembly_worker<A: Family>(self, key: &DatagramKey<A>) -> Option<WorkerId> {
        // Other bits than those that select the gateway.
        let worker = WorkerId((((Self::datagram_hash(key) & 0xffff_ffff) * u64::from(self.workers)) >> 32) as u8);
        (worker != self.this).then_some(worker)
    }

    /// Hash of a fragmented datagram, the same on all workers and gateways. Not keyed: an attacker gains no more than
    /// with whole packets.
    pub fn datagram_hash<A: Family>(key: &DatagramKey<A>) -> u64 {
        const CHOICE: HashKey = HashKey::fixed();
        let (high, low) = ((key.id >> 16) as u16, key.id as u16);
        let DatagramKey { source, destination, protocol, .. } = *key;
        CHOICE.hash(&Tuple { source, destination, source_port: high, destination_port: low, protocol })
    }

    /// The next worker to ask for a port, after `asked` others had none.
    pub fn next_lender(self, asked: u8) -> Option<Lender> {
        let is_left = Lender::max_distance(self.workers, asked) > 0;
        is_left.then(|| Lender::behind(self.this, 1, self.workers))
    }
}
