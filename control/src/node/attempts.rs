//! Attempts of a client to reach a policy server, with backoff, each error logged once.

use std::time::Duration;

use crate::config::PolicyServer;
use crate::xds::client::{LoggedErrors, Target, TargetList, jittered};

/// Delay between attempts: first and maximum.
pub(super) type RetryDelay = (Duration, Duration);

/// The servers' addresses in turn, and what has failed since one was last reached.
pub(super) struct Attempts {
    targets: TargetList,
    bounds: RetryDelay,
    delay: Duration,
    logged: LoggedErrors,
}

impl Attempts {
    pub(super) fn new(server: &PolicyServer, bounds: RetryDelay) -> Self {
        Self { targets: TargetList::new(server), bounds, delay: bounds.0, logged: LoggedErrors::default() }
    }

    /// The address to try.
    pub(super) async fn next(&mut self) -> Target {
        self.targets.next().await
    }

    /// A server was reached: it is preferred from now on.
    pub(super) fn connected(&mut self, target: &Target) {
        self.targets.prefer(target);
        self.delay = self.bounds.0;
        self.logged.clear();
    }

    /// Whether the reason why an attempt or a connection has ended is to be logged.
    pub(super) fn is_new(&mut self, reason: &str) -> bool {
        self.logged.is_new(reason)
    }

    /// Waits until the next attempt. The delay is for rounds, not for servers.
    pub(super) async fn wait(&mut self) {
        let is_last = !self.targets.has_more();
        tokio::time::sleep(jittered(if is_last { self.delay } else { self.bounds.0 })).await;
        if is_last {
            self.delay = (self.delay * 2).min(self.bounds.1);
        }
    }
}
