//! Monitors what a gateway has on its interfaces: the steering program, the tc guard (`vipgate_xdp::guard`), which
//! drops what the steering program would have captured while that is detached, and sockets for all receive queues.
//! Reattaches the programs: any process with `CAP_NET_ADMIN` can detach or replace them.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use vipgate_common::LoggedErrors;
use vipgate_xdp::attach::{self, Mode, OnExit};
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;
use vipgate_xdp::{guard, open};

use super::AttachedInterface;
use super::program::{MonitoredProgram, ProgramKind};
use crate::kernel::{LinkState, LinkStatus};
use crate::state::tracking::{Attachment, InterfaceAttachment, ReceiveQueues};

/// Poll interval: the kernel sends no notification of XDP programs for interfaces that are down, nor for BPF links;
/// those of tc filters aren't subscribed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Retry interval while the steering program is locked by a policy change.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Retry interval of a failed write to the steering program's map of interfaces.
const MAP_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The entry of an interface in the steering program's map of interfaces. The program takes a device without one for an
/// inside one, and drops what it captures there.
#[derive(Debug)]
struct MapEntry {
    /// The interface index in the map.
    ifindex: u32,
    /// Errors of writes.
    logged: LoggedErrors,
}

impl MapEntry {
    fn new(ifindex: u32) -> Self {
        Self { ifindex, logged: LoggedErrors::default() }
    }

    /// Writes the interface index, if the map has another one.
    fn update(&mut self, nic: &Nic, write: impl FnOnce() -> Result<(), String>) {
        if self.ifindex == nic.ifindex {
            return;
        }
        match write() {
            Ok(()) => *self = Self::new(nic.ifindex),
            Err(error) if self.logged.is_new(&error) => tracing::error!(
                event = "xdp_detached",
                interface = nic.name,
                error,
                "cannot add the recreated device to the steering program: {error}"
            ),
            Err(_) => {}
        }
    }

    /// When to write it again; `None`: the map has it.
    fn due(&self, nic: &Nic, now: Instant) -> Option<Instant> {
        (self.ifindex != nic.ifindex).then(|| now + MAP_RETRY_INTERVAL)
    }
}

/// An interface that is monitored.
struct Monitored {
    nic: Nic,
    map_entry: MapEntry,
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
        let interfaces = interfaces.into_iter().map(|AttachedInterface { nic, mode, guard }| Monitored {
            map_entry: MapEntry::new(nic.ifindex),
            mode,
            steering: MonitoredProgram::new(ProgramKind::Steering, Attachment::Attached),
            guard: guard.map(|state| MonitoredProgram::new(ProgramKind::Guard, state)),
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
    /// is dropped until a restart binds one. What fails here is repeated by `check`.
    pub(super) fn attach_successors(&mut self, links: &[LinkStatus]) {
        let Some(mut steering) = try_lock(&self.steering) else { return };
        for (monitored, link) in self.interfaces.iter_mut().zip(links) {
            let Some((ifindex, _)) = link.successor.filter(|(ifindex, _)| *ifindex != monitored.nic.ifindex) else {
                continue;
            };
            monitored.nic.ifindex = ifindex;
            monitored.attach_to_successor(&mut steering, link, self.on_exit);
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
            monitored.check(&mut steering, link, self.on_exit, now);
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

    /// Attaches the programs to a recreated device, also if the map can't take it: without them the kernel would forward
    /// what it receives.
    fn attach_to_successor(&mut self, steering: &mut Steering, link: &LinkStatus, on_exit: OnExit) {
        self.update_map(steering, link);
        let nic = &self.nic;
        let attached = attach::reattach(steering, nic, self.mode, on_exit).map_err(|error| error.to_string());
        let installed = match &self.guard {
            Some(_) => guard::install(steering, nic).map_err(|error| error.to_string()),
            None => Ok(()),
        };
        if let Err(error) = attached.and(installed) {
            tracing::error!(
                event = "xdp_detached",
                interface = nic.name,
                error,
                "cannot attach the programs to the recreated device: {error}"
            );
        }
        for program in [Some(&mut self.steering), self.guard.as_mut()].into_iter().flatten() {
            program.recreated();
        }
    }

    fn update_map(&mut self, steering: &mut Steering, link: &LinkStatus) {
        let nic = &self.nic;
        let write = || {
            let added = steering.add_interface(nic.ifindex, link.id, link.role.is_inside());
            added.map_err(|error| error.to_string())
        };
        self.map_entry.update(nic, write);
    }

    fn check(&mut self, steering: &mut Steering, link: &LinkStatus, on_exit: OnExit, now: Instant) {
        self.update_map(steering, link);
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

    /// When a detached program is to be reattached, or the map written again.
    fn due(&self, now: Instant) -> Option<Instant> {
        let programs = [Some(&self.steering), self.guard.as_ref()];
        let programs = programs.into_iter().flatten().filter_map(|program| program.due(now));
        programs.chain(self.map_entry.due(&self.nic, now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_write() -> Result<(), String> {
        panic!("the map has it")
    }

    #[test]
    fn the_index_of_a_recreated_device_is_written_until_the_map_has_it() {
        let mut nic = Nic { name: "gw-in".to_owned(), ifindex: 2, queues: 1, native_xdp: true, zero_copy: false };
        let (mut entry, now) = (MapEntry::new(nic.ifindex), Instant::now());
        entry.update(&nic, no_write);
        assert_eq!(entry.due(&nic, now), None);
        // Recreated twice; the kernel refuses the writes at first.
        for ifindex in [7, 8] {
            nic.ifindex = ifindex;
            for _ in 0..3 {
                let mut is_written = false;
                entry.update(&nic, || {
                    is_written = true;
                    Err("no memory".to_owned())
                });
                assert!(is_written);
                assert_eq!(entry.due(&nic, now), Some(now + MAP_RETRY_INTERVAL));
            }
        }
        entry.update(&nic, || Ok(()));
        assert_eq!(entry.due(&nic, now), None);
        entry.update(&nic, no_write);
    }
}
