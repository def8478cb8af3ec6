//! A monitored program of an interface: counts how often it was detached, and decides when to reattach it. Time and
//! what was found are arguments.

use std::io;
use std::time::{Duration, Instant};

use vipgate_common::{LoggedErrors, delay_after};
use vipgate_xdp::attach::ProgramStatus;

use crate::state::tracking::{Attachment, ProgramAttachment};

/// Number of immediate reattachments in a row; further ones are delayed.
const MAX_IMMEDIATE: u32 = 3;
/// Minimum and maximum delay; doubles each time.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// The same after attempts that the kernel has refused.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));
/// Time of failed queries after which it is unknown whether the program is attached.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Backoff of reattachment: immediate at first, then with growing delays, in case another process keeps detaching the
/// program. Attempts that fail don't count: the program is needed as soon as the kernel accepts it.
#[derive(Clone, Copy, Debug, Default)]
struct Backoff {
    /// Reattachments in a row.
    count: u32,
    /// Failed attempts since the last one.
    failed: u32,
    /// The last attempt.
    last: Option<Instant>,
}

impl Backoff {
    fn delay(self) -> Duration {
        match (self.failed.checked_sub(1), self.count.checked_sub(MAX_IMMEDIATE)) {
            (Some(further), _) => delay_after(further, RETRY_BACKOFF),
            (None, Some(further)) => delay_after(further, BACKOFF),
            (None, None) => Duration::ZERO,
        }
    }

    /// When to reattach a detached program.
    fn due(self, now: Instant) -> Instant {
        self.last.map_or(now, |last| last + self.delay())
    }

    /// Records a reattachment.
    fn reattached(&mut self, now: Instant) {
        (self.count, self.failed) = (self.count.saturating_add(1), 0);
        self.last = Some(now);
    }

    /// Records a failed attempt.
    fn failed(&mut self, now: Instant) {
        self.failed = self.failed.saturating_add(1);
        self.last = Some(now);
    }

