//! Service notifications to systemd (sd_notify(3), `Type=notify`): ready, reloading, stopping, watchdog. No-ops without
//! systemd. A manager that has stopped reading doesn't hold up the process: the queue of its socket is short.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use sd_notify::NotifyState;

/// The environment variable with the manager's socket.
const SOCKET: &str = "NOTIFY_SOCKET";
/// How long a notification that is sent once waits for the manager. Those that are repeated don't wait.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// READY: the gateway forwards packets, or has finished reloading.
pub fn ready() {
    notify(&[NotifyState::Ready], Some(SEND_TIMEOUT));
}

/// Extends the startup timeout by `time`, with `status` as the reason.
pub fn extend_startup(status: &str, time: Duration) {
    let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::Status(status), NotifyState::ExtendTimeoutUsec(time)], None);
}

/// RELOADING: the gateway rereads its policy until [`ready`]. Carries the monotonic time that `Type=notify-reload`
/// requires.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now], Some(SEND_TIMEOUT)),
        Err(error) => tracing::debug!(%error, "can't notify systemd of the reload: no monotonic time"),
    }
}

/// STOPPING: the gateway is shutting down.
pub fn stopping() {
    notify(&[NotifyState::Stopping], Some(SEND_TIMEOUT));
}

/// WATCHDOG: to be sent by the supervised loop at least every [`watchdog_interval`].
pub fn notify_watchdog() {
    notify(&[NotifyState::Watchdog], None);
}

/// Interval of [`notify_watchdog`]: half of the unit's `WatchdogSec=`; `None` without one.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2)
}

fn notify(states: &[NotifyState<'_>], timeout: Option<Duration>) {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    if let Err(error) = send(&socket, states, timeout) {
        tracing::debug!(%error, "can't notify systemd");
    }
}

/// Sends one message, waiting for space in the socket's queue for that long; `None`: not at all.
fn send(socket: &OsStr, states: &[NotifyState<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let mut message = String::new();
    for state in states {
        let _ = writeln!(message, "{state}");
    }
    let sender = UnixDatagram::unbound()?;
    match timeout {
        Some(_) => sender.set_write_timeout(timeout)?,
        None => sender.set_nonblocking(true)?,
    }
    sender.connect(socket)?;
    sender.send(message.as_bytes()).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_manager_that_reads_nothing_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let start = Instant::now();
        let send = |state, timeout| send(path.as_os_str(), &[state], timeout);
        let sent = (0..100_000).take_while(|_| send(NotifyState::Watchdog, None).is_ok()).count();
        assert!((1..100_000).contains(&sent), "{sent} messages in the queue");
        let error = send(NotifyState::Ready, Some(Duration::from_millis(50))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        assert_eq!(&message[..length], b"WATCHDOG=1\n");
        send(NotifyState::Ready, Some(SEND_TIMEOUT)).unwrap();
    }
}
