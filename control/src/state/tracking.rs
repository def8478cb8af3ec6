//! State of interfaces, their programs and receive queues, and next hops.

use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;

use crate::kernel::{LinkStatus, NextHopStatus};
use crate::state::fault::{self, Fault};

/// Status of this gateway's interfaces and next hops.
#[derive(Clone, Debug, Default)]
pub struct TrackingStatus {
    /// The interfaces, by ID.
    pub interfaces: Vec<LinkStatus>,
    /// Programs and receive queues of each interface.
    pub attachments: Vec<InterfaceAttachment>,
    /// The probed next hops.
    pub next_hops: Vec<NextHopStatus>,
    /// Current faults.
    pub faults: Vec<Fault>,
    /// End of the hold-down after recovery; `None`: not held down.
    pub held_down: Option<Instant>,
    /// Why this gateway is unable to forward: the current faults, or during hold-down the last ones.
    pub unable: Option<Arc<str>>,
}

impl TrackingStatus {
    /// Why the process has to be restarted. Sockets and rings are bound to the devices and queues of its start; only a
    /// restart binds others.
    pub fn restart_reason(&self) -> Option<RestartReason> {
        let is_recreated = |link: &&LinkStatus| link.successor.is_some_and(|(_, is_up)| is_up);
        if let Some(link) = self.interfaces.iter().find(is_recreated) {
            return Some(RestartReason::Recreated { interface: link.name.clone() });
        }
        let changed = self.attachments.iter().find(|it| it.queues.is_changed() && it.queues.is_startable)?;
        let ReceiveQueues { bound, current, .. } = changed.queues;
        Some(RestartReason::QueuesChanged { interface: changed.interface.clone(), bound, current })
    }

    /// All current faults as text.
    pub fn fault(&self) -> Option<String> {
        fault::text(&self.faults)
    }
}

/// Why a gateway exits so that the next process takes up its interfaces.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RestartReason {
    /// An interface was recreated and is up.
    #[error(
        "interface {interface} was recreated: the process exits, so that the next one uses the new device and restores \
         the sessions (systemd restarts it at once)"
    )]
    Recreated {
        /// Its name.
        interface: String,
    },
    /// The number of an interface's receive queues has changed.
    #[error(
        "the receive queues of interface {interface} have changed from {bound} to {current}: the process exits, so \
         that the next one polls all of them and restores the sessions (systemd restarts it at once)"
    )]
    QueuesChanged {
        /// Its name.
        interface: String,
        /// Queues with sockets.
        bound: u32,
        /// Queues now.
        current: u32,
    },
}

/// Attachment of a program to an interface: the steering program, or the tc guard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attachment {
    /// It is attached.
    #[default]
    Attached,
    /// There is no program.
    Missing,
    /// Another program is attached in its place.
    Replaced {
        /// Its program ID.
        id: u32,
    },
    /// The kernel hasn't answered the question for a while.
    Unknown,
}

/// Status of a program's attachment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramAttachment {
    /// Current attachment.
    pub state: Attachment,
    /// How often the program was found detached or replaced.
    pub detached: u64,
}

/// Receive queues of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveQueues {
    /// Those with sockets: as many as there were at the start.
    pub bound: u32,
    /// Active ones now.
    pub current: u32,
    /// Whether a process starts with the current ones: with enough for all its workers, and not too many.
    pub is_startable: bool,
}

impl ReceiveQueues {
    /// Whether there are queues without a socket, or sockets without a queue.
    pub fn is_changed(&self) -> bool {
        self.current != self.bound
    }
}

/// Status of the programs and receive queues of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceAttachment {
    /// Interface name.
    pub interface: String,
    /// The steering program.
    pub xdp: ProgramAttachment,
    /// The tc guard; `None`: there is none, with `on_exit: pass`, or because the kernel doesn't support it.
    pub guard: Option<ProgramAttachment>,
    pub queues: ReceiveQueues,
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::flow::ids::InterfaceId;
    use vipgate_dataplane::policy::spec::Role;

    use super::*;
    use crate::kernel::LinkState;

    fn status(successor: Option<(u32, bool)>, queues: ReceiveQueues) -> TrackingStatus {
        let (id, name, state) = (InterfaceId(0), "if0".to_owned(), LinkState::Up);
        let link = LinkStatus { id, name: name.clone(), ifindex: 2, role: Role::Both, state, successor };
        let attachment = InterfaceAttachment { interface: name, queues, ..InterfaceAttachment::default() };
        TrackingStatus { interfaces: vec![link], attachments: vec![attachment], ..TrackingStatus::default() }
    }

    fn queues(current: u32, is_startable: bool) -> ReceiveQueues {
        ReceiveQueues { bound: 2, current, is_startable }
    }

    #[test]
    fn a_recreated_device_is_taken_up_by_a_restart_once_it_is_up() {
        let reason = |successor| status(successor, queues(2, true)).restart_reason();
        assert_eq!(reason(None), None);
        assert_eq!(reason(Some((7, false))), None);
        assert_eq!(reason(Some((7, true))), Some(RestartReason::Recreated { interface: "if0".to_owned() }));
    }

    #[test]
    fn added_and_removed_queues_cause_a_restart_unless_no_process_could_start_with_them() {
        let reason = |current, is_startable| status(None, queues(current, is_startable)).restart_reason();
        assert_eq!(reason(2, true), None);
        for current in [1, 3, 64] {
            let changed = RestartReason::QueuesChanged { interface: "if0".to_owned(), bound: 2, current };
            assert_eq!(reason(current, true), Some(changed));
            assert_eq!(reason(current, false), None, "it serves the queues that it has");
        }
    }
}
