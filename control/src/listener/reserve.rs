//! File descriptors: as many as the system gives, and some that are kept for those who must get through.

use std::fs::File;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are kept.
const SPARE: usize = 8;
/// What stays for files, netlink, timers, and the listeners themselves.
const OTHERS: u64 = 256;

/// Raises the limit of open files as far as the system allows: most begin with room for a thousand.
pub fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, limit = ?limit.current, "no more open files, so no more connections, than this");
    }
}

/// How many connections there can be, of those that are wanted: others need descriptors as well.
pub fn affordable(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let room = limit.saturating_sub(OTHERS).max(limit / 2);
    wanted.min(usize::try_from(room).unwrap_or(usize::MAX)).max(1)
}

/// Descriptors that are held for a listener that must get through: given up when the kernel has no others.
#[derive(Debug, Default)]
pub struct Reserve(Vec<File>);

impl Reserve {
    /// Holds all that it may.
    pub fn new() -> Self {
        let mut reserve = Self::default();
        reserve.refill();
        reserve
    }

    /// Gives one up; says whether there was one.
    pub fn give(&mut self) -> bool {
        self.0.pop().is_some()
    }

    /// Takes back what was given, as far as there are any again.
    pub fn refill(&mut self) {
        while self.0.len() < SPARE {
            let Ok(file) = File::open("/dev/null") else { return };
            self.0.push(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_taken_back() {
        let mut reserve = Reserve::new();
        assert_eq!((0..=SPARE).filter(|_| reserve.give()).count(), SPARE);
        reserve.refill();
        assert!(reserve.give());
    }
}
