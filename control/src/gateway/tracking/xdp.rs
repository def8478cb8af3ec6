//! Monitors the attachment of the steering program and reattaches it: any process with `CAP_NET_ADMIN` can detach or
//! replace it. Meanwhile the tc guard (`vipgate_xdp::guard`) drops the traffic that the program would have captured.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use vipgate_xdp::attach::{self, Mode, OnExit, ProgramStatus};
use vipgate_xdp::guard;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;

use crate::kernel::{LinkState, LinkStatus};
use crate::source::backoff::delay_after;
use crate::state::tracking::{InterfaceAttachment, XdpAttachment};

/// Poll interval: the kernel sends no notification for interfaces that are down, nor for BPF links.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Retry interval while the steering program is locked by a policy change.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Number of immediate reattachments in a row; further ones are delayed.
const MAX_IMMEDIATE: u32 = 3;
/// Minimum and maximum delay; doubles each time.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Backoff of reattachment: immediate at first, then with growing delays, in case another process keeps detaching the
/// program.
#[derive(Clone, Copy, Debug, Default)]
struct Backoff {
    /// Reattachments in a row.
    count: u32,
    last: Option<Instant>,
}

impl Backoff {
    fn delay(self) -> Duration {
        match self.count.checked_sub(MAX_IMMEDIATE) {
            None => Duration::ZERO,
            Some(further) => delay_after(further, BACKOFF),
        }
    }

    /// When to reattach a detached program.
    fn due(self, now: Instant) -> Instant {
        self.last.map_or(now, |last| last + self.delay())
    }

    /// Records a reattachment.
    fn reattached(&mut self, now: Instant) {
        self.count = self.count.saturating_add(1);
        self.last = Some(now);
    }

    /// The program is attached: resets the backoff after a while.
    fn attached(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now >= last + BACKOFF.1.max(self.delay() * 2)) {
            *self = Self::default();
        }
    }
}

/// An interface whose attachment is monitored.
struct Monitored {
    nic: Nic,
    mode: Mode,
    backoff: Backoff,
    status: InterfaceAttachment,
    /// The last error of a reattachment, to log each error once.
    last_error: Option<String>,
}

