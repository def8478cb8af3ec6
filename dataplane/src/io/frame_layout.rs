//! Layout of a gateway's packet buffers, by the largest MTU of its interfaces.

use vipgate_mem::{FRAME_SIZE, HEADROOM};

use crate::wire::ethernet;

/// Bytes of a memory page, the longest frame of AF_XDP.
const PAGE_SIZE: u16 = 4096;
/// Bytes of a frame for a packet that the device receives in several frames: more than the largest MTU of most NICs.
const JUMBO_FRAME_SIZE: u16 = 10_240;
/// The largest MTU for which drivers receive each packet in one page, of which they need a part. A little less than that
/// of ena, 3498, since virtio_net loses packets of such an MTU that it accepts.
const MAX_PAGE_MTU: u16 = 3450;

/// Packet buffers of a gateway. All interfaces share them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrameLayout {
    /// Each packet is in a frame of 2 KiB.
    #[default]
    Standard,
    /// Each packet is in a frame of a page.
    Page,
    /// A packet that exceeds a page is received and sent in several frames (XDP multi-buffer), and copied to one jumbo
    /// frame in between.
    MultiBuffer,
}

impl FrameLayout {
    /// The layout for interfaces with at most this MTU.
    pub const fn for_mtu(mtu: u16) -> Self {
        if mtu <= Self::Standard.max_mtu() {
            Self::Standard
        } else if mtu <= MAX_PAGE_MTU {
            Self::Page
        } else {
            Self::MultiBuffer
        }
    }

    /// Bytes of a frame that is shared with the kernel.
    pub const fn frame_size(self) -> u16 {
        match self {
            Self::Standard => FRAME_SIZE,
            Self::Page | Self::MultiBuffer => PAGE_SIZE,
        }
    }

    /// Bytes of a jumbo frame, if there are any.
    pub const fn jumbo_frame_size(self) -> Option<u16> {
        match self {
            Self::Standard | Self::Page => None,
            Self::MultiBuffer => Some(JUMBO_FRAME_SIZE),
        }
    }

    /// Bytes of the frame that the engine has the longest packet in.
    pub const fn largest_frame_size(self) -> u16 {
        match self.jumbo_frame_size() {
            Some(size) => size,
            None => self.frame_size(),
        }
    }

    /// The longest IP packet, bytes; the kernel or the device drops longer ones. Packets sent are no longer either, so
    /// all gateways and tunnels agree on the MTU.
    pub const fn max_mtu(self) -> u16 {
        match self {
            Self::Standard => FRAME_SIZE - HEADROOM - ethernet::HEADER as u16,
            Self::Page => MAX_PAGE_MTU,
            Self::MultiBuffer => JUMBO_FRAME_SIZE - HEADROOM - ethernet::HEADER as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layout_holds_the_packets_of_its_mtus() {
        use FrameLayout::{MultiBuffer, Page, Standard};
        let layouts = [Standard, Page, MultiBuffer];
        assert_eq!(layouts.map(FrameLayout::max_mtu), [1778, 3450, 9970]);
        for layout in layouts {
            assert_eq!(FrameLayout::for_mtu(layout.max_mtu()), layout);
            assert!(HEADROOM + ethernet::HEADER as u16 + layout.max_mtu() <= layout.largest_frame_size());
        }
        let of = [0, 1500, 1779, 3451, 9000, u16::MAX].map(FrameLayout::for_mtu);
        assert_eq!(of, [Standard, Standard, Page, MultiBuffer, MultiBuffer, MultiBuffer]);
    }
}
