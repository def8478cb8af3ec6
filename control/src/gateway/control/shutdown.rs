//! Shutdown of a gateway, in this order: traffic moves away, requests are answered, workers stop, the kernel's state is
//! released.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{ControlLoop, End};
use crate::command_error::CommandError;
use crate::natlog::NatLog;
use crate::systemd;

/// Time for what tasks still write.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

impl ControlLoop {
    /// Stops everything; returns `end`, or that a worker has panicked.
    pub(super) async fn shut_down(mut self, end: End) -> End {
        tracing::info!(event = "stopping", "stopping");
        systemd::stopping();
        self.housekeeping.stop();
        // First, so that routers stop sending traffic here.
        self.advertiser.close().await;
        self.subscription.close().await;
        self.membership.group.close().await;
        self.state.ready.store(false, Ordering::Relaxed);
        self.servers.close().await;
        let none_panicked = self.threads.stop();
        NatLog::close(self.nat_log).await;
        self.resolver.close().await;
        self.tasks.stop(STOP_TIMEOUT).await;
        if !none_panicked && end.is_ok() {
            return Err(CommandError::runtime("a worker thread died; see the log"));
        }
        tracing::info!(event = "stopped", on_exit = ?self.config.xdp.on_exit, "stopped");
        end
    }
}
