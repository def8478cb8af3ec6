//! Closable reference count of a VIP's blocks: once no block has an owner, the VIP's ID can be reused, but only if no
//! block can be claimed any more.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::flow::sync::AtomicU32;

/// No block can be claimed any more.
const CLOSED: u32 = 1 << 31;

/// Number of blocks with an owner. A worker that still reads an old policy may claim a block while control removes the
/// VIP: only one of the two succeeds.
#[derive(Debug)]
pub(super) struct RefCount(AtomicU32);

impl RefCount {
    pub(super) fn zero() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Increments the count; false if closed.
    pub(super) fn acquire(&self) -> bool {
        self.0.fetch_update(AcqRel, Relaxed, |held| (held & CLOSED == 0).then_some(held + 1)).is_ok()
    }

    /// Decrements the count.
    pub(super) fn release(&self) {
        self.0.fetch_sub(1, AcqRel);
    }

    /// Closes for good if the count is zero; returns whether it is closed.
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
    fn either_a_claim_or_the_close_succeeds_but_not_both() {
        loom::model(|| {
            let held = Arc::new(RefCount::zero());
            let worker = {
                let held = held.clone();
                thread::spawn(move || held.acquire())
            };
            let closed = held.close();
            let entered = worker.join().unwrap();
            assert!(entered != closed, "entered {entered}, closed {closed}");
            assert_eq!(held.count(), u32::from(entered));
            assert_eq!(held.acquire(), !closed, "a close is final");
        });
    }

    #[test]
    fn it_can_be_closed_after_the_last_release() {
        loom::model(|| {
            let held = Arc::new(RefCount::zero());
            assert!(held.acquire());
            let worker = {
                let held = held.clone();
                thread::spawn(move || held.release())
            };
            let early = held.close();
            worker.join().unwrap();
            assert!(held.close(), "early: {early}");
            assert_eq!(held.count(), 0);
        });
    }
}
