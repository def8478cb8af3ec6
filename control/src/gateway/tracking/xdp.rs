//! Monitors what a gateway has on its interfaces: the steering program, the tc guard (`vipgate_xdp::guard`), which
//! drops what the steering program would have captured while that is detached, and sockets for all receive queues.
//! Reattaches the programs: any process with `CAP_NET_ADMIN` can detach or replace them.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use vipgate_xdp::attach::{self, Mode, OnExit};
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;
use vipgate_xdp::{guard, open};

use super::AttachedInterface;
use super::program::{MonitoredProgram, ProgramKind};
use crate::kernel::{LinkState, LinkStatus};
use crate::state::tracking::{InterfaceAttachment, ReceiveQueues};

/// Poll interval: the kernel sends no notification of XDP programs for interfaces that are down, nor for BPF links;
/// those of tc filters aren't subscribed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Retry interval while the steering program is locked by a policy change.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// An interface that is monitored.
struct Monitored {
    nic: Nic,
    mode: Mode,
    steering: MonitoredProgram,
    /// `None`: it has no tc guard.
    guard: Option<MonitoredProgram>,
    /// Receive queues at the last check.
    queues: u32,
}

/// Locks the steering program; `None` while a policy change holds the lock, which may take a while.
fn try_lock(steering: &Mutex<Steering>) -> Option<MutexGuard<'_, Steering>> {
    match steering.try_lock() {
        Ok(steering) => Some(steering),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Monitors all interfaces.
pub(super) struct XdpMonitor {
    steering: Arc<Mutex<Steering>>,
    on_exit: OnExit,
    /// Queues of an interface without which the next process doesn't start.
    min_queues: usize,
    interfaces: Vec<Monitored>,
    next: Option<Instant>,
}

impl XdpMonitor {
    pub(super) fn new(
        interfaces: Vec<AttachedInterface>,
        on_exit: OnExit,
        min_queues: usize,
        steering: Arc<Mutex<Steering>>,
    ) -> Self {
        let interfaces = interfaces.into_iter().map(|AttachedInterface { nic, mode, has_guard }| Monitored {
            mode,
            steering: MonitoredProgram::new(ProgramKind::Steering),
            guard: has_guard.then(|| MonitoredProgram::new(ProgramKind::Guard)),
            queues: nic.queues,
            nic,
        });
        Self { steering, on_exit, min_queues, interfaces: interfaces.collect(), next: None }
    }

    /// When to check next.
    pub(super) fn next_check(&self) -> Instant {
        self.next.unwrap_or_else(Instant::now)
    }

    /// The programs and receive queues of each interface.
    pub(super) fn status(&self) -> Vec<InterfaceAttachment> {
        self.interfaces.iter().map(|monitored| monitored.status(self.min_queues)).collect()
    }

    /// Attaches the programs to a recreated device before it is up. No socket is bound to it, so traffic to be captured
    /// is dropped until a restart binds one.
    pub(super) fn attach_successors(&mut self, links: &[LinkStatus]) {
        let Some(mut steering) = try_lock(&self.steering) else { return };
        for (monitored, link) in self.interfaces.iter_mut().zip(links) {
            let Some((ifindex, _)) = link.successor.filter(|(ifindex, _)| *ifindex != monitored.nic.ifindex) else {
                continue;
            };
            let nic = Nic { ifindex, ..monitored.nic.clone() };
            let outcome = steering
                .add_interface(ifindex, link.id, link.role.is_inside())
                .map_err(|error| error.to_string())
                .and_then(|()| {
                    attach::reattach(&mut steering, &nic, monitored.mode, self.on_exit)
                        .map_err(|error| error.to_string())
                })
                .and_then(|()| match monitored.guard {
                    Some(_) => guard::install(&mut steering, &nic).map_err(|error| error.to_string()),
                    None => Ok(()),
                });
            if let Err(error) = outcome {
                tracing::error!(
                    event = "xdp_detached",
                    interface = nic.name,
                    error,
                    "cannot attach the steering program to the recreated device: {error}"
                );
            }
            monitored.nic = nic;
        }
    }

    /// Checks all interfaces, and reattaches programs where they are detached.
    pub(super) fn check(&mut self, links: &[LinkStatus], now: Instant) {
        let Some(mut steering) = try_lock(&self.steering) else {
            self.next = Some(now + LOCK_RETRY_INTERVAL);
            return;
        };
        let mut next = now + POLL_INTERVAL;
        for (monitored, link) in self.interfaces.iter_mut().zip(links) {
            match (link.state, link.successor) {
                (LinkState::Gone, None) => continue,
                // The process exits as soon as the new device is up, whatever its queues.
                (LinkState::Gone, Some(_)) => {}
                _ => monitored.count_queues(),
            }
            monitored.check(&mut steering, self.on_exit, now);
            next = monitored.due(now).into_iter().fold(next, Instant::min);
        }
        self.next = Some(next);
    }
}

impl Monitored {
    fn status(&self, min_queues: usize) -> InterfaceAttachment {
        let present = Nic { queues: self.queues, ..self.nic.clone() };
        let is_startable = open::check_queues(&present, min_queues).is_ok();
        InterfaceAttachment {
            interface: self.nic.name.clone(),
            xdp: self.steering.status(),
            guard: self.guard.as_ref().map(MonitoredProgram::status),
            queues: ReceiveQueues { bound: self.nic.queues, current: self.queues, is_startable },
        }
    }

    /// Counts the receive queues. Those that were added have no socket: what is to be captured there is dropped.
    fn count_queues(&mut self) {
        match self.nic.current_queues() {
            Ok(queues) => self.queues = queues,
            // The interface is just gone: retried by the next check.
            Err(error) => tracing::debug!(interface = self.nic.name, %error, "cannot query the channels"),
        }
    }

    fn check(&mut self, steering: &mut Steering, on_exit: OnExit, now: Instant) {
        let (nic, mode) = (&self.nic, self.mode);
        let found = attach::program_status(steering, nic.ifindex);
        let reattach = || attach::reattach(steering, nic, mode, on_exit).map_err(|error| error.to_string());
        self.steering.check(&nic.name, found, reattach, now);
        if let Some(program) = &mut self.guard {
            let found = guard::status(steering, nic.ifindex);
            let reinstall = || guard::install(steering, nic).map_err(|error| error.to_string());
            program.check(&nic.name, found, reinstall, now);
        }
    }

    /// When a detached program is to be reattached.
    fn due(&self, now: Instant) -> Option<Instant> {
        let programs = [Some(&self.steering), self.guard.as_ref()];
        programs.into_iter().flatten().filter_map(|program| program.due(now)).min()
    }
}
