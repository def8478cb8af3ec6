//! Taking up what the sessions of a former process hold besides their place in the table: ports with their blocks, a place
//! in their endpoint's quota, and their flow's place in the directory.

use crate::counters::Direction;
use crate::link::directory::Directory;
use crate::ports::allocator::Allocator;
use crate::ports::pool::WorkerId;
use crate::session::SessionFamily;
use crate::session::entry::Entry;
use crate::session::region::Adopt;
use crate::session::tuple::Tuple;
use crate::snapshot::policy::Policy;

/// What one worker takes up its sessions' holdings with.
#[derive(Debug)]
pub struct Adoption<'a> {
    /// The policy in force.
    pub policy: &'a Policy,
    /// The worker's ports.
    pub ports: &'a mut Allocator,
    /// The flows of all workers.
    pub directory: Option<&'a Directory>,
    /// The worker.
    pub worker: WorkerId,
}

impl Adopt for Adoption<'_> {
    fn adopt<A: SessionFamily>(&mut self, origin: &Entry<A>, resting: bool) -> bool {
        let (key, to) = (origin.key(), origin.to());
        match origin.direction() {
            Direction::Egress => {}
            Direction::Inbound => return self.adopt_inbound(key, to, resting),
            _ => return false,
        }
        let (endpoint, Some(vip)) = (self.policy.endpoint(key.source), self.policy.vip(to.source)) else {
            return false;
        };
        // A port stays in quarantine even if its former endpoint is gone from the policy.
        if (endpoint.is_none() && !resting) || !self.ports.adopt(vip, to.source_port) {
            return false;
        }
        if let Some((_, endpoint, _)) = endpoint.filter(|_| !resting) {
            endpoint.usage.adopt();
            if let Some(directory) = self.directory {
                directory.find_or_claim(&key, self.worker);
            }
        }
        true
    }
}

impl Adoption<'_> {
    fn adopt_inbound<A: SessionFamily>(&self, key: Tuple<A>, to: Tuple<A>, resting: bool) -> bool {
        let Some((_, target)) = self.policy.target(&key.receiver(), &to.receiver()) else { return false };
        if !resting {
            target.usage.adopt();
            if let Some(directory) = self.directory {
                directory.find_or_claim(&key, self.worker);
                directory.claim(&to.reversed(), self.worker);
            }
        }
        true
    }
}
