//! From one worker to another.

pub mod handoff;
