//! What the soak (`tests/soak`) decides without a network. It stands here because the soak has no test harness.

pub mod evidence;
pub mod schedule;
