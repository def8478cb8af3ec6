//! What systemd hears of a gateway (`Type=notify`): ready, reloading, stopping, and that it lives. Without systemd nothing
//! happens.

use std::time::Duration;

use sd_notify::NotifyState;

/// The gateway forwards packets, or has finished reloading.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The gateway waits for something before it is ready, and should be given so much more time.
pub fn waiting(what: &str, time: Duration) {
    let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    tell(&[NotifyState::Status(what), NotifyState::ExtendTimeoutUsec(time)]);
}

/// The gateway reads its policy again; [`ready`] ends that. The time goes with it, as `Type=notify-reload` wants.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "systemd isn't told of the reload: there is no time to tell"),
    }
}

/// The gateway has begun to stop.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// The gateway lives. To be said by the loop whose life matters, at least every [`watchdog_interval`].
pub fn alive() {
    tell(&[NotifyState::Watchdog]);
}

/// How often to say [`alive`]: half of what the unit's `WatchdogSec=` demands; `None` when it demands nothing.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2)
}

fn tell(states: &[NotifyState<'_>]) {
    // No systemd, nobody to tell.
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd can't be told");
    }
}
