//! From one worker to another.

pub mod affinity;
pub mod directory;
pub mod flows;
pub mod handoff;
