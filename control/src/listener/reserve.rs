//! File descriptor limit, and a reserve of descriptors for a listener that must always accept.

use std::fs::File;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Size of the reserve.
const RESERVE_SIZE: usize = 8;
/// Descriptors left for files, netlink, timers and the listeners themselves.
const NON_CONNECTION_DESCRIPTORS: u64 = 256;

/// Raises the soft RLIMIT_NOFILE to the hard limit; the soft default is usually 1024.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, limit = ?limit.current, "can't raise the limit of open files, which limits connections");
    }
}

/// `wanted` connections, limited by the file descriptors available for them.
pub fn limit_by_descriptors(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let available = limit.saturating_sub(NON_CONNECTION_DESCRIPTORS).max(limit / 2);
    wanted.min(usize::try_from(available).unwrap_or(usize::MAX)).max(1)
}

/// Open file descriptors held in reserve for one listener, and closed when the process has no others left.
#[derive(Debug, Default)]
pub struct DescriptorReserve(Vec<File>);

impl DescriptorReserve {
    /// A full reserve.
    pub fn new() -> Self {
        let mut reserve = Self::default();
        reserve.refill();
        reserve
    }

    /// Closes one; returns whether there was one.
    pub fn release_one(&mut self) -> bool {
        self.0.pop().is_some()
    }

    /// Refills the reserve as far as descriptors are available.
    pub fn refill(&mut self) {
        while self.0.len() < RESERVE_SIZE {
            let Ok(file) = File::open("/dev/null") else { return };
            self.0.push(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_reserve_is_refilled() {
        let mut reserve = DescriptorReserve::new();
        assert_eq!((0..=RESERVE_SIZE).filter(|_| reserve.release_one()).count(), RESERVE_SIZE);
        reserve.refill();
        assert!(reserve.release_one());
    }
}
