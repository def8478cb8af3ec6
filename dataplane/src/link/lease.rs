//! Until when this gateway may open sessions from its ports: whoever could be given them meanwhile waits for longer. The control
//! thread extends it; workers look at it once a turn.

use std::sync::atomic::Ordering::{Acquire, Release};

use crate::sync::AtomicU32;
use crate::time::Tick;

/// No lease is needed: nobody else could have the ports.
const FREE: u32 = 0;

/// A lease, shared by the control thread and the workers.
#[derive(Debug)]
pub struct Lease(AtomicU32);

/// How a lease stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It holds, or none is needed.
    Held,
    /// It has ended this many milliseconds ago.
    Lapsed(u32),
}

impl Lease {
    /// For a gateway that needs none.
    pub fn free() -> Self {
        Self(AtomicU32::new(FREE))
    }

    /// It holds until `until`.
    pub fn extend(&self, until: Tick) {
        self.0.store(until.0.max(1), Release);
    }

    /// None is needed from now on.
    pub fn release(&self) {
        self.0.store(FREE, Release);
    }

    /// How it stands.
    pub fn hold(&self, now: Tick) -> Hold {
        match self.0.load(Acquire) {
            FREE => Hold::Held,
            until if now.reached(Tick(until)) => Hold::Lapsed(now.since(Tick(until))),
            _ => Hold::Held,
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn it_ends_by_itself() {
        let lease = Lease::free();
        assert_eq!(lease.hold(Tick(77)), Hold::Held);
        lease.extend(Tick(100));
        assert_eq!(
            (lease.hold(Tick(99)), lease.hold(Tick(100)), lease.hold(Tick(130))),
            (Hold::Held, Hold::Lapsed(0), Hold::Lapsed(30))
        );
        lease.release();
        assert_eq!(lease.hold(Tick(130)), Hold::Held);
    }
}
