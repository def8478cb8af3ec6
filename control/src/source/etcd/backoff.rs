//! How long to wait before etcd is asked again: longer each time, and not the same for all who wait.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// Pauses from 100 ms to 5 s.
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: FIRST }
    }

    /// The next pause.
    pub(super) fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        // Without random numbers it still waits.
        jittered(pause, getrandom::u32().unwrap_or(u32::MAX))
    }
}

/// From half of the pause to all of it: servers that lost the same etcd don't come back in one moment.
fn jittered(pause: Duration, random: u32) -> Duration {
    pause / 2 + (pause / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new();
        for full in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            let full = Duration::from_millis(full);
            let pause = backoff.pause();
            assert!(full / 2 <= pause && pause <= full, "{pause:?} of {full:?}");
        }
    }

    #[test]
    fn jitter_takes_up_to_half_away() {
        let pause = Duration::from_secs(4);
        assert_eq!(jittered(pause, 0), pause / 2);
        assert_eq!(jittered(pause, u32::MAX), pause);
    }
}
