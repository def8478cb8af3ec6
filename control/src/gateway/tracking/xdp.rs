//! Watches that the steering program is where it was put, and puts it back: anybody with `CAP_NET_ADMIN` can take it off an interface, or put
//! another one in its place. Meanwhile the second line (`vipgate_xdp::guard`) keeps closed what the program would have captured.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use vipgate_xdp::attach::{self, Mode, OnExit, Presence};
use vipgate_xdp::guard;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;

use crate::kernel::{LinkState, LinkStatus};

/// How often it is looked at without any message of the kernel: there is none for interfaces that are down, and for BPF links.
const POLL: Duration = Duration::from_secs(1);
/// And again, where the steering program is being changed.
const BUSY: Duration = Duration::from_millis(5);
/// So many times in a row it is put back at once; after that somebody else insists, and pauses begin.
const AT_ONCE: u32 = 3;
/// The first pause, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// What is captured on an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Capture {
    /// What policy says.
    #[default]
    Attached,
    /// Nothing: there is no XDP program.
    Missing,
    /// What another program says.
    Replaced {
        /// The kernel's number of it.
        id: u32,
    },
}

/// An interface, and what is captured on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrackedCapture {
    /// Its name.
    pub interface: String,
    /// What is captured now.
    pub state: Capture,
    /// How often the program was found to be off.
    pub detached: u64,
}

/// When to put the program back: at once, but not for ever at that pace against somebody who insists.
#[derive(Clone, Copy, Debug, Default)]
struct Restorer {
    /// Times in a row.
    count: u32,
    last: Option<Instant>,
}

impl Restorer {
    fn pause(self) -> Duration {
        match self.count.checked_sub(AT_ONCE) {
            None => Duration::ZERO,
            Some(further) => (PAUSE.0 * 2u32.saturating_pow(further)).min(PAUSE.1),
        }
    }

    /// The program is off: when to put it back.
    fn due(self, now: Instant) -> Instant {
        self.last.map_or(now, |last| last + self.pause())
    }

    /// It is put back now.
    fn restores(&mut self, now: Instant) {
        self.count = self.count.saturating_add(1);
        self.last = Some(now);
    }

    /// It is there: after a while nobody insists any more.
    fn is_there(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now >= last + PAUSE.1.max(self.pause() * 2)) {
            *self = Self::default();
        }
    }
}

/// One interface.
struct Watched {
    nic: Nic,
    mode: Mode,
    restorer: Restorer,
    status: TrackedCapture,
    /// What the kernel said when it was last tried in vain.
    complaint: Option<String>,
}

