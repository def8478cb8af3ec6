//! The memory that all sockets of all workers share: forwarding and hand-off move a descriptor, never bytes.

use std::io;
use std::num::NonZeroU32;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use vipgate_mem::{Arena, Frame, HEADROOM, Pages};
use xsk_rs::config::{FrameSize, QueueSize, UmemConfig};
use xsk_rs::{FrameDesc, Umem};

/// Bytes of a frame.
pub(crate) const FRAME: u32 = vipgate_mem::FRAME as u32;
/// Descriptors of a transmit and of a completion ring.
pub(crate) const RING: u32 = 2048;
/// Frames that a queue can receive into while its worker is off its core, unless the configuration says otherwise: at 100 packets
/// a millisecond, 40 ms.
pub const DEFAULT_FILL_RING: u32 = 4096;
/// What can be configured: rings have powers of two.
pub const FILL_RINGS: [u32; 10] = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768];

/// The memory, and the frames of it that no worker has.
#[derive(Debug)]
pub(crate) struct SharedUmem {
    pub(crate) umem: Umem,
    /// Address of the first frame.
    base: usize,
    /// Descriptor of each frame, as it lies in memory, with an empty packet behind the headroom.
    descriptors: Box<[FrameDesc]>,
    /// Frames go where packets go, from worker to worker; here those who have too many leave some for those who lack.
    pub(crate) pool: ArrayQueue<Frame>,
    pub(crate) pages: Pages,
}

impl SharedUmem {
    /// Memory for `frames` frames, on huge pages if there are any, with fill rings of `fill_places` descriptors.
    pub(crate) fn new(frames: u32, fill_places: u32) -> io::Result<Arc<Self>> {
        // A mapping on huge pages must be made of whole ones.
        let per_huge_page = (2 << 20) / FRAME;
        let frames = frames.next_multiple_of(per_huge_page);
        let count = NonZeroU32::new(frames).ok_or(io::ErrorKind::InvalidInput)?;
        let sizes = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
        let config = UmemConfig::builder()
            .frame_size(FrameSize::new(FRAME).map_err(|error| sizes(&error))?)
            .fill_queue_size(QueueSize::new(fill_places).map_err(|error| sizes(&error))?)
            .comp_queue_size(QueueSize::new(RING).map_err(|error| sizes(&error))?)
            .build()
            .map_err(|error| sizes(&error))?;
        let (pages, created) = match Umem::new(config, count, true) {
            Ok(created) => (Pages::Huge, Ok(created)),
            Err(_) => (Pages::Small, Umem::new(config, count, false)),
        };
        let (umem, descriptors) = created.map_err(|error| crate::open::cause(&error))?;
        // SAFETY: the descriptor is one of this UMEM's, and nobody uses any frame yet.
        let first = unsafe { umem.data(&descriptors[0]) }.contents().as_ptr();
        let base = first.expose_provenance() - descriptors[0].addr();
        let pool = ArrayQueue::new(frames as usize);
        let shared = Arc::new(Self { umem, base, descriptors: descriptors.into(), pool, pages });
        // Frames know no owner, so their memory must never go: this reference is never given back.
        std::mem::forget(shared.clone());
        // SAFETY: the region has room for that many frames, was mapped zeroed, is never unmapped (above), and nobody but
        // these frames refers to it: the kernel does only for frames that were taken apart (see device.rs).
        for frame in unsafe { Arena::carve(shared.base_pointer()?, frames as usize, FRAME as u16) } {
            let overflow = shared.pool.push(frame);
            debug_assert!(overflow.is_ok(), "the pool has room for all frames");
        }
        Ok(shared)
    }

    fn base_pointer(&self) -> io::Result<NonNull<u8>> {
        NonNull::new(ptr::with_exposed_provenance_mut(self.base)).ok_or(io::ErrorKind::AddrNotAvailable.into())
    }

    /// Frames in all.
    pub(crate) fn frames(&self) -> u64 {
        self.descriptors.len() as u64
    }

    /// The descriptor of a frame with an empty packet, and the end of the frame's life as a token. `None`, and the frame
    /// is lost, if it isn't of this memory, which no device hands out.
    pub(crate) fn descriptor(&self, frame: Frame) -> Option<FrameDesc> {
        let offset = (frame.into_raw().as_ptr().addr()).checked_sub(self.base)?;
        self.descriptors.get(offset / FRAME as usize).copied()
    }

    /// The descriptor of a frame with its packet in it.
    pub(crate) fn descriptor_with_packet(&self, mut frame: Frame) -> Option<FrameDesc> {
        if frame.start() != HEADROOM {
            frame.move_to(HEADROOM);
        }
        let length = frame.len();
        let mut descriptor = self.descriptor(frame)?;
        // SAFETY: the descriptor is one of this UMEM's, and its frame was taken apart just now: nobody else uses it. Only
        // the length in the descriptor is set; no byte is touched.
        unsafe { self.umem.data_mut(&mut descriptor) }.cursor().set_pos(length.into());
        Some(descriptor)
    }

    /// The frame that the kernel gave back with this descriptor, with the packet that it describes.
    ///
    /// # Safety
    /// The kernel has given the descriptor back on a receive or completion ring, and nobody has made a frame of it since.
    pub(crate) unsafe fn frame(&self, descriptor: &FrameDesc) -> Option<Frame> {
        let number = descriptor.addr() / FRAME as usize;
        if number >= self.descriptors.len() {
            return None;
        }
        let base = NonNull::new(ptr::with_exposed_provenance_mut(self.base + number * FRAME as usize))?;
        // SAFETY: the frame lies inside of the region, which stays mapped; by the caller's promise it is nobody's.
        let mut frame = unsafe { Frame::from_raw(base, FRAME as u16) };
        let start = descriptor.addr() % FRAME as usize;
        frame.place(start as u16, descriptor.lengths().data() as u16);
        Some(frame)
    }
}
