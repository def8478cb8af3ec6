//! Statistics of AF_XDP sockets and of the frame pool, for other threads.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam::queue::ArrayQueue;

use crate::multi_buffer::Discards;
use crate::umem::SharedUmem;

/// Counters of packet loss at sockets: the kernel's (`XDP_STATISTICS`), and the worker's where it says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Packets lost because the receive ring was full.
    pub receive_ring_full: u64,
    /// Packets lost because the fill ring was empty. With zero copy, drivers count refills for which they got no frame
    /// here, not packets.
    pub fill_ring_empty: u64,
    /// Packets dropped for lack of a frame, which are also counted as `fill_ring_empty`, or because they exceed a
    /// frame.
    pub dropped: u64,
    /// Packets discarded by the worker: longer than a jumbo frame.
    pub too_long: u64,
    /// Packets discarded by the worker: all jumbo frames were in use.
    pub no_jumbo_frame: u64,
    /// Descriptors rejected by the kernel: always 0, unless there is a bug.
    pub invalid: u64,
}

/// The pools of free frames shared by all workers.
#[derive(Clone, Debug)]
pub struct FramePool(pub(crate) Arc<SharedUmem>);

impl FramePool {
    /// Frames in the pools.
    pub fn free(&self) -> u64 {
        (self.0.pool.len() + self.0.jumbo_pool.as_ref().map_or(0, ArrayQueue::len)) as u64
    }

    /// All frames, jumbo frames included.
    pub fn total(&self) -> u64 {
        self.0.frames()
    }

    /// Whether packets that exceed a frame are received, in jumbo frames.
    pub fn has_jumbo_frames(&self) -> bool {
        self.0.has_jumbo_frames()
    }

    /// Page type of the UMEM: `huge` or `small`.
    pub fn pages(&self) -> &'static str {
        self.0.pages.name()
    }
}

/// Reads the statistics of one worker's sockets. Valid as long as the device exists.
#[derive(Clone, Debug)]
pub struct SocketStats {
    sockets: Vec<i32>,
    discards: Arc<Discards>,
    /// Refills without a frame that aren't losses.
    setup_refills: u64,
}

impl SocketStats {
    pub(crate) fn new(sockets: Vec<i32>, discards: Arc<Discards>) -> Self {
        Self { sockets, discards, setup_refills: 0 }
    }

    /// Excludes the refills without a frame so far of sockets with zero copy, when the program is attached: they lost
    /// no packet. A driver refills its queue when a socket is bound, before the fill ring can have frames, since libxdp
    /// creates it in the same call; and virtio_net also refills, and counts, full queues when a program is attached.
    pub fn exclude_setup(&mut self) {
        let zero_copy = self.sockets.iter().copied().filter(|socket| is_zero_copy(*socket)).collect();
        self.setup_refills = Self::new(zero_copy, Arc::default()).read().fill_ring_empty;
    }

    /// Sums of all sockets.
    pub fn read(&self) -> RingStats {
        let mut sum = RingStats {
            too_long: self.discards.too_long.load(Ordering::Relaxed),
            no_jumbo_frame: self.discards.no_frame.load(Ordering::Relaxed),
            ..RingStats::default()
        };
        for &socket in &self.sockets {
            // SAFETY: the struct consists of integers, for which all zeros are valid.
            let mut statistics: libxdp_sys::xdp_statistics = unsafe { mem::zeroed() };
            let mut length = size_of::<libxdp_sys::xdp_statistics>() as libc::socklen_t;
            // SAFETY: the kernel writes at most `length` bytes, the size of `statistics`.
            let result = unsafe {
                libc::getsockopt(
                    socket,
                    libc::SOL_XDP,
                    libxdp_sys::XDP_STATISTICS.cast_signed(),
                    (&raw mut statistics).cast(),
                    &raw mut length,
                )
            };
            if result == 0 {
                sum.receive_ring_full += statistics.rx_ring_full;
                sum.fill_ring_empty += statistics.rx_fill_ring_empty_descs;
                sum.dropped += statistics.rx_dropped;
                sum.invalid += statistics.rx_invalid_descs + statistics.tx_invalid_descs;
            }
        }
        sum.fill_ring_empty = sum.fill_ring_empty.saturating_sub(self.setup_refills);
        sum
    }
}

/// Whether a socket uses zero copy.
pub(crate) fn is_zero_copy(socket: i32) -> bool {
    let mut options = 0_u32;
    let mut length = 4;
    // SAFETY: the kernel writes at most `length` bytes to `options` (struct xdp_options is one u32).
    let result = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_XDP,
            libxdp_sys::XDP_OPTIONS.cast_signed(),
            (&raw mut options).cast(),
            &raw mut length,
        )
    };
    result == 0 && options & libxdp_sys::XDP_OPTIONS_ZEROCOPY != 0
}
