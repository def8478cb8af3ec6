//! How many blocks of a VIP are held, and the end of that: once nobody holds one, the VIP's place in the workers' tables can be
//! given to another VIP, but only if nobody takes one any more.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::sync::AtomicU32;

/// Nobody may hold a block any more.
const CLOSED: u32 = 1 << 31;

/// How many blocks are held. A worker that still reads an old policy may try to take one while control lets the VIP go: one
/// of the two sees the other.
#[derive(Debug)]
pub(super) struct Held(AtomicU32);

impl Held {
    pub(super) fn none() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Counts one more; false once closed.
    pub(super) fn enter(&self) -> bool {
        self.0.fetch_update(AcqRel, Relaxed, |held| (held & CLOSED == 0).then_some(held + 1)).is_ok()
    }

    /// Counts one less.
    pub(super) fn leave(&self) {
        self.0.fetch_sub(1, AcqRel);
    }

    /// Closes for good if none is held; says whether it is closed.
    pub(super) fn close(&self) -> bool {
        match self.0.compare_exchange(0, CLOSED, AcqRel, Acquire) {
            Ok(_) => true,
            Err(held) => held & CLOSED != 0,
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.0.load(Acquire) & !CLOSED
    }
}

#[cfg(all(test, feature = "loom"))]
mod tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn of_taking_a_block_and_letting_the_vip_go_only_one_succeeds() {
        loom::model(|| {
            let held = Arc::new(Held::none());
            let worker = {
                let held = held.clone();
                thread::spawn(move || held.enter())
            };
            let closed = held.close();
            let entered = worker.join().unwrap();
            assert!(entered != closed, "entered {entered}, closed {closed}");
            assert_eq!(held.count(), u32::from(entered));
            assert_eq!(held.enter(), !closed, "closed is closed for good");
        });
    }

    #[test]
    fn whoever_leaves_last_lets_it_close() {
        loom::model(|| {
            let held = Arc::new(Held::none());
            assert!(held.enter());
            let worker = {
                let held = held.clone();
                thread::spawn(move || held.leave())
            };
            let early = held.close();
            worker.join().unwrap();
            assert!(held.close(), "early: {early}");
            assert_eq!(held.count(), 0);
        });
    }
}
