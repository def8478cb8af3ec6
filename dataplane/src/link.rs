//! From one worker to another, and from one gateway to another.

pub mod affinity;
pub mod directory;
pub mod flows;
pub mod handoff;
pub mod lease;
pub mod outbox;
pub mod outlet;