/// The steering program, unless a change of policy is being captured right now: that may take a while, and nobody waits for it here.
fn try_lock(steering: &Mutex<Steering>) -> Option<MutexGuard<'_, Steering>> {
    match steering.try_lock() {
        Ok(steering) => Some(steering),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// The steering program on all interfaces.
pub(super) struct XdpWatch {
    steering: Arc<Mutex<Steering>>,
    on_exit: OnExit,
    watched: Vec<Watched>,
    next: Option<Instant>,
}

impl XdpWatch {
    pub(super) fn new(nics: Vec<Nic>, modes: Vec<Mode>, on_exit: OnExit, steering: Arc<Mutex<Steering>>) -> Self {
        let watched = nics.into_iter().zip(modes).map(|(nic, mode)| {
            let status = TrackedCapture { interface: nic.name.clone(), state: Capture::Attached, detached: 0 };
            Watched { nic, mode, restorer: Restorer::default(), status, complaint: None }
        });
        Self { steering, on_exit, watched: watched.collect(), next: None }
    }

    /// When to look again.
    pub(super) fn due(&self) -> Instant {
        self.next.unwrap_or_else(Instant::now)
    }

    /// What is captured on each interface.
    pub(super) fn status(&self) -> Vec<TrackedCapture> {
        self.watched.iter().map(|it| it.status.clone()).collect()
    }

    /// Closes a device that has come in the place of one that is gone, before it is up: no socket is bound to it, so that whatever is to
    /// be captured there is dropped until another start has bound one.
    pub(super) fn follow_successors(&mut self, links: &[LinkStatus]) {
        let Some(mut steering) = try_lock(&self.steering) else { return };
        for (it, link) in self.watched.iter_mut().zip(links) {
            let Some((ifindex, _)) = link.successor.filter(|(ifindex, _)| *ifindex != it.nic.ifindex) else { continue };
            let nic = Nic { ifindex, ..it.nic.clone() };
            let outcome = steering
                .add_interface(ifindex, link.id, link.role.is_inside())
                .map_err(|error| error.to_string())
                .and_then(|()| {
                    attach::put_back(&mut steering, &nic, it.mode, self.on_exit).map_err(|error| error.to_string())
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
                    "the new device isn't closed: {error}"
                );
            }
            it.nic = nic;
        }
    }

    /// Looks at all interfaces, and puts the program back where it is off.
    pub(super) fn check(&mut self, links: &[LinkStatus], now: Instant) {
        let Some(mut steering) = try_lock(&self.steering) else {
            self.next = Some(now + BUSY);
            return;
        };
        let mut next = now + POLL;
        for it in &mut self.watched {
            let is_gone = links
                .iter()
                .any(|link| link.name == it.nic.name && link.state == LinkState::Gone && link.successor.is_none());
            if is_gone {
                continue;
            }
            it.check(&mut steering, self.on_exit, now);
            if it.status.state != Capture::Attached {
                next = next.min(it.restorer.due(now).max(now + Duration::from_millis(1)));
            }
        }
        self.next = Some(next);
    }
}

impl Watched {
    fn check(&mut self, steering: &mut Steering, on_exit: OnExit, now: Instant) {
        let interface = &self.status.interface;
        let found = match attach::presence(steering, self.nic.ifindex) {
            Ok(found) => capture(found),
            // It has just gone, or the kernel has no memory: whatever it is, the next look will show.
            Err(error) => return tracing::debug!(interface, %error, "can't look for the XDP program"),
        };
        if found == Capture::Attached {
            self.restorer.is_there(now);
            self.status.state = found;
            return;
        }
        if self.status.state == Capture::Attached {
            self.status.detached += 1;
        }
        if now >= self.restorer.due(now) {
            self.restorer.restores(now);
            match attach::put_back(steering, &self.nic, self.mode, on_exit) {
                Ok(()) => {
                    tracing::error!(
                        event = "xdp_detached",
                        interface,
                        found = word(found),
                        "the steering program was off {interface} ({}), and is there again: who took it away?",
                        word(found)
                    );
                    (self.status.state, self.complaint) = (Capture::Attached, None);
                    return;
                }
                Err(error) if self.complaint.as_ref() != Some(&error.to_string()) => {
                    tracing::error!(event = "xdp_detached", interface, found = word(found), %error,
                        "the steering program is off {interface} ({}), and can't be put back: {error}", word(found));
                    self.complaint = Some(error.to_string());
                }
                Err(_) => {}
            }
        } else if self.status.state != found {
            tracing::error!(
                event = "xdp_detached",
                interface,
                found = word(found),
                "the steering program is off {interface} again ({}): somebody insists; it is put back in {} s",
                word(found),
                self.restorer.pause().as_secs()
            );
        }
        self.status.state = found;
    }
}

fn capture(found: Presence) -> Capture {
    match found {
        Presence::Attached => Capture::Attached,
        Presence::Missing => Capture::Missing,
        Presence::Replaced { id } => Capture::Replaced { id },
    }
}

fn word(found: Capture) -> String {
    match found {
        Capture::Attached => "attached".to_owned(),
        Capture::Missing => "nothing was there".to_owned(),
        Capture::Replaced { id } => format!("another program was there, id {id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Somebody takes the program off as soon as it is there again.
    #[test]
    fn the_program_is_put_back_at_once_and_then_ever_more_slowly() {
        let (begun, mut restorer) = (Instant::now(), Restorer::default());
        let mut now = begun;
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let due = restorer.due(now);
            pauses.push(due.saturating_duration_since(now).as_secs());
            now = now.max(due);
            restorer.restores(now);
        }
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        // It stays: the next one who takes it off is another story.
        restorer.is_there(now + Duration::from_secs(119));
        assert!(restorer.due(now) > now);
        restorer.is_there(now + Duration::from_mins(2));
        assert_eq!(restorer.due(now), now);
    }
}