    /// The program is attached: resets the backoff after a while.
    fn attached(&mut self, now: Instant) {
        self.failed = 0;
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

/// A program that belongs to an interface.
#[derive(Debug)]
pub(super) struct MonitoredProgram {
    kind: ProgramKind,
    backoff: Backoff,
    status: ProgramAttachment,
    /// Since when queries have failed; `None`: the last one hasn't.
    unqueried_since: Option<Instant>,
    /// Errors of reattachments.
    logged: LoggedErrors,
}

impl MonitoredProgram {
    /// A program in the state in which the start has left it.
    pub(super) fn new(kind: ProgramKind, state: Attachment) -> Self {
        let status = ProgramAttachment { state, detached: 0 };
        Self { kind, backoff: Backoff::default(), status, unqueried_since: None, logged: LoggedErrors::default() }
    }

    pub(super) fn status(&self) -> ProgramAttachment {
        self.status
    }

    /// When to check it for its reattachment; `None`: it is attached, or can't be queried.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let is_detached = matches!(self.status.state, Attachment::Missing | Attachment::Replaced { .. });
        let is_due = is_detached && self.unqueried_since.is_none();
        is_due.then(|| self.backoff.due(now).max(now + Duration::from_millis(1)))
    }

    /// The interface was recreated: failed queries were those of the old device.
    pub(super) fn recreated(&mut self) {
        self.unqueried_since = None;
    }

    /// Records what was found on the interface, and calls `reattach` if it is due.
    pub(super) fn check(
        &mut self,
        interface: &str,
        found: io::Result<ProgramStatus>,
        reattach: impl FnOnce() -> Result<(), String>,
        now: Instant,
    ) {
        let state = match found {
            Ok(found) => attachment(found),
            Err(error) => return self.query_failed(interface, &error, now),
        };
        self.unqueried_since = None;
        if state == Attachment::Attached {
            self.backoff.attached(now);
            self.status.state = state;
            return;
        }
        if matches!(self.status.state, Attachment::Attached | Attachment::Unknown) {
            self.status.detached += 1;
        }
        if now >= self.backoff.due(now) {
            self.status.state = self.reattach(interface, state, reattach, now);
            return;
        }
        if self.status.state != state {
            let (name, found, delay) = (self.kind.name(), description(state), self.backoff.delay());
            tracing::error!(
                event = self.kind.event(),
                interface,
                found,
                "the {name} is detached from {interface} again ({found}); reattached in {delay:?}"
            );
        }
        self.status.state = state;
    }

    /// Reattaches a program that is `missing`; returns its state then.
    fn reattach(
        &mut self,
        interface: &str,
        missing: Attachment,
        reattach: impl FnOnce() -> Result<(), String>,
        now: Instant,
    ) -> Attachment {
        let (name, event, found) = (self.kind.name(), self.kind.event(), description(missing));
        match reattach() {
            Ok(()) => {
                tracing::error!(
                    event = event,
                    interface,
                    found,
                    "the {name} was detached from {interface} ({found}); reattached"
                );
                self.backoff.reattached(now);
                self.logged.clear();
                Attachment::Attached
            }
            Err(error) => {
                if self.logged.is_new(&error) {
                    tracing::error!(
                        event = event,
                        interface,
                        found,
                        error,
                        "the {name} is detached from {interface} ({found}), cannot reattach: {error}"
                    );
                }
                self.backoff.failed(now);
                missing
            }
        }
    }

    /// A query has failed: the interface is just gone, or the kernel is out of memory or descriptors. Retried by the
    /// next check. Once that lasts, a detached program would go unnoticed, so its state is unknown.
    fn query_failed(&mut self, interface: &str, error: &io::Error, now: Instant) {
        let name = self.kind.name();
        let since = *self.unqueried_since.get_or_insert(now);
        if self.status.state != Attachment::Attached || now < since + QUERY_TIMEOUT {
            tracing::debug!(interface, %error, "cannot query the {name}");
            return;
        }
        tracing::error!(
            event = self.kind.event(),
            interface,
            %error,
            "cannot query the {name} on {interface}: {error}; whether it is attached is unknown"
        );
        self.status.state = Attachment::Unknown;
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
        Attachment::Unknown => "cannot be queried".to_owned(),
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

    /// The kernel refuses the program for a while, alone and between reattachments.
    #[test]
    fn failed_attempts_are_repeated_soon_and_delay_no_reattachment() {
        for reattachments in [0, 2, 8] {
            let (mut backoff, mut now) = (Backoff::default(), Instant::now());
            for _ in 0..reattachments {
                now = now.max(backoff.due(now));
                backoff.reattached(now);
            }
            now = now.max(backoff.due(now));
            let mut delays = Vec::new();
            for _ in 0..6 {
                backoff.failed(now);
                let due = backoff.due(now);
                delays.push(due.saturating_duration_since(now).as_millis());
                now = due;
            }
            assert_eq!(delays, [200, 400, 800, 1600, 2000, 2000]);
            // Once it succeeds, the delay is as if none had failed.
            backoff.reattached(now);
            let expected = match reattachments {
                8 => Duration::from_mins(1),
                2 => Duration::from_secs(1),
                _ => Duration::ZERO,
            };
            assert_eq!(backoff.due(now).saturating_duration_since(now), expected, "{reattachments}");
        }
    }

    fn status(state: Attachment, detached: u64) -> ProgramAttachment {
        ProgramAttachment { state, detached }
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
            let (mut program, mut now) = (MonitoredProgram::new(kind, Attachment::Attached), Instant::now());
            assert!(!check(&mut program, ProgramStatus::Attached, Ok(()), now));
            assert_eq!((program.status(), program.due(now)), (status(Attachment::Attached, 0), None));
            // It fails twice, and is due again soon.
            for (found, delay) in [(ProgramStatus::Missing, 200), (ProgramStatus::Replaced { id: 7 }, 400)] {
                assert!(check(&mut program, found, Err("no memory"), now));
                assert_eq!(program.status(), status(attachment(found), 1));
                let due = now + Duration::from_millis(delay);
                assert_eq!(program.due(now), Some(due));
                assert!(!check(&mut program, found, Ok(()), now));
                now = due;
            }
            assert!(check(&mut program, ProgramStatus::Missing, Ok(()), now));
            assert_eq!((program.status(), program.due(now)), (status(Attachment::Attached, 1), None));
            // Twice more at once, then later.
            for detached in [2, 3] {
                assert!(check(&mut program, ProgramStatus::Missing, Ok(()), now));
                assert_eq!(program.status(), status(Attachment::Attached, detached));
            }
            assert!(!check(&mut program, ProgramStatus::Missing, Ok(()), now));
            assert_eq!(program.status(), status(Attachment::Missing, 4));
            assert_eq!(program.due(now), Some(now + BACKOFF.0));
            assert!(check(&mut program, ProgramStatus::Missing, Ok(()), now + BACKOFF.0));
            assert_eq!(program.status(), status(Attachment::Attached, 4));
        }
    }

    #[test]
    fn what_the_start_could_not_attach_is_attached_and_was_not_detached() {
        let (mut program, now) = (MonitoredProgram::new(ProgramKind::Guard, Attachment::Missing), Instant::now());
        assert_eq!(program.status(), status(Attachment::Missing, 0));
        assert!(program.due(now).is_some());
        // That of an earlier process, with maps that nobody updates.
        let former = ProgramStatus::Replaced { id: 7 };
        assert!(check(&mut program, former, Err("no memory"), now));
        assert_eq!(program.status(), status(Attachment::Replaced { id: 7 }, 0));
        assert!(check(&mut program, former, Ok(()), now + RETRY_BACKOFF.0));
        assert_eq!((program.status(), program.due(now)), (status(Attachment::Attached, 0), None));
    }

    /// One check whose query fails: nothing is reattached.
    fn check_without_query(program: &mut MonitoredProgram, now: Instant) {
        let failed = Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        program.check("gw-in", failed, || panic!("reattached"), now);
    }

    #[test]
    fn a_program_that_can_not_be_queried_for_a_while_is_unknown_until_it_is_found() {
        for kind in [ProgramKind::Steering, ProgramKind::Guard] {
            let (mut program, start) = (MonitoredProgram::new(kind, Attachment::Attached), Instant::now());
            // Failed queries with a good one between them change nothing.
            for second in [0, 4, 5, 9] {
                let now = start + Duration::from_secs(second);
                if second == 5 {
                    assert!(!check(&mut program, ProgramStatus::Attached, Ok(()), now));
                } else {
                    check_without_query(&mut program, now);
                }
                assert_eq!((program.status(), program.due(now)), (status(Attachment::Attached, 0), None));
            }
            let later = start + Duration::from_secs(9) + QUERY_TIMEOUT;
            check_without_query(&mut program, later);
            assert_eq!((program.status(), program.due(later)), (status(Attachment::Unknown, 0), None));
            // Found as it was, and after another while detached.
            assert!(!check(&mut program, ProgramStatus::Attached, Ok(()), later));
            assert_eq!(program.status(), status(Attachment::Attached, 0));
            for now in [later, later + QUERY_TIMEOUT] {
                check_without_query(&mut program, now);
            }
            assert_eq!(program.status(), status(Attachment::Unknown, 0));
            assert!(check(&mut program, ProgramStatus::Missing, Ok(()), later + QUERY_TIMEOUT));
            assert_eq!(program.status(), status(Attachment::Attached, 1));
        }
    }

    #[test]
    fn a_missing_program_that_can_not_be_queried_stays_missing() {
        let (mut program, now) = (MonitoredProgram::new(ProgramKind::Guard, Attachment::Missing), Instant::now());
        for now in [now, now + QUERY_TIMEOUT] {
            check_without_query(&mut program, now);
            // It is queried with the next poll, not all the time.
            assert_eq!((program.status(), program.due(now)), (status(Attachment::Missing, 0), None));
        }
    }

    #[test]
    fn failed_queries_of_a_former_device_are_not_those_of_its_successor() {
        let (mut program, now) = (MonitoredProgram::new(ProgramKind::Steering, Attachment::Attached), Instant::now());
        check_without_query(&mut program, now);
        program.recreated();
        check_without_query(&mut program, now + QUERY_TIMEOUT);
        assert_eq!(program.status(), status(Attachment::Attached, 0));
    }
}
