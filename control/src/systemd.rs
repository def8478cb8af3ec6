//! Service notifications to systemd (sd_notify(3), `Type=notify`): ready, reloading, stopping, watchdog. No-ops without
//! systemd.

use std::time::Duration;

use sd_notify::NotifyState;

/// READY: the gateway forwards packets, or has finished reloading.
pub fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Extends the startup timeout by `time`, with `status` as the reason.
pub fn extend_startup(status: &str, time: Duration) {
    let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::Status(status), NotifyState::ExtendTimeoutUsec(time)]);
}

/// RELOADING: the gateway rereads its policy until [`ready`]. Carries the monotonic time that `Type=notify-reload`
/// requires.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "can't notify systemd of the reload: no monotonic time"),
    }
}

/// STOPPING: the gateway is shutting down.
pub fn stopping() {
    notify(&[NotifyState::Stopping]);
}

/// WATCHDOG: to be sent by the supervised loop at least every [`watchdog_interval`].
pub fn notify_watchdog() {
    notify(&[NotifyState::Watchdog]);
}

/// Interval of [`notify_watchdog`]: half of the unit's `WatchdogSec=`; `None` without one.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2)
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "can't notify systemd");
    }
}