/// Locks the steering program; `None` while a policy change holds the lock, which may take a while.
fn try_lock(steering: &Mutex<Steering>) -> Option<MutexGuard<'_, Steering>> {
    match steering.try_lock() {
        Ok(steering) => Some(steering),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Monitors the steering program on all interfaces.
pub(super) struct XdpMonitor {
    steering: Arc<Mutex<Steering>>,
    on_exit: OnExit,
    interfaces: Vec<Monitored>,
    next: Option<Instant>,
}

impl XdpMonitor {
    pub(super) fn new(nics: Vec<Nic>, modes: Vec<Mode>, on_exit: OnExit, steering: Arc<Mutex<Steering>>) -> Self {
        let interfaces = nics.into_iter().zip(modes).map(|(nic, mode)| {
            let status =
                InterfaceAttachment { interface: nic.name.clone(), state: XdpAttachment::Attached, detached: 0 };
            Monitored { nic, mode, backoff: Backoff::default(), status, last_error: None }
        });
        Self { steering, on_exit, interfaces: interfaces.collect(), next: None }
    }

    /// When to check next.
    pub(super) fn next_check(&self) -> Instant {
        self.next.unwrap_or_else(Instant::now)
    }

    /// The attachment of each interface.
    pub(super) fn status(&self) -> Vec<InterfaceAttachment> {
        self.interfaces.iter().map(|monitored| monitored.status.clone()).collect()
    }

    /// Attaches the steering program to a recreated device before it is up. No socket is bound to it, so traffic to be
    /// captured is dropped until a restart binds one.
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
                .and_then(|()| match self.on_exit {
                    OnExit::Drop => guard::install(&mut steering, &nic).map_err(|error| error.to_string()),
                    OnExit::Pass => Ok(()),
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

    /// Checks all interfaces, and reattaches the program where it is detached.
    pub(super) fn check(&mut self, links: &[LinkStatus], now: Instant) {
        let Some(mut steering) = try_lock(&self.steering) else {
            self.next = Some(now + LOCK_RETRY_INTERVAL);
            return;
        };
        let mut next = now + POLL_INTERVAL;
        for monitored in &mut self.interfaces {
            let is_gone = links.iter().any(|link| {
                link.name == monitored.nic.name && link.state == LinkState::Gone && link.successor.is_none()
            });
            if is_gone {
                continue;
            }
            monitored.check(&mut steering, self.on_exit, now);
            if monitored.status.state != XdpAttachment::Attached {
                next = next.min(monitored.backoff.due(now).max(now + Duration::from_millis(1)));
            }
        }
        self.next = Some(next);
    }
}

impl Monitored {
    fn check(&mut self, steering: &mut Steering, on_exit: OnExit, now: Instant) {
        let interface = &self.status.interface;
        let found = match attach::program_status(steering, self.nic.ifindex) {
            Ok(found) => capture(found),
            // The interface is just gone, or the kernel is out of memory: retried by the next check.
            Err(error) => return tracing::debug!(interface, %error, "cannot query the XDP program"),
        };
        if found == XdpAttachment::Attached {
            self.backoff.attached(now);
            self.status.state = found;
            return;
        }
        if self.status.state == XdpAttachment::Attached {
            self.status.detached += 1;
        }
        if now >= self.backoff.due(now) {
            self.backoff.reattached(now);
            match attach::reattach(steering, &self.nic, self.mode, on_exit) {
                Ok(()) => {
                    tracing::error!(
                        event = "xdp_detached",
                        interface,
                        found = description(found),
                        "the steering program was detached from {interface} ({}); reattached",
                        description(found)
                    );
                    (self.status.state, self.last_error) = (XdpAttachment::Attached, None);
                    return;
                }
                Err(error) if self.last_error.as_ref() != Some(&error.to_string()) => {
                    tracing::error!(
                        event = "xdp_detached",
                        interface,
                        found = description(found),
                        %error,
                        "the steering program is detached from {interface} ({}), cannot reattach: {error}",
                        description(found)
                    );
                    self.last_error = Some(error.to_string());
                }
                Err(_) => {}
            }
        } else if self.status.state != found {
            tracing::error!(
                event = "xdp_detached",
                interface,
                found = description(found),
                "the steering program is detached from {interface} again ({}); reattached in {} s",
                description(found),
                self.backoff.delay().as_secs()
            );
        }
        self.status.state = found;
    }
}

fn capture(found: ProgramStatus) -> XdpAttachment {
    match found {
        ProgramStatus::Attached => XdpAttachment::Attached,
        ProgramStatus::Missing => XdpAttachment::Missing,
        ProgramStatus::Replaced { id } => XdpAttachment::Replaced { id },
    }
}

/// The attachment as text.
fn description(found: XdpAttachment) -> String {
    match found {
        XdpAttachment::Attached => "attached".to_owned(),
        XdpAttachment::Missing => "no program attached".to_owned(),
        XdpAttachment::Replaced { id } => format!("another program attached, id {id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program is detached again each time it was reattached.
    #[test]
    fn reattachment_is_immediate_then_backs_off() {
        let mut backoff = Backoff::default();
        let mut now = Instant::now();
        let mut delays = Vec::new();
        for _ in 0..12 {
            let due = backoff.due(now);
            delays.push(due.saturating_duration_since(now).as_secs());
            now = now.max(due);
            backoff.reattached(now);
        }
        assert_eq!(delays, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        // After it has stayed attached, the backoff starts over.
        backoff.attached(now + Duration::from_secs(119));
        assert!(backoff.due(now) > now);
        backoff.attached(now + Duration::from_mins(2));
        assert_eq!(backoff.due(now), now);
    }
}
