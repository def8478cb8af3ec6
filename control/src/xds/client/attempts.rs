//! Attempts of a client to reach a policy server, or one of several: their addresses in turn, a delay that doubles with each
//! round, and each error logged once.

use std::time::Duration;

use super::logged_errors::LoggedErrors;
use super::target::{Target, TargetList};
use crate::config::PolicyServer;

/// Delay between attempts: first and maximum.
pub(crate) type RetryDelay = (Duration, Duration);

/// The servers' addresses, and what has failed since one was last reached.
#[derive(Debug)]
pub(crate) struct Attempts {
    targets: TargetList,
    bounds: RetryDelay,
    delay: Duration,
    logged: LoggedErrors,
}

impl Attempts {
    pub(crate) fn new(server: &PolicyServer, bounds: RetryDelay) -> Self {
        Self { targets: TargetList::new(server), bounds, delay: bounds.0, logged: LoggedErrors::default() }
    }

    /// The address to try.
    pub(crate) async fn next(&mut self) -> Target {
        self.targets.next().await
    }

    /// Whether there are addresses left in this round.
    pub(crate) fn has_more(&self) -> bool {
        self.targets.has_more()
    }

    /// A server was reached: it is preferred from now on, and errors are new.
    pub(crate) fn reached(&mut self, target: &Target) {
        self.targets.prefer(target);
        self.logged.clear();
    }

    /// Begins with the first delay again.
    pub(crate) fn reset_delay(&mut self) {
        self.delay = self.bounds.0;
    }

    /// The delay until the next attempt. It grows with rounds, not with servers.
    pub(crate) fn next_delay(&mut self) -> Duration {
        if self.has_more() {
            return jittered(self.bounds.0);
        }
        let delay = self.delay;
        self.delay = (delay * 2).min(self.bounds.1);
        jittered(delay)
    }

    /// Whether the reason why an attempt or a connection has ended is to be logged.
    pub(crate) fn is_new(&mut self, reason: &str) -> bool {
        self.logged.is_new(reason)
    }

    /// Forgets what was logged: a server has responded, though it isn't one to stay with.
    pub(crate) fn clear_logged(&mut self) {
        self.logged.clear();
    }
}

/// A delay with jitter: 50 to 100 % of it, so that clients that lost the server together don't reconnect together.
pub(super) fn jittered(delay: Duration) -> Duration {
    // Without a random source: the whole delay.
    let random = getrandom::u32().unwrap_or(u32::MAX);
    delay / 2 + (delay / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the delay after the attempt at the next server.
    async fn check_delay(attempts: &mut Attempts, full: u64) {
        let full = Duration::from_millis(full);
        attempts.next().await;
        let delay = attempts.next_delay();
        assert!(full / 2 <= delay && delay <= full, "{delay:?} of {full:?}");
    }

    #[tokio::test]
    async fn the_delay_doubles_with_each_round_of_servers_up_to_its_maximum() {
        let server = PolicyServer {
            url: "http://192.0.2.1:1".to_owned(),
            other_urls: vec!["http://192.0.2.2:1".to_owned()],
            ca: None,
            cert: None,
            key: None,
            cache: "unused".into(),
        };
        let mut attempts = Attempts::new(&server, (Duration::from_millis(50), Duration::from_millis(200)));
        for of_round in [50, 100, 200, 200] {
            check_delay(&mut attempts, 50).await;
            check_delay(&mut attempts, of_round).await;
        }
        attempts.reset_delay();
        for delay in [50, 50, 50, 100] {
            check_delay(&mut attempts, delay).await;
        }
    }
}
