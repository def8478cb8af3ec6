//! The process that outlives a killed gateway by a moment: it waits for the end of a pipe that the gateway holds, then
//! removes the gateway's routes.
//!
//! It starts before the first route and holds a name of the network namespace until its work is done; so the routes of
//! a gateway that starts again at once can't be taken for those of the dead one.

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

/// The hidden subcommand that is this process.
pub const SUBCOMMAND: &str = "withdraw";
/// In the abstract namespace of Unix sockets, of which each network namespace has its own, as of routes.
const NAME: &[u8] = b"vipgate/advertised-routes";
/// How long a process waits for the name: whoever has it needs milliseconds, or isn't what it should be.
const PATIENCE: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(5);
/// How long the gateway waits for the process to say that it stands, and for its end.
const START: Duration = Duration::from_secs(5);
const END: Duration = Duration::from_secs(2);

/// The process, as the gateway has it.
#[derive(Debug)]
pub(super) struct Watchdog {
    child: Child,
}

impl Watchdog {
    /// Starts it, and waits until it stands.
    pub(super) async fn start(program: &Path) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg0("vipgate")
            .arg(SUBCOMMAND)
            // Nothing of systemd's, which would take its messages for the gateway's.
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Not in the gateway's group, which a terminal or a supervisor may end as a whole.
            .process_group(0)
            .spawn()?;
        let Some(mut stdout) = child.stdout.take() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let stands = timeout(START, stdout.read_u8()).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut));
        match stands.and_then(|read| read) {
            Ok(_) => Ok(Self { child }),
            Err(error) => {
                // It may have ended by itself.
                let _ = child.start_kill();
                Err(error)
            }
        }
    }

    /// Whether it still waits.
    pub(super) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Lets it do its work and waits for its end.
    pub(super) async fn release(mut self) {
        drop(self.child.stdin.take());
        if timeout(END, self.child.wait()).await.is_err() {
            warn!(pid = self.child.id(), "the process that withdraws routes does not end");
        }
    }
}

/// What the process does: waits until its standard input ends, then removes all routes of ours. Returns how many.
///
/// # Errors
/// When it can't hear of signals, or the kernel keeps the routes.
pub async fn wait_and_withdraw() -> Result<usize, NetworkError> {
    let error = |source| NetworkError::new("waiting for the end of the gateway", source);
    // Only the end of the gateway counts: whoever ends all processes of a service by a signal ends that too.
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::pipe()];
    let _ignored = kinds.map(signal).into_iter().collect::<io::Result<Vec<_>>>().map_err(error)?;
    let _held = hold_name().await;
    // Nobody may want to know.
    let _ = io::stdout().write_all(b"\n").and_then(|()| io::stdout().flush());
    io::copy(&mut io::stdin().lock(), &mut io::sink()).map_err(error)?;
    super::withdraw_all().await
}

/// Waits until no other process of this kind is at work.
async fn hold_name() -> Option<UnixDatagram> {
    let address = SocketAddr::from_abstract_name(NAME).ok()?;
    let until = Instant::now() + PATIENCE;
    loop {
        match UnixDatagram::bind_addr(&address) {
            Ok(socket) => return Some(socket),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => sleep(RETRY).await,
            Err(_) => return None,
        }
    }
}
