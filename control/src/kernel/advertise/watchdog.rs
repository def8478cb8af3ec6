//! Watchdog process of the BGP routes: waits for EOF on a pipe from the gateway, then withdraws the gateway's routes.
//!
//! It starts before the first route is installed and holds an abstract socket name of the network namespace until it
//! has withdrawn the routes, so it can't remove the routes of a gateway that restarts at once.

use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use super::super::error::NetworkError;

/// The hidden subcommand of this process.
pub const SUBCOMMAND: &str = "withdraw";
/// Abstract Unix socket name; like routes, abstract names are per network namespace.
const LOCK_NAME: &[u8] = b"vipgate/advertised-routes";
/// How long to wait for the name: its holder needs milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// How long the gateway waits until the process is ready, and until it has ended.
const START_TIMEOUT: Duration = Duration::from_secs(5);
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The gateway's handle of the process.
#[derive(Debug)]
pub(super) struct Watchdog {
    child: Child,
}

impl Watchdog {
    /// Starts the process and waits until it is ready.
    pub(super) async fn start(program: &Path) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg0("vipgate")
            .arg(SUBCOMMAND)
            // Without systemd's variables: systemd would take its notifications for the gateway's.
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A process group of its own: a terminal or a supervisor may signal the gateway's group.
            .process_group(0)
            .spawn()?;
        let Some(mut stdout) = child.stdout.take() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let ready =
            timeout(START_TIMEOUT, stdout.read_u8()).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut));
        match ready.and_then(|read| read) {
            Ok(_) => Ok(Self { child }),
            Err(error) => {
                // Fails if it has already exited.
                let _ = child.start_kill();
                Err(error)
            }
        }
    }

    /// Whether it is running.
    pub(super) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Closes the pipe, so that it withdraws the routes, and waits for its end.
    pub(super) async fn release(mut self) {
        drop(self.child.stdin.take());
        if timeout(END_TIMEOUT, self.child.wait()).await.is_err() {
            warn!(pid = self.child.id(), "the process that withdraws routes does not end");
        }
    }
}

/// The process: waits for EOF on stdin, then removes all routes of vipgate. Returns their number.
///
/// # Errors
/// Signal handlers can't be installed, or the routes can't be removed.
pub async fn wait_and_withdraw() -> Result<usize, NetworkError> {
    let error = |source| NetworkError::new("waiting for the end of the gateway", source);
    // Signals are ignored: one that ends all processes of the service ends the gateway too, and only that counts.
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::pipe()];
    let _ignored = kinds.map(signal).into_iter().collect::<io::Result<Vec<_>>>().map_err(error)?;
    let _lock = lock_name().await;
    // Reports readiness; the gateway may have ended meanwhile.
    let _ = io::stdout().write_all(b"\n").and_then(|()| io::stdout().flush());
    io::copy(&mut io::stdin().lock(), &mut io::sink()).map_err(error)?;
    super::withdraw_all().await
}

/// Binds the name, waiting until no other watchdog holds it.
async fn lock_name() -> Option<UnixDatagram> {
    let address = SocketAddr::from_abstract_name(LOCK_NAME).ok()?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match UnixDatagram::bind_addr(&address) {
            Ok(socket) => return Some(socket),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                sleep(LOCK_RETRY_INTERVAL).await;
            }
            Err(_) => return None,
        }
    }
}
