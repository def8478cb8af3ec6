//! UMEM shared by all sockets of all workers: forwarding and hand-off move descriptors, not bytes.

use std::io;
use std::num::NonZeroU32;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_mem::{Arena, Frame, HEADROOM, Pages};
use xsk_rs::config::{FrameSize, QueueSize, UmemConfig};
use xsk_rs::{FrameDesc, Umem};

use crate::steering::raw_os_error;

/// Size of a transmit and of a completion ring.
pub(crate) const RING_SIZE: u32 = 2048;
/// Default number of packets that a queue can receive while its worker isn't scheduled: 40 ms at 100 packets per
/// millisecond.
pub const DEFAULT_FILL_RING: u32 = 4096;
/// Valid fill ring sizes: powers of two.
pub const FILL_RING_SIZES: [u32; 10] = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768];

/// The UMEM and its pool of free frames.
#[derive(Debug)]
pub(crate) struct SharedUmem {
    pub(crate) umem: Umem,
    /// Address of the first frame.
    base: usize,
    /// Bytes of a frame, as a power of two.
    frame_bits: u32,
    /// Descriptor of each frame in memory order, with an empty packet after the headroom.
    descriptors: Box<[FrameDesc]>,
    /// Frames move between workers with their packets; the pool balances the workers' free frames.
    pub(crate) pool: ArrayQueue<Frame>,
    /// Frames outside of the UMEM for packets that exceed a frame, shared in the same way.
    /// `None`: the layout has none.
    pub(crate) jumbo_pool: Option<ArrayQueue<Frame>>,
    pub(crate) pages: Pages,
}

impl SharedUmem {
    /// Allocates `frames` frames, on huge pages if available, with fill rings of `fill_ring_size` entries; and
    /// `jumbo_frames` jumbo frames, if the layout has any.
    pub(crate) fn new(
        layout: FrameLayout,
        frames: u32,
        fill_ring_size: u32,
        jumbo_frames: usize,
    ) -> io::Result<Arc<Self>> {
        let frame_size = u32::from(layout.frame_size());
        // A mapping on huge pages must be a multiple of their size.
        let per_huge_page = (2 << 20) / frame_size;
        let frames = frames.next_multiple_of(per_huge_page);
        let count = NonZeroU32::new(frames).ok_or(io::ErrorKind::InvalidInput)?;
        let invalid_size = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
        let config = UmemConfig::builder()
            .frame_size(FrameSize::new(frame_size).map_err(|error| invalid_size(&error))?)
            .fill_queue_size(QueueSize::new(fill_ring_size).map_err(|error| invalid_size(&error))?)
            .comp_queue_size(QueueSize::new(RING_SIZE).map_err(|error| invalid_size(&error))?)
            .build()
            .map_err(|error| invalid_size(&error))?;
        let (pages, created) = match Umem::new(config, count, true) {
            Ok(created) => (Pages::Huge, Ok(created)),
            Err(_) => (Pages::Small, Umem::new(config, count, false)),
        };
        let (umem, descriptors) = created.map_err(|error| kernel_error(&error))?;
        // SAFETY: the descriptor belongs to this UMEM, and no frame is in use yet.
        let first = unsafe { umem.data(&descriptors[0]) }.contents().as_ptr();
        let base = first.expose_provenance() - descriptors[0].addr();
        let jumbo_pool = match layout.jumbo_frame_size() {
            Some(size) => {
                let mut arena = Arena::allocate(jumbo_frames, size).map_err(|error| error.source)?;
                let pool = ArrayQueue::new(jumbo_frames);
                fill_pool(&pool, arena.frames());
                Some(pool)
            }
            None => None,
        };
        let shared = Arc::new(Self {
            umem,
            base,
            frame_bits: frame_size.ilog2(),
            descriptors: descriptors.into(),
            pool: ArrayQueue::new(frames as usize),
            jumbo_pool,
            pages,
        });
        // Frames have no reference to the UMEM, so it must never be unmapped: this reference is leaked.
        std::mem::forget(shared.clone());
        // SAFETY: the region has the size of all frames, was mapped zeroed, is never unmapped (above), and is referred
        // to by these frames only: the kernel accesses only frames that were consumed by `into_raw` (see device.rs).
        let frames = unsafe { Arena::carve(shared.base_pointer()?, frames as usize, layout.frame_size()) };
        fill_pool(&shared.pool, frames);
        Ok(shared)
    }

