//! Virtual time beside real sockets. The paused clock of Tokio advances whenever no task is ready, also while a request is between
//! two sockets. So it advances by small steps, and after each one the sockets are polled until no request comes any more: a
//! request seems to take a step at most.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

/// Time that a request seems to take at most.
const STEP: Duration = Duration::from_millis(250);
/// Polls of all sockets without a request after which there is none: a request needs some six (connection, request, response).
const POLLS: u32 = 24;

/// Lets virtual time pass. `activity` counts requests and what is done with them.
pub(crate) async fn pass(time: Duration, activity: &AtomicU64) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        sleep(STEP.min(end - Instant::now())).await;
        drain(activity).await;
    }
}

async fn drain(activity: &AtomicU64) {
    let (mut polls, mut seen) = (0, activity.load(Ordering::Relaxed));
    while polls < POLLS {
        // Each one runs what is ready, and polls the sockets without waiting.
        yield_now().await;
        let now = activity.load(Ordering::Relaxed);
        polls = if now == seen { polls + 1 } else { 0 };
        seen = now;
    }
}
