//! Watchdog: ends the process when a compilation hangs, and says of which world it is. A hang can't be caught otherwise, and
//! it may take all memory.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A compilation that takes longer hangs, on the slowest machine: time in which the process has a processor, as others may
/// have it meanwhile.
const MAX_COMPILATION: Duration = Duration::from_secs(20);

/// Watches one compilation at a time.
pub(super) struct Watchdog(Sender<bool>);

impl Watchdog {
    /// `world`: what is reported.
    pub(super) fn new(world: String) -> Self {
        let (sender, receiver) = channel();
        thread::spawn(move || {
            // `true` when one begins, `false` when it ends.
            while let Ok(has_begun) = receiver.recv() {
                let latest = processor_time() + MAX_COMPILATION;
                while has_begun && receiver.recv_timeout(MAX_COMPILATION) == Err(RecvTimeoutError::Timeout) {
                    if processor_time() > latest {
                        eprintln!("a compilation takes more than {MAX_COMPILATION:?}: {world}");
                        std::process::exit(1);
                    }
                }
            }
        });
        Self(sender)
    }

    pub(super) fn limit<T>(&self, work: impl FnOnce() -> T) -> T {
        let _ = self.0.send(true);
        let result = work();
        let _ = self.0.send(false);
        result
    }
}

fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("no negative time")
}
