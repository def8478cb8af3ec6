//! The ground floor: addresses, tuples and their hashes, numbers of things, directions and verdicts, time.

pub mod address;
pub mod datagram;
pub mod direction;
pub mod drop_reason;
pub mod ids;
pub mod key;
pub mod listener;
pub mod special_purpose;
pub(crate) mod sync;
pub mod time;
pub mod tunnel_metadata;
pub mod tuple;
pub mod verdict;
