//! Frames in memory of our own, for devices that aren't sockets.

use std::mem;
use std::ptr::NonNull;

use crate::frame::{Frame, HEADROOM};
use crate::mapping::{Mapping, MemoryError, Pages};

/// Frames side by side, made at once. Their memory is never given back: frames need not know where they come from.
#[derive(Debug)]
pub struct Arena {
    frames: Vec<Frame>,
    pages: Pages,
}

impl Arena {
    /// `count` frames of `size` bytes.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn allocate(count: usize, size: u16) -> Result<Self, MemoryError> {
        let bytes = count * usize::from(size);
        let mapping = Mapping::anonymous(bytes)?;
        let pages = mapping.pages();
        let base = mapping.base();
        mem::forget(mapping);
        // SAFETY: the mapping was made for `bytes` bytes just now, is zeroed, is never unmapped (forgotten above), and
        // nobody else knows of it.
        let frames = unsafe { carve(base, count, size) };
        Ok(Self { frames, pages })
    }

    /// The frames; each is handed out once, so a second call gets none.
    pub fn frames(&mut self) -> Vec<Frame> {
        mem::take(&mut self.frames)
    }

    /// What kind of pages they lie on.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Frames over memory that somebody else has mapped.
    ///
    /// # Safety
    /// `count * size` bytes from `base` are initialized, stay mapped for as long as the process lives, and belong to
    /// nobody else; what else there is to promise says [`Frame::from_raw`].
    pub unsafe fn carve(base: NonNull<u8>, count: usize, size: u16) -> Vec<Frame> {
        // SAFETY: the caller promises the same.
        unsafe { carve(base, count, size) }
    }
}

/// # Safety
/// As for [`Arena::carve`].
unsafe fn carve(base: NonNull<u8>, count: usize, size: u16) -> Vec<Frame> {
    let frame = |i: usize| {
        // SAFETY: `i * size` lies inside of the memory that the caller owns, and each frame gets its own piece of it.
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
    fn frames_lie_apart_and_are_handed_out_once() {
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
