//! Attempts of a client to reach a policy server, or one of several: their addresses in turn, a delay that doubles with each
//! round, and each error logged once.

use std::time::Duration;

use vipgate_common::{Backoff, LoggedErrors, jittered};

use super::target::{Target, TargetList};
use crate::config::PolicyServer;

/// The servers' addresses, and what has failed since one was last reached.
#[derive(Debug)]
pub(crate) struct Attempts {
    targets: TargetList,
    /// Delay within a round.
    first_delay: Duration,
    backoff: Backoff,
    logged: LoggedErrors,
}

impl Attempts {
    /// Of a client with these delays between attempts, the first and the longest one.
    pub(crate) fn new(server: &PolicyServer, delays: (Duration, Duration)) -> Self {
        let (targets, backoff) = (TargetList::new(server), Backoff::new(delays));
        Self { targets, first_delay: delays.0, backoff, logged: LoggedErrors::default() }
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
        self.backoff.reset();
    }

    /// The delay until the next attempt. It grows with rounds, not with servers.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let delay = if self.has_more() { self.first_delay } else { self.backoff.next_delay() };
        jittered(delay, getrandom::u32())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::fixtures::policy_server;

    /// Checks the delay after the attempt at the next server.
    async fn check_delay(attempts: &mut Attempts, full: u64) {
        let full = Duration::from_millis(full);
        attempts.next().await;
        let delay = attempts.next_delay();
        assert!(full / 2 <= delay && delay <= full, "{delay:?} of {full:?}");
    }

    #[tokio::test]
    async fn the_delay_doubles_with_each_round_of_servers_up_to_its_maximum() {
        let server = policy_server(&["http://192.0.2.1:1", "http://192.0.2.2:1"]);
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
