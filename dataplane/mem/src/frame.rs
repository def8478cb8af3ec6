//! Packet buffers as owned tokens: the owner of a [`Frame`] has exclusive access to its bytes.

use std::fmt;
use std::ptr::NonNull;

use crate::prefetch_read;

/// Headroom before a packet: as much as the kernel reserves for XDP (`XDP_PACKET_HEADROOM`), for added headers.
pub const HEADROOM: u16 = 256;
/// Bytes of a frame, unless an MTU needs more. 2 KiB instead of a page: the headers of page-sized frames would share one set of the L1 cache.
pub const FRAME_SIZE: u16 = 2048;

/// An owned packet buffer. Moved, never copied, and returned to a device after use; a dropped frame is leaked, which
/// frame audits detect.
///
/// Its memory is never unmapped, so a frame needs no reference to its arena.
#[must_use = "a dropped frame is leaked: return it to its device"]
pub struct Frame {
    base: NonNull<u8>,
    packet: PacketBounds,
}

/// Offset and length of the packet, capacity of the frame, and mark, packed in one word: a frame of two words is moved
/// in registers, one of four fields on the stack.
#[derive(Clone, Copy)]
struct PacketBounds(u64);

impl PacketBounds {
    #[inline]
    fn new(start: u16, len: u16, capacity: u16) -> Self {
        Self(u64::from(start) | u64::from(len) << 32 | u64::from(capacity) << 48)
    }

    /// Offset of the packet from the frame's base.
    #[inline]
    fn start(self) -> u16 {
        self.0 as u16
    }

    /// Length of the packet.
    #[inline]
    fn len(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Size of the frame. Invariant: start + len <= capacity.
    #[inline]
    fn capacity(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The owner's mark; in the lower half of the word, where a bit is tested with one instruction.
    #[inline]
    fn mark(self) -> u16 {
        (self.0 >> 16) as u16
    }

    #[inline]
    fn with_mark(self, mark: u16) -> Self {
        Self(self.0 & !(0xffff << 16) | u64::from(mark) << 16)
    }
}

// SAFETY: a frame owns its bytes exclusively and has no thread affinity.
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
    /// A frame of `capacity` bytes at `base`, with an empty packet at offset 0.
    ///
    /// # Safety
    /// The bytes are initialized, stay mapped for the lifetime of the process, and are owned by this frame alone: no
    /// other frame covers them, and the kernel or a device writes to them only after [`Frame::into_raw`].
    pub unsafe fn from_raw(base: NonNull<u8>, capacity: u16) -> Self {
        Self { base, packet: PacketBounds::new(0, 0, capacity) }
    }

    /// Consumes the frame: ownership of the bytes passes to the caller.
    pub fn into_raw(self) -> NonNull<u8> {
        self.base
    }

    /// Address of the first byte of the frame.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Offset of the packet from [`Frame::base`].
    #[inline]
    pub fn start(&self) -> u16 {
        self.packet.start()
    }

    /// Length of the packet.
    #[inline]
    pub fn len(&self) -> u16 {
        self.packet.len()
    }

    /// Size of the frame.
    #[inline]
    pub fn capacity(&self) -> u16 {
        self.packet.capacity()
    }

    /// Whether the packet is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The packet.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start + len <= capacity, and those bytes are initialized, mapped and owned (see `from_raw`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(self.start().into()), self.len().into()) }
    }

