//! A packet buffer as an owned token: whoever has the [`Frame`] has the bytes, and nobody else.

use std::fmt;
use std::ptr::NonNull;

use crate::prefetch_read;

/// Room before a packet's first byte: what the kernel leaves for XDP (`XDP_PACKET_HEADROOM`), so that headers can grow.
pub const HEADROOM: u16 = 256;
/// Bytes of a frame. 2 KiB instead of a page: headers of page-sized frames would all meet in one set of the L1 cache.
pub const FRAME: u16 = 2048;

/// A packet buffer, owned. Moved, never copied; given back to a device when done with (a frame that is dropped is lost,
/// which audits find).
///
/// Its memory is never unmapped, so a frame needs no reference to where it came from.
#[must_use = "a frame that is dropped is lost: give it back to its device"]
pub struct Frame {
    base: NonNull<u8>,
    place: Place,
}

/// Where a packet is in its frame, in one word: frames are moved a lot, and a move of two words costs two registers, while
/// one of four fields goes by way of the stack.
#[derive(Clone, Copy)]
struct Place(u64);

impl Place {
    #[inline]
    fn new(start: u16, len: u16, capacity: u16) -> Self {
        Self(u64::from(start) | u64::from(len) << 32 | u64::from(capacity) << 48)
    }

    /// Where the packet begins, from the frame's base.
    #[inline]
    fn start(self) -> u16 {
        self.0 as u16
    }

    /// Its bytes.
    #[inline]
    fn len(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Bytes from the base that are the frame's. Invariant: start + len <= capacity.
    #[inline]
    fn capacity(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// What the owner has noted; in the lower half of the word, where a bit is asked for in one instruction.
    #[inline]
    fn mark(self) -> u16 {
        (self.0 >> 16) as u16
    }

    #[inline]
    fn with_mark(self, mark: u16) -> Self {
        Self(self.0 & !(0xffff << 16) | u64::from(mark) << 16)
    }
}

// SAFETY: a frame owns its bytes exclusively; they can change hands between threads.
unsafe impl Send for Frame {}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("base", &self.base)
            .field("start", &self.start())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Frame {
    /// A frame over `capacity` bytes from `base`, with an empty packet at their start.
    ///
    /// # Safety
    /// The bytes are initialized, stay mapped for as long as the process lives, and belong to nobody but this frame:
    /// no other frame covers them, and the kernel or a device writes to them only after the frame was taken apart with
    /// [`Frame::into_raw`].
    pub unsafe fn from_raw(base: NonNull<u8>, capacity: u16) -> Self {
        Self { base, place: Place::new(0, 0, capacity) }
    }

    /// Takes the frame apart: the bytes belong to the caller from now on.
    pub fn into_raw(self) -> NonNull<u8> {
        self.base
    }

    /// Where its bytes begin, for a device that knows them by address.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Where the packet begins, from [`Frame::base`].
    #[inline]
    pub fn start(&self) -> u16 {
        self.place.start()
    }

    /// Bytes of the packet.
    #[inline]
    pub fn len(&self) -> u16 {
        self.place.len()
    }

    /// Whether there is no packet in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The packet.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start + len <= capacity, and those bytes are initialized, mapped and ours (see `from_raw`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(self.start().into()), self.len().into()) }
    }

    /// The packet, to change it.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the exclusive borrow makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(self.start().into()), self.len().into()) }
    }

    /// Sixteen bits that the owner may use as it likes; they travel with the frame and are 0 after a [`Frame::reset`].
    #[inline]
    pub fn mark(&self) -> u16 {
        self.place.mark()
    }

    /// Sets them.
    #[inline]
    pub fn set_mark(&mut self, mark: u16) {
        self.place = self.place.with_mark(mark);
    }

    /// The bytes before the packet.
    pub fn headroom(&self) -> &[u8] {
        // SAFETY: start <= capacity, and those bytes are initialized, mapped and ours (see `from_raw`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.start().into()) }
    }

