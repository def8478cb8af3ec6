//! Restore: takes up, for the sessions of a former process, what they hold outside the session table: SNAT ports with
//! their blocks, a unit of their endpoint's quota, and their entry in the flow directory; and the backends of clients
//! with session affinity.

use crate::flow::direction::Direction;
use crate::flow::ids::WorkerId;
use crate::flow::time::Tick;
use crate::flow::tuple::Tuple;
use crate::policy::compiled::Policy;
use crate::ports::allocator::Allocator;
use crate::session::SessionFamily;
use crate::session::affinity::{AffinityTable, Choice};
use crate::session::entry::Entry;
use crate::session::flow_directory::FlowDirectory;
use crate::session::persistence::RestoreSession;

/// The tables of one worker that restored sessions hold resources of.
#[derive(Debug)]
pub struct Restorer<'a> {
    /// The policy in force.
    pub policy: &'a Policy,
    /// The worker's ports.
    pub ports: &'a mut Allocator,
    /// The flow directory of all workers.
    pub directory: Option<&'a FlowDirectory>,
    /// The affinity table of all workers.
    pub affinity: &'a AffinityTable,
    pub worker: WorkerId,
}

impl RestoreSession for Restorer<'_> {
    fn restore<A: SessionFamily>(&mut self, origin: &Entry<A>, quarantined: bool) -> bool {
        let (key, to) = (origin.key(), origin.translated());
        match origin.direction() {
            Direction::Egress => {}
            Direction::Inbound => return self.restore_inbound(key, to, quarantined),
            _ => return false,
        }
        let (endpoint, Some(vip)) = (self.policy.endpoint(key.source), self.policy.vip(to.source)) else {
            return false;
        };
        // A port stays quarantined even if the policy no longer has its former endpoint.
        if (endpoint.is_none() && !quarantined) || !self.ports.reserve(&vip.ports, to.source_port) {
            return false;
        }
        if let Some((_, endpoint, _)) = endpoint.filter(|_| !quarantined) {
            endpoint.usage.restore();
            if let Some(directory) = self.directory {
                directory.find_or_claim(&key, self.worker);
            }
        }
        true
    }

    fn restore_choice<A: SessionFamily>(&mut self, choice: &Choice<A>, now: Tick) {
        self.affinity.adopt(choice, self.policy, now);
    }
}

impl Restorer<'_> {
    fn restore_inbound<A: SessionFamily>(&self, key: Tuple<A>, to: Tuple<A>, quarantined: bool) -> bool {
        let Some((_, target)) = self.policy.permitted_backend(&key.receiver(), &to.receiver()) else { return false };
        if !quarantined {
            target.usage.restore();
            if let Some(directory) = self.directory {
                directory.find_or_claim(&key, self.worker);
                directory.claim(&to.reversed(), self.worker);
            }
        }
        true
    }
}
