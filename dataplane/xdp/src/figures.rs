//! What the device counts and holds, for other threads to read.

use std::mem;
use std::sync::Arc;

use crate::umem::SharedUmem;

/// What the kernel counts for sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingLosses {
    /// Received, but the ring was full.
    pub receive_ring_full: u64,
    /// Received, but the fill ring had no frame for it. With zero copy a driver counts its vain attempts to refill here, not packets.
    pub fill_ring_empty: u64,
    /// Received, but dropped: for want of a frame, which is counted above, too, or because a frame is too short for it.
    pub dropped: u64,
    /// Descriptors that the kernel refused: none, unless there is a bug.
    pub invalid: u64,
}

/// The frames that no worker has.
#[derive(Clone, Debug)]
pub struct Pool(pub(crate) Arc<SharedUmem>);

impl Pool {
    /// Frames in it now.
    pub fn free(&self) -> u64 {
        self.0.pool.len() as u64
    }

    /// Frames that there are in all.
    pub fn total(&self) -> u64 {
        self.0.frames()
    }

    /// What kind of pages they lie on: `huge` or `small`.
    pub fn pages(&self) -> &'static str {
        self.0.pages.name()
    }
}

/// What the kernel counts for one worker's sockets. Valid as long as the device is.
#[derive(Clone, Debug)]
pub struct Losses {
    pub(crate) sockets: Vec<i32>,
}

impl Losses {
    /// The sums now.
    pub fn read(&self) -> RingLosses {
        let mut sum = RingLosses::default();
        for &socket in &self.sockets {
            // SAFETY: all-zero bytes are a valid record of numbers.
            let mut statistics: libxdp_sys::xdp_statistics = unsafe { mem::zeroed() };
            let mut length = size_of::<libxdp_sys::xdp_statistics>() as libc::socklen_t;
            // SAFETY: the kernel writes at most `length` bytes into `statistics`, which has that many.
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
        sum
    }
}
