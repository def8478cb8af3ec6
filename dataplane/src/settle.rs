//! What the end of a session gives back: its place in the endpoint's quota at once, its port when it has rested.

use crate::counters::{Counters, Direction};
use crate::ports::allocator::Allocator;
use crate::session::{Expiry, SessionFamily};
use crate::snapshot::policy::Policy;

/// Where things are given back to.
#[derive(Debug)]
pub struct Settle<'a> {
    /// The policy in force.
    pub policy: &'a Policy,
    /// The worker's ports.
    pub ports: &'a mut Allocator,
    /// The worker's counters.
    pub counters: &'a Counters,
}

impl Settle<'_> {
    /// Gives back what a session held.
    pub fn settle<A: SessionFamily>(&mut self, expiry: &Expiry<A>) {
        match expiry {
            Expiry::Ended(reason, session) => {
                self.counters.sessions_ended[*reason as usize].add(1);
                match session.direction {
                    Direction::Egress => {
                        if let Some(usage) = self.policy.usage(session.origin.source) {
                            usage.close();
                        }
                    }
                    Direction::Inbound => {
                        let (frontend, backend) = (session.origin.receiver(), session.translated.receiver());
                        if let Some((_, target)) = self.policy.target(&frontend, &backend) {
                            target.usage.close();
                        }
                    }
                    _ => {}
                }
            }
            Expiry::Released(session) => {
                if session.direction != Direction::Egress {
                    return;
                }
                let vip = self.policy.vip(session.translated.source);
                debug_assert!(vip.is_some(), "a VIP was forgotten while {} used it", session.origin.source.to_ip());
                if let Some(vip) = vip {
                    self.ports.release(vip.id, &session.translated);
                }
            }
        }
    }
}
