//! Watchdog: ends the process when a compilation hangs, and says of which world it is. A hang can't be caught otherwise, and
//! it may take all memory.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// A compilation that takes longer hangs, on the slowest machine.
pub(super) const MAX_COMPILATION: Duration = Duration::from_secs(20);

/// Watches one compilation at a time.
pub(super) struct Watchdog(Sender<bool>);

impl Watchdog {
    /// `world`: what is reported.
    pub(super) fn new(world: String) -> Self {
        let (sender, receiver) = channel();
        thread::spawn(move || {
            // `true` when one begins, `false` when it ends.
            while let Ok(has_begun) = receiver.recv() {
                if has_begun && receiver.recv_timeout(MAX_COMPILATION) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("a compilation takes more than {MAX_COMPILATION:?}: {world}");
                    std::process::exit(1);
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
