//! Blocking threads of the daemons' runtimes. Where the kernel refuses a thread, a job waits for the others, and tokio
//! panics if there is none: so the first one is started with the daemon, and stays.

use std::time::Duration;

use tokio::runtime::Handle;

/// How long idle blocking threads stay: always. There are as many as there were jobs at once.
pub(crate) const KEEP_ALIVE: Duration = Duration::MAX;

/// Starts the first blocking thread of a runtime, which has [`KEEP_ALIVE`].
pub(crate) fn start(runtime: &Handle) {
    drop(runtime.spawn_blocking(|| ()));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn a_runtime_has_a_blocking_thread_before_the_first_job() {
        let (started, stopped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let count = |counter: &Arc<AtomicUsize>| {
            let counter = counter.clone();
            move || {
                counter.fetch_add(1, Ordering::SeqCst);
            }
        };
        let mut builder = Builder::new_current_thread();
        builder.max_blocking_threads(1).thread_keep_alive(KEEP_ALIVE);
        builder.on_thread_start(count(&started)).on_thread_stop(count(&stopped));
        let runtime = builder.build().unwrap();
        start(runtime.handle());
        let start = Instant::now();
        while started.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < Duration::from_secs(10), "no thread");
            std::thread::sleep(Duration::from_millis(1));
        }
        // It is idle after its empty job, and waits without a timeout that overflows.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(stopped.load(Ordering::SeqCst), 0);
        runtime.block_on(runtime.spawn_blocking(|| ())).unwrap();
        assert_eq!(started.load(Ordering::SeqCst), 1, "the job has run on the thread that was there");
    }
}
