//! Session replication to peer gateways: the queue of records, its sender side, and the lease on this gateway's ports.

pub mod accounting;
pub mod apply;
pub mod lease;
pub mod owner;
pub mod queue;
pub mod round;
pub mod sender;
pub mod targets;
