//! Event-loop stalls of the control thread. Commands, neighbor requests and leases wait as long as it stalls.
//!
//! A periodic timer measures its own delay; the maximum of the last minute is kept. The scheduler may delay the thread,
//! too, so its CPU time during the delay is recorded beside it.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Period of the timer.
const TICK: Duration = Duration::from_millis(20);
/// Buckets of the last minute; each holds its longest stall.
const BUCKETS: usize = 12;
const BUCKET: Duration = Duration::from_secs(5);

/// The longest stalls of the last minute. Written by the control thread, read by others.
#[derive(Debug, Default)]
pub struct Stalls {
    elapsed_us: [AtomicU32; BUCKETS],
    worked_us: [AtomicU32; BUCKETS],
}

impl Stalls {
    /// Measures the stalls of the thread that runs this future. Never completes.
    pub async fn measure(self: Arc<Self>) {
        let started = Instant::now();
        let mut current = 0;
        loop {
            let (before, cpu_before) = (Instant::now(), thread_cpu_time());
            tokio::time::sleep(TICK).await;
            let delay = before.elapsed().saturating_sub(TICK);
            let bucket = (started.elapsed().as_secs() / BUCKET.as_secs()) as usize;
            // Buckets that were skipped during a stall hold none of their own.
            for old in current + 1..=bucket.min(current + BUCKETS) {
                self.elapsed_us[old % BUCKETS].store(0, Relaxed);
                self.worked_us[old % BUCKETS].store(0, Relaxed);
            }
            current = bucket;
            let record = |longest: &AtomicU32, stall: Duration| {
                longest.fetch_max(u32::try_from(stall.as_micros()).unwrap_or(u32::MAX), Relaxed);
            };
            record(&self.elapsed_us[bucket % BUCKETS], delay);
            record(&self.worked_us[bucket % BUCKETS], delay.min(thread_cpu_time().saturating_sub(cpu_before)));
        }
    }

    /// The longest stall of the last minute, and the longest CPU time of the thread during one.
    pub fn longest(&self) -> (Duration, Duration) {
        let max = |buckets: &[AtomicU32]| {
            Duration::from_micros(buckets.iter().map(|bucket| bucket.load(Relaxed)).max().unwrap_or(0).into())
        };
        (max(&self.elapsed_us), max(&self.worked_us))
    }
}

/// CPU time of this thread.
pub(crate) fn thread_cpu_time() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(clock.tv_sec.unsigned_abs(), u32::try_from(clock.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn cpu_time_is_distinguished_from_scheduling_delay() {
        let stalls = Arc::new(Stalls::default());
        let watch = tokio::spawn(stalls.clone().measure());
        tokio::time::sleep(2 * TICK).await;
        std::thread::sleep(Duration::from_millis(150));
        tokio::time::sleep(2 * TICK).await;
        let (elapsed, worked) = stalls.longest();
        assert!(elapsed >= Duration::from_millis(100), "{elapsed:?}");
        assert!(worked < Duration::from_millis(50), "it slept: {worked:?}");
        let start = thread_cpu_time();
        while thread_cpu_time().saturating_sub(start) < Duration::from_millis(150) {
            std::hint::spin_loop();
        }
        tokio::time::sleep(2 * TICK).await;
        assert!(stalls.longest().1 >= Duration::from_millis(100), "{:?}", stalls.longest());
        watch.abort();
    }
}
