//! A monitored program of an interface: counts how often it was detached, and decides when to reattach it. Time and
//! what was found are arguments.

use std::io;
use std::time::{Duration, Instant};

use vipgate_xdp::attach::ProgramStatus;

use crate::source::backoff::delay_after;
use crate::state::tracking::{Attachment, ProgramAttachment};

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

/// The programs of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgramKind {
    /// The XDP program.
    Steering,
    /// The classifier at tc ingress.
    Guard,
}

impl ProgramKind {
    /// Its name in the log.
    fn name(self) -> &'static str {
        match self {
            Self::Steering => "steering program",
            Self::Guard => "tc guard",
        }
    }

    /// The log event of its detachment.
    fn event(self) -> &'static str {
        match self {
            Self::Steering => "xdp_detached",
            Self::Guard => "guard_detached",
        }
    }
}

/// A program that was attached to an interface at the start.
#[derive(Debug)]
pub(super) struct MonitoredProgram {
    kind: ProgramKind,
    backoff: Backoff,
    status: ProgramAttachment,
    /// The last error of a reattachment, to log each error once.
    last_error: Option<String>,
}

impl MonitoredProgram {
    pub(super) fn new(kind: ProgramKind) -> Self {
        Self { kind, backoff: Backoff::default(), status: ProgramAttachment::default(), last_error: None }
    }

    pub(super) fn status(&self) -> ProgramAttachment {
        self.status
    }

    /// When to check it for its reattachment; `None`: it is attached.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let is_detached = self.status.state != Attachment::Attached;
        is_detached.then(|| self.backoff.due(now).max(now + Duration::from_millis(1)))
    }

    /// Records what was found on the interface, and calls `reattach` if it is due.
    pub(super) fn check(
        &mut self,
        interface: &str,
        found: io::Result<ProgramStatus>,
        reattach: impl FnOnce() -> Result<(), String>,
        now: Instant,
    ) {
        let (name, event) = (self.kind.name(), self.kind.event());
        let state = match found {
            Ok(found) => attachment(found),
            // The interface is just gone, or the kernel is out of memory: retried by the next check.
            Err(error) => return tracing::debug!(interface, %error, "cannot query the {name}"),
        };
        if state == Attachment::Attached {
            self.backoff.attached(now);
            self.status.state = state;
            return;
        }
        if self.status.state == Attachment::Attached {
            self.status.detached += 1;
        }
        let found = description(state);
        if now < self.backoff.due(now) {
            if self.status.state != state {
                tracing::error!(
                    event = event,
                    interface,
                    found,
                    "the {name} is detached from {interface} again ({found}); reattached in {} s",
                    self.backoff.delay().as_secs()
                );
            }
            self.status.state = state;
            return;
        }
        self.backoff.reattached(now);
        match reattach() {
            Ok(()) => {
                tracing::error!(
                    event = event,
                    interface,
                    found,
                    "the {name} was detached from {interface} ({found}); reattached"
                );
                (self.status.state, self.last_error) = (Attachment::Attached, None);
            }
            Err(error) => {
                if self.last_error.as_ref() != Some(&error) {
                    tracing::error!(
                        event = event,
                        interface,
                        found,
                        error,
                        "the {name} is detached from {interface} ({found}), cannot reattach: {error}"
                    );
                }
                (self.status.state, self.last_error) = (state, Some(error));
            }
        }
    }
}

fn attachment(found: ProgramStatus) -> Attachment {
    match found {
        ProgramStatus::Attached => Attachment::Attached,
        ProgramStatus::Missing => Attachment::Missing,
        ProgramStatus::Replaced { id } => Attachment::Replaced { id },
    }
}

/// The attachment as text.
fn description(found: Attachment) -> String {
    match found {
        Attachment::Attached => "attached".to_owned(),
        Attachment::Missing => "no program attached".to_owned(),
        Attachment::Replaced { id } => format!("another program attached, id {id}"),
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

    /// One check: what was found, and the outcome of a reattachment. Returns whether there was one.
    fn check(program: &mut MonitoredProgram, found: ProgramStatus, outcome: Result<(), &str>, now: Instant) -> bool {
        let mut reattached = false;
        let reattach = || {
            reattached = true;
            outcome.map_err(str::to_owned)
        };
        program.check("gw-in", Ok(found), reattach, now);
        reattached
    }

    #[test]
    fn each_detachment_is_counted_once_and_reattached_until_it_succeeds() {
        for kind in [ProgramKind::Steering, ProgramKind::Guard] {
            let (mut program, now) = (MonitoredProgram::new(kind), Instant::now());
            let status = |state, detached| ProgramAttachment { state, detached };
            assert!(!check(&mut program, ProgramStatus::Attached, Ok(()), now));
            assert_eq!((program.status(), program.due(now)), (status(Attachment::Attached, 0), None));
            // It fails twice, and is due again at once.
            for found in [ProgramStatus::Missing, ProgramStatus::Replaced { id: 7 }] {
                assert!(check(&mut program, found, Err("no memory"), now));
                assert_eq!(program.status(), status(attachment(found), 1));
                assert_eq!(program.due(now), Some(now + Duration::from_millis(1)));
            }
            assert!(check(&mut program, ProgramStatus::Missing, Ok(()), now));
            assert_eq!((program.status(), program.due(now)), (status(Attachment::Attached, 1), None));
            // A fourth time: later.
            assert!(!check(&mut program, ProgramStatus::Missing, Ok(()), now));
            assert_eq!(program.status(), status(Attachment::Missing, 2));
            assert_eq!(program.due(now), Some(now + BACKOFF.0));
            assert!(check(&mut program, ProgramStatus::Missing, Ok(()), now + BACKOFF.0));
            assert_eq!(program.status(), status(Attachment::Attached, 2));
        }
    }

    #[test]
    fn a_failed_query_changes_nothing() {
        let (mut program, now) = (MonitoredProgram::new(ProgramKind::Guard), Instant::now());
        let gone = Err(io::ErrorKind::NotFound.into());
        program.check("gw-in", gone, || Err("not called".to_owned()), now);
        assert_eq!(program.status(), ProgramAttachment::default());
    }
}
