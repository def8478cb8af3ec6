//! Log policy for link failures. While gateways start, one of them may connect before its peer has the view that
//! contains it; such transient failures aren't logged as warnings. A persistent failure is logged once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::frame::LinkError;

/// A failure is logged as a warning if attempts still fail after this time.
const GRACE_PERIOD: Duration = Duration::from_secs(3);
/// After this time without a failure, the grace period starts again.
const RESET_AFTER: Duration = Duration::from_secs(10);
/// Maximum number of tracked gateways and addresses.
const MAX_TRACKED: usize = 256;

/// The remote end of a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum RemoteEnd {
    /// A gateway of the view.
    Gateway(Arc<str>),
    /// An unauthenticated peer at this address.
    Unauthenticated(IpAddr),
}

#[derive(Debug)]
struct FailureState {
    since: Instant,
    last: Instant,
    /// Reason of the last warning.
    last_warning: Option<LinkError>,
}

/// Recent failures by remote end.
#[derive(Debug, Default)]
pub(super) struct FailureLog(HashMap<RemoteEnd, FailureState>);

impl FailureLog {
    /// Records a failed attempt, or the end of a link (`was_linked`). Returns whether to log a warning.
    pub(super) fn should_warn(&mut self, with: RemoteEnd, was_linked: bool, reason: &LinkError, now: Instant) -> bool {
        if self.0.len() >= MAX_TRACKED && !self.0.contains_key(&with) {
            self.0.clear();
        }
        let new = FailureState { since: now, last: now, last_warning: None };
        let failure = self.0.entry(with).or_insert(new);
        if was_linked || now.duration_since(failure.last) >= RESET_AFTER {
            *failure = FailureState { since: now, last: now, last_warning: None };
        }
        failure.last = now;
        let is_significant = was_linked || now.duration_since(failure.since) >= GRACE_PERIOD;
        is_significant && failure.last_warning.replace(reason.clone()).as_ref() != Some(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn only_persistent_failures_are_warnings() {
        let (mut failure_log, start) = (FailureLog::default(), Instant::now());
        let b = || RemoteEnd::Gateway("b".into());
        let denied = LinkError::Connection("AccessDenied".to_owned());
        let warned: Vec<u64> = (0..100)
            .map(|n| n * 100)
            .filter(|ms| failure_log.should_warn(b(), false, &denied, at(start, *ms)))
            .collect();
        assert_eq!(warned, [3_000], "once, after the grace period");
        assert!(
            failure_log.should_warn(b(), false, &LinkError::UntrustedCertificate, at(start, 10_000)),
            "another reason"
        );
        assert!(
            !failure_log.should_warn(RemoteEnd::Gateway("c".into()), false, &denied, at(start, 10_000)),
            "another gateway"
        );
        assert!(!failure_log.should_warn(b(), false, &denied, at(start, 60_000)), "the grace period starts again");
    }

    #[test]
    fn the_end_of_a_link_is_a_warning_at_once() {
        let (mut failure_log, start) = (FailureLog::default(), Instant::now());
        let (b, reason) = (|| RemoteEnd::Gateway("b".into()), LinkError::SendQueueFull);
        assert!(!failure_log.should_warn(b(), false, &reason, start));
        assert!(failure_log.should_warn(b(), true, &reason, at(start, 1)));
        assert!(!failure_log.should_warn(b(), false, &reason, at(start, 100)), "already logged");
        assert!(
            !failure_log.should_warn(b(), false, &LinkError::UntrustedCertificate, at(start, 200)),
            "within its grace period"
        );
        assert!(failure_log.should_warn(b(), false, &LinkError::UntrustedCertificate, at(start, 3_100)));
    }

    #[test]
    fn state_for_unauthenticated_peers_is_bounded() {
        let (mut failure_log, now) = (FailureLog::default(), Instant::now());
        for n in 0..10_000_u32 {
            failure_log.should_warn(
                RemoteEnd::Unauthenticated(IpAddr::V4(n.into())),
                false,
                &LinkError::UntrustedCertificate,
                now,
            );
        }
        assert!(failure_log.0.len() <= MAX_TRACKED);
    }
}
