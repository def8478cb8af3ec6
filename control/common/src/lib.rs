//! What the crates of the control side do alike: when to try again, how often to ask, what to log, who owns a task. Time
//! and randomness are arguments.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod backoff;
mod log;
mod tasks;
mod token_bucket;

pub use self::backoff::{Backoff, RECOVERY, delay_after, jittered};
pub use self::log::{LoggedErrors, MinInterval};
pub use self::tasks::{Blocking, Task, Tasks, spawn_blocking};
pub use self::token_bucket::{Rate, TokenBucket};
