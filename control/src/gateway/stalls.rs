//! How late the control thread is: whoever waits for it, a command, a neighbour, a lease, waits as long.
//!
//! A timer of its own is late when anything keeps the thread; how late it was at most is kept for a minute. The kernel, or a busy
//! machine, may keep it, too; so beside that stands what of it the thread itself has worked.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How often the timer is due.
const TICK: Duration = Duration::from_millis(20);
/// The spans of a minute of which the longest stall is kept.
const SPANS: usize = 12;
const SPAN: Duration = Duration::from_secs(5);

/// The longest stalls of the last minute. The control thread writes, others read.
#[derive(Debug, Default)]
pub struct Stalls {
    elapsed_us: [AtomicU32; SPANS],
    worked_us: [AtomicU32; SPANS],
}

impl Stalls {
    /// Looks how late the thread is that this runs on, without end.
    pub async fn watch(self: Arc<Self>) {
        let begun = Instant::now();
        let mut current = 0;
        loop {
            let (at, worked) = (Instant::now(), thread_time());
            tokio::time::sleep(TICK).await;
            let late = at.elapsed().saturating_sub(TICK);
            let span = (begun.elapsed().as_secs() / SPAN.as_secs()) as usize;
            // Spans in which nothing was written, for the thread was kept all along, have no stall of their own.
            for old in current + 1..=span.min(current + SPANS) {
                self.elapsed_us[old % SPANS].store(0, Relaxed);
                self.worked_us[old % SPANS].store(0, Relaxed);
            }
            current = span;
            let note = |longest: &AtomicU32, stall: Duration| {
                longest.fetch_max(u32::try_from(stall.as_micros()).unwrap_or(u32::MAX), Relaxed);
            };
            note(&self.elapsed_us[span % SPANS], late);
            note(&self.worked_us[span % SPANS], late.min(thread_time().saturating_sub(worked)));
        }
    }

    /// The longest of the last minute, and the longest that was the thread's own work.
    pub fn longest(&self) -> (Duration, Duration) {
        let of = |spans: &[AtomicU32]| {
            Duration::from_micros(spans.iter().map(|span| span.load(Relaxed)).max().unwrap_or(0).into())
        };
        (of(&self.elapsed_us), of(&self.worked_us))
    }
}

/// The time that this thread has worked.
pub(crate) fn thread_time() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(clock.tv_sec.unsigned_abs(), u32::try_from(clock.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_works_is_told_from_one_that_is_kept() {
        let stalls = Arc::new(Stalls::default());
        let watch = tokio::spawn(stalls.clone().watch());
        tokio::time::sleep(2 * TICK).await;
        std::thread::sleep(Duration::from_millis(150));
        tokio::time::sleep(2 * TICK).await;
        let (elapsed, worked) = stalls.longest();
        assert!(elapsed >= Duration::from_millis(100), "{elapsed:?}");
        assert!(worked < Duration::from_millis(50), "it slept: {worked:?}");
        let begun = thread_time();
        while thread_time().saturating_sub(begun) < Duration::from_millis(150) {
            std::hint::spin_loop();
        }
        tokio::time::sleep(2 * TICK).await;
        assert!(stalls.longest().1 >= Duration::from_millis(100), "{:?}", stalls.longest());
        watch.abort();
    }
}
