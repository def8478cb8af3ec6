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

    /// An empty jumbo frame.
    pub(crate) fn allocate_jumbo(&mut self) -> Option<Frame> {
        let frame = self.jumbo.pop().or_else(|| self.umem.jumbo_pool.as_ref()?.pop());
        frame.map(emptied)
    }

    /// An empty frame for a packet of `length` bytes.
    pub(crate) fn allocate_for(&mut self, length: usize) -> Option<Frame> {
        let fits = length <= self.umem.max_segment();
        if fits { self.allocate().map(emptied) } else { self.allocate_jumbo() }
    }

    /// `count` empty frames of the UMEM; `None`, with none allocated, if too few are free.
    pub(crate) fn allocate_all(&mut self, count: usize) -> Option<impl Iterator<Item = Frame>> {
        while self.frames.len() < count {
            self.frames.push(self.umem.pool.pop()?);
        }
        Some(self.frames.drain(self.frames.len() - count..).map(emptied))
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
        if let Some(pool) = &self.umem.jumbo_pool {
            share(&mut self.jumbo, pool);
        }
    }

    /// Number of free frames.
    pub(crate) fn count(&self) -> usize {
        self.frames.len() + self.jumbo.len()
    }
}

fn emptied(mut frame: Frame) -> Frame {
    frame.reset(HEADROOM);
    frame
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
