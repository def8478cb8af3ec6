//! State of interfaces, XDP programs and next hops.

use std::sync::Arc;
use std::time::Instant;

use crate::kernel::{LinkStatus, NextHopStatus};
use crate::state::fault::Fault;

/// Status of this gateway's interfaces and next hops.
#[derive(Clone, Debug, Default)]
pub struct TrackingStatus {
    /// The interfaces, by ID.
    pub interfaces: Vec<LinkStatus>,
    /// XDP attachment of each interface.
    pub attachments: Vec<InterfaceAttachment>,
    /// The probed next hops.
    pub next_hops: Vec<NextHopStatus>,
    /// Current faults.
    pub faults: Vec<Fault>,
    /// End of the hold-down after recovery; `None`: not held down.
    pub held_down: Option<Instant>,
    /// Why this gateway is unable: the current faults, or during hold-down the last ones.
    pub unable: Option<Arc<str>>,
}

impl TrackingStatus {
    /// An interface that was recreated and is up. Sockets and rings are bound to the old device; only a restart binds
    /// the new one.
    pub fn recreated(&self) -> Option<&LinkStatus> {
        self.interfaces.iter().find(|link| link.successor.is_some_and(|(_, is_up)| is_up))
    }

    /// All current faults as text.
    pub fn fault(&self) -> Option<String> {
        let faults: Vec<_> = self.faults.iter().map(Fault::to_string).collect();
        (!faults.is_empty()).then(|| faults.join("; "))
    }
}

/// XDP attachment of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpAttachment {
    /// The steering program is attached.
    #[default]
    Attached,
    /// There is no XDP program.
    Missing,
    /// Another XDP program is attached.
    Replaced {
        /// Its program ID.
        id: u32,
    },
}

/// Status of the XDP attachment of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAttachment {
    /// Interface name.
    pub interface: String,
    /// Current attachment.
    pub state: XdpAttachment,
    /// How often the program was found detached or replaced.
    pub detached: u64,
}