    fn base_pointer(&self) -> io::Result<NonNull<u8>> {
        NonNull::new(ptr::with_exposed_provenance_mut(self.base)).ok_or(io::ErrorKind::AddrNotAvailable.into())
    }

    /// Number of frames, jumbo frames included.
    pub(crate) fn frames(&self) -> u64 {
        (self.descriptors.len() + self.jumbo_pool.as_ref().map_or(0, ArrayQueue::capacity)) as u64
    }

    /// Whether there are jumbo frames.
    pub(crate) fn has_jumbo_frames(&self) -> bool {
        self.jumbo_pool.is_some()
    }

    /// Bytes of a frame.
    #[inline]
    pub(crate) fn frame_size(&self) -> u16 {
        1 << self.frame_bits
    }

    /// Bytes of a packet that a frame holds: what follows the headroom.
    pub(crate) fn max_segment(&self) -> usize {
        (self.frame_size() - HEADROOM).into()
    }

    /// Whether a packet can be sent in its frame: one of the UMEM, with room for the headroom.
    #[inline]
    pub(crate) fn fits(&self, frame: &Frame) -> bool {
        frame.capacity() == self.frame_size() && frame.len() <= self.frame_size() - HEADROOM
    }

    /// Consumes a frame; returns its descriptor with an empty packet. `None`, and the frame is leaked, if it isn't of
    /// this UMEM.
    pub(crate) fn descriptor(&self, frame: Frame) -> Option<FrameDesc> {
        let offset = (frame.into_raw().as_ptr().addr()).checked_sub(self.base)?;
        self.descriptors.get(offset >> self.frame_bits).copied()
    }

    /// Consumes a frame; returns its descriptor with its packet.
    pub(crate) fn descriptor_with_packet(&self, mut frame: Frame) -> Option<FrameDesc> {
        if frame.start() != HEADROOM {
            frame.move_to(HEADROOM);
        }
        let length = frame.len();
        let mut descriptor = self.descriptor(frame)?;
        // SAFETY: the descriptor belongs to this UMEM, and its frame was consumed just now: there is no other
        // reference. Only the length in the descriptor is set; no byte is accessed.
        unsafe { self.umem.data_mut(&mut descriptor) }.cursor().set_pos(length.into());
        Some(descriptor)
    }

    /// The frame of a descriptor that the kernel has returned, with its packet.
    ///
    /// # Safety
    /// The kernel has returned the descriptor on a receive or completion ring, and no frame was made from it since.
    pub(crate) unsafe fn frame(&self, descriptor: &FrameDesc) -> Option<Frame> {
        let number = descriptor.addr() >> self.frame_bits;
        if number >= self.descriptors.len() {
            return None;
        }
        let base = NonNull::new(ptr::with_exposed_provenance_mut(self.base + (number << self.frame_bits)))?;
        // SAFETY: the frame is within the region, which is never unmapped; the caller guarantees that it has no owner.
        let mut frame = unsafe { Frame::from_raw(base, self.frame_size()) };
        let start = descriptor.addr() - (number << self.frame_bits);
        frame.set_packet(start as u16, descriptor.lengths().data() as u16);
        Some(frame)
    }
}

fn fill_pool(pool: &ArrayQueue<Frame>, frames: Vec<Frame>) {
    for frame in frames {
        let pushed = pool.push(frame);
        debug_assert!(pushed.is_ok(), "the pool has capacity for all frames");
    }
}

/// The kernel's error in an error of the library.
pub(crate) fn kernel_error(error: &(dyn std::error::Error + 'static)) -> io::Error {
    raw_os_error(error).map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}