    /// The packet, mutable.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the exclusive borrow makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(self.start().into()), self.len().into()) }
    }

    /// Sixteen bits of metadata for the owner, stored in the frame; 0 after [`Frame::reset`].
    #[inline]
    pub fn mark(&self) -> u16 {
        self.packet.mark()
    }

    #[inline]
    pub fn set_mark(&mut self, mark: u16) {
        self.packet = self.packet.with_mark(mark);
    }

    /// The bytes before the packet.
    pub fn headroom(&self) -> &[u8] {
        // SAFETY: start <= capacity, and those bytes are initialized, mapped and owned (see `from_raw`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.start().into()) }
    }

    /// The bytes before the packet, mutable.
    pub fn headroom_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `headroom`; the exclusive borrow makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.start().into()) }
    }

    /// Prefetches the packet's first cache line.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_read(self.bytes(), 0);
    }

    /// Prefetches the cache line before the packet, where headers are added.
    #[inline]
    pub fn prefetch_headroom(&self) {
        prefetch_read(self.bytes(), 0_usize.wrapping_sub(1));
    }

    /// Sets offset and length of the packet. Returns false, without a change, if they exceed the frame.
    #[inline]
    pub fn set_packet(&mut self, start: u16, len: u16) -> bool {
        let fits = u32::from(start) + u32::from(len) <= self.packet.capacity().into();
        if fits {
            self.packet = PacketBounds::new(start, len, self.packet.capacity()).with_mark(self.packet.mark());
        }
        fits
    }

    /// Sets the length of the packet. Returns false, without a change, if it exceeds the frame.
    #[inline]
    pub fn set_len(&mut self, len: u16) -> bool {
        self.set_packet(self.start(), len)
    }

    /// Sets an empty packet after `headroom` bytes (at most the frame's size), and clears the mark.
    #[inline]
    pub fn reset(&mut self, headroom: u16) {
        let capacity = self.packet.capacity();
        self.packet = PacketBounds::new(headroom.min(capacity), 0, capacity);
    }

    /// Moves the packet's bytes to offset `start`. Returns false, without a change, if they exceed the frame there.
    pub fn move_to(&mut self, start: u16) -> bool {
        let (old_start, len) = (self.start(), self.len());
        let fits = self.set_packet(start, len);
        if fits {
            // SAFETY: both ranges are within the frame (the new one was checked by `set_packet`, the old one was
            // valid), whose bytes are initialized and owned; `copy` allows overlap.
            unsafe {
                let base = self.base.as_ptr();
                std::ptr::copy(base.add(old_start.into()), base.add(start.into()), len.into());
            }
        }
        fits
    }

    /// Appends bytes to the packet. Returns false, without a change, if they exceed the frame.
    pub fn append(&mut self, bytes: &[u8]) -> bool {
        let len = usize::from(self.len());
        let fits = u16::try_from(len + bytes.len()).is_ok_and(|len| self.set_len(len));
        if fits {
            self.bytes_mut()[len..].copy_from_slice(bytes);
        }
        fits
    }

    /// Replaces the packet's bytes. Returns false, without a change, if they exceed the frame.
    pub fn replace(&mut self, packet: &[u8]) -> bool {
        self.replace_with(&[packet])
    }

    /// Replaces the packet's bytes by several concatenated slices.
    pub fn replace_with(&mut self, parts: &[&[u8]]) -> bool {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        let fits = u16::try_from(len).is_ok_and(|len| self.set_len(len));
        if fits {
            let mut remaining = self.bytes_mut();
            for part in parts {
                let (target, tail) = remaining.split_at_mut(part.len());
                target.copy_from_slice(part);
                remaining = tail;
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
    fn a_packet_never_exceeds_its_frame() {
        let mut frame = Arena::allocate(1, 2048).unwrap().frames().pop().unwrap();
        assert!(frame.is_empty());
        assert!(frame.set_packet(256, 1792) && !frame.set_packet(256, 1793) && !frame.set_packet(u16::MAX, 1));
        assert_eq!((frame.start(), frame.len()), (256, 1792), "unchanged after an error");
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
        assert!(frame.append(b"cde") && !frame.append(&[0; 2048 - 14]) && !frame.append(&vec![0; 1 << 16]));
        assert_eq!((frame.bytes(), frame.capacity()), (&b"abcde"[..], 2048));
        frame.reset(u16::MAX);
        assert_eq!(frame.mark(), 0);
        assert!(frame.is_empty() && !frame.replace(b"x"));
    }
}
