//! Free frames of one worker: those of the UMEM, and jumbo frames.

use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use vipgate_mem::{Frame, HEADROOM};

use crate::umem::SharedUmem;

/// Free frames of each kind that a worker retains; surplus goes to the shared pools.
const LOCAL_FRAMES: usize = 512;

/// The free frames of one worker, balanced with those of others by the UMEM's shared pools.
#[derive(Debug)]
pub(crate) struct FreeFrames {
    pub(crate) umem: Arc<SharedUmem>,
    frames: Vec<Frame>,
    /// Last in, first out: the bytes of a jumbo frame that was released just now are in the cache.
    jumbo: Vec<Frame>,
}

impl FreeFrames {
    pub(crate) fn new(umem: Arc<SharedUmem>) -> Self {
        let list = || Vec::with_capacity(4 * LOCAL_FRAMES);
        Self { umem, frames: list(), jumbo: list() }
    }

    /// A frame of the UMEM.
    #[inline]
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        self.frames.pop().or_else(|| self.umem.pool.pop())
    }

    /// A jumbo frame.
    pub(crate) fn allocate_jumbo(&mut self) -> Option<Frame> {
        self.jumbo.pop().or_else(|| self.umem.jumbo_pool.pop())
    }

    /// An empty frame for a packet of `length` bytes.
    pub(crate) fn allocate_for(&mut self, length: usize) -> Option<Frame> {
        let fits = length <= self.umem.max_segment();
        let mut frame = if fits { self.allocate() } else { self.allocate_jumbo() }?;
        frame.reset(HEADROOM);
        Some(frame)
    }

    /// Ensures that the next `count` frames of the UMEM can be allocated; false if too few are free.
    pub(crate) fn reserve(&mut self, count: usize) -> bool {
        while self.frames.len() < count {
            let Some(frame) = self.umem.pool.pop() else { return false };
            self.frames.push(frame);
        }
        true
    }

    /// Releases a frame of either kind.
    #[inline]
    pub(crate) fn release(&mut self, frame: Frame) {
        let is_jumbo = frame.capacity() != self.umem.frame_size();
        let list = if is_jumbo { &mut self.jumbo } else { &mut self.frames };
        list.push(frame);
    }

    /// Moves surplus frames to the shared pools.
    pub(crate) fn release_surplus(&mut self) {
        share(&mut self.frames, &self.umem.pool);
        share(&mut self.jumbo, &self.umem.jumbo_pool);
    }

    /// Number of free frames.
    pub(crate) fn count(&self) -> usize {
        self.frames.len() + self.jumbo.len()
    }
}

fn share(list: &mut Vec<Frame>, pool: &ArrayQueue<Frame>) {
    while list.len() > 2 * LOCAL_FRAMES {
        let Some(frame) = list.pop() else { return };
        // The pool has capacity for all frames.
        if let Err(frame) = pool.push(frame) {
            list.push(frame);
            return;
        }
    }
}