    /// The bytes before the packet, to change them.
    pub fn headroom_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `headroom`; the exclusive borrow makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.start().into()) }
    }

    /// Starts to fetch the packet's first cache line.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_read(self.bytes(), 0);
    }

    /// Starts to fetch the cache line before the packet, where headers grow.
    #[inline]
    pub fn prefetch_headroom(&self) {
        prefetch_read(self.bytes(), 0_usize.wrapping_sub(1));
    }

    /// Says where the packet is; false, and nothing changed, if that is outside of the frame.
    #[inline]
    pub fn place(&mut self, start: u16, len: u16) -> bool {
        let fits = u32::from(start) + u32::from(len) <= self.place.capacity().into();
        if fits {
            self.place = Place::new(start, len, self.place.capacity()).with_mark(self.place.mark());
        }
        fits
    }

    /// Makes the packet shorter or longer at its end; false, and nothing changed, if the frame has no room for it.
    #[inline]
    pub fn set_len(&mut self, len: u16) -> bool {
        self.place(self.start(), len)
    }

    /// Makes it an empty packet behind `headroom` bytes, or behind all bytes if there are less.
    #[inline]
    pub fn reset(&mut self, headroom: u16) {
        let capacity = self.place.capacity();
        self.place = Place::new(headroom.min(capacity), 0, capacity);
    }

    /// Moves the packet's bytes so that they begin at `start`; false, and nothing changed, if that is outside.
    pub fn move_to(&mut self, start: u16) -> bool {
        let (from, len) = (self.start(), self.len());
        let fits = self.place(start, len);
        if fits {
            // SAFETY: both ranges lie inside of the frame (`place` has checked the new one, the old one was there), whose
            // bytes are initialized and ours; `copy` allows them to overlap.
            unsafe {
                let base = self.base.as_ptr();
                std::ptr::copy(base.add(from.into()), base.add(start.into()), len.into());
            }
        }
        fits
    }

    /// Puts another packet in place of this one; false, and nothing changed, if it doesn't fit.
    pub fn replace(&mut self, packet: &[u8]) -> bool {
        self.replace_with(&[packet])
    }

    /// The same with a packet that stands in several places.
    pub fn replace_with(&mut self, parts: &[&[u8]]) -> bool {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        let fits = u16::try_from(len).is_ok_and(|len| self.set_len(len));
        if fits {
            let mut rest = self.bytes_mut();
            for part in parts {
                let (here, behind) = rest.split_at_mut(part.len());
                here.copy_from_slice(part);
                rest = behind;
            }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;

    #[test]
    fn a_packet_never_reaches_out_of_its_frame() {
        let mut frame = Arena::allocate(1, 2048).unwrap().frames().pop().unwrap();
        assert!(frame.is_empty());
        assert!(frame.place(256, 1792) && !frame.place(256, 1793) && !frame.place(u16::MAX, 1));
        assert_eq!((frame.start(), frame.len()), (256, 1792), "a refusal changes nothing");
        frame.reset(HEADROOM);
        assert!(frame.replace(b"abc") && !frame.replace(&[0; 1800]));
        assert_eq!(frame.bytes(), b"abc");
        frame.set_mark(0x8001);
        frame.headroom_mut()[255] = 9;
        assert_eq!((frame.headroom().len(), frame.bytes(), frame.mark()), (256, &b"abc"[..], 0x8001));
        assert!(frame.set_len(2));
        assert_eq!(frame.bytes_mut(), b"ab");
        assert!(frame.move_to(10) && frame.start() == 10 && !frame.move_to(2047));
        assert_eq!(frame.bytes(), b"ab");
        assert_eq!(frame.mark(), 0x8001);
        frame.reset(u16::MAX);
        assert_eq!(frame.mark(), 0);
        assert!(frame.is_empty() && !frame.replace(b"x"));
    }
}
