//! Packet frames in anonymous memory, for in-memory devices.

use std::mem;
use std::ptr::NonNull;

use crate::frame::{Frame, HEADROOM};
use crate::mapping::{Mapping, MemoryError, Pages};

/// Adjacent frames, allocated together. Their memory is never freed, so frames need no reference to the arena.
#[derive(Debug)]
pub struct Arena {
    frames: Vec<Frame>,
    pages: Pages,
}

impl Arena {
    /// Allocates `count` frames of `size` bytes.
    ///
    /// # Errors
    /// When the kernel has no memory for them.
    pub fn allocate(count: usize, size: u16) -> Result<Self, MemoryError> {
        let bytes = count * usize::from(size);
        let mapping = Mapping::anonymous(bytes)?;
        let pages = mapping.pages();
        let base = mapping.base();
        mem::forget(mapping);
        // SAFETY: the new mapping has `bytes` bytes, is zeroed, is never unmapped (forgotten above), and has no other
        // reference.
        let frames = unsafe { carve(base, count, size) };
        Ok(Self { frames, pages })
    }

    /// Takes the frames; a second call returns none.
    pub fn frames(&mut self) -> Vec<Frame> {
        mem::take(&mut self.frames)
    }

    /// Page type of the memory.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Divides mapped memory into frames.
    ///
    /// # Safety
    /// `count * size` bytes from `base` are initialized, stay mapped for the lifetime of the process, and have no other
    /// owner. The contract of [`Frame::from_raw`] applies to each frame.
    pub unsafe fn carve(base: NonNull<u8>, count: usize, size: u16) -> Vec<Frame> {
        // SAFETY: guaranteed by the caller.
        unsafe { carve(base, count, size) }
    }
}

/// # Safety
/// The contract of [`Arena::carve`].
unsafe fn carve(base: NonNull<u8>, count: usize, size: u16) -> Vec<Frame> {
    let frame = |i: usize| {
        // SAFETY: `i * size` is within the memory that the caller owns, and frames don't overlap.
        let mut frame = unsafe { Frame::from_raw(base.add(i * usize::from(size)), size) };
        frame.reset(HEADROOM);
        frame
    };
    (0..count).map(frame).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_disjoint_and_taken_once() {
        let mut arena = Arena::allocate(3, 2048).unwrap();
        let mut frames = arena.frames();
        assert_eq!(frames.len(), 3);
        assert!(arena.frames().is_empty());
        for (frame, n) in frames.iter_mut().zip(1_u8..) {
            assert!(frame.replace(&[n; 1792]));
        }
        assert!(frames.iter().zip(1_u8..).all(|(frame, n)| frame.bytes().iter().all(|&byte| byte == n)));
    }
}
