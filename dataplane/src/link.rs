//! From one worker to another.

pub mod directory;
pub mod flows;
pub mod handoff;
