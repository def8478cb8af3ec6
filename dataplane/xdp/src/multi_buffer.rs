//! Packets in several frames of the UMEM (XDP multi-buffer), which the kernel calls fragments or segments.
//!
//! The engine sees each packet in one frame: a received one is copied to a jumbo frame, and a sent one to as many frames
//! as it needs. This costs two copies of packets that exceed a page, and keeps every stage, and the path of all other
//! packets, as they are.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};

use vipgate_mem::Frame;
use xsk_rs::FrameDesc;

use crate::frames::FreeFrames;

/// `XDP_PKT_CONTD` of linux/if_xdp.h: the packet continues in the next descriptor.
const CONTINUES: u32 = 1 << 0;

/// Received packets that were discarded here, by cause.
#[derive(Debug, Default)]
pub(crate) struct Discards {
    /// Longer than a jumbo frame.
    pub(crate) too_long: AtomicU64,
    /// All jumbo frames were in use.
    pub(crate) no_frame: AtomicU64,
}

/// The packet that a socket is receiving. The receive ring has an entry for each filled frame, so it is never full, and
/// the kernel never gives up a packet between two of its frames.
#[derive(Debug, Default)]
pub(crate) enum Reception {
    /// None: the next frame is the first of a packet.
    #[default]
    Idle,
    /// Its first frames, copied to a jumbo frame.
    Partial(Frame),
    /// None: the remaining frames of the packet are discarded.
    Discarding,
}

impl Reception {
    /// Adds a received frame; `continues` unless it is the last of its packet. Returns the packet when it is complete.
    #[inline]
    pub(crate) fn push(
        &mut self,
        frame: Frame,
        continues: bool,
        free: &mut FreeFrames,
        discards: &Discards,
    ) -> Option<Frame> {
        if !continues && matches!(self, Self::Idle) {
            return Some(frame);
        }
        self.append(frame, continues, free, discards)
    }

    #[cold]
    fn append(&mut self, frame: Frame, continues: bool, free: &mut FreeFrames, discards: &Discards) -> Option<Frame> {
        let packet = match mem::take(self) {
            Self::Idle => {
                let packet = free.allocate_jumbo();
                if packet.is_none() {
                    discards.no_frame.fetch_add(1, Ordering::Relaxed);
                }
                packet
            }
            Self::Partial(packet) => Some(packet),
            Self::Discarding => None,
        };
        let packet = packet.and_then(|mut packet| {
            if packet.append(frame.bytes()) {
                return Some(packet);
            }
            discards.too_long.fetch_add(1, Ordering::Relaxed);
            free.release(packet);
            None
        });
        free.release(frame);
        if !continues {
            return packet;
        }
        *self = packet.map_or(Self::Discarding, Self::Partial);
        None
    }

    /// Jumbo frames in use: 0 or 1.
    pub(crate) fn frames(&self) -> u64 {
        u64::from(matches!(self, Self::Partial(_)))
    }
}

/// Copies a packet to as many frames as it needs, at most `capacity`, and appends their descriptors to `descriptors`.
///
/// # Errors
/// Returns the frame if it needs more frames, or more than are free.
#[cold]
pub(crate) fn send(
    frame: Frame,
    capacity: usize,
    free: &mut FreeFrames,
    descriptors: &mut Vec<FrameDesc>,
) -> Result<(), Frame> {
    let umem = free.umem.clone();
    let segments = frame.bytes().chunks(umem.max_segment());
    let count = segments.len();
    if count > capacity {
        return Err(frame);
    }
    let Some(copies) = free.allocate_all(count) else { return Err(frame) };
    for ((segment, mut copy), number) in segments.zip(copies).zip(1..) {
        copy.replace(segment);
        if let Some(mut descriptor) = umem.descriptor_with_packet(copy) {
            descriptor.set_options(if number < count { CONTINUES } else { 0 });
            descriptors.push(descriptor);
        }
    }
    free.release(frame);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vipgate_dataplane::io::frame_layout::FrameLayout;

    use super::*;
    use crate::umem::SharedUmem;

    const JUMBO_FRAMES: usize = 2;
    /// Bytes of a packet that a page holds after the headroom.
    const SEGMENT: usize = 4096 - 256;
    const JUMBO_PACKET: usize = 10_240 - 256;

    fn free_frames() -> FreeFrames {
        let umem = SharedUmem::new(FrameLayout::MultiBuffer, 512, 64, JUMBO_FRAMES);
        FreeFrames::new(umem.expect("tests of AF_XDP run as root"))
    }

    fn packet(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 31 + length) as u8).collect()
    }

    /// Receives a packet in segments of these lengths at most; returns the packet.
    fn receive(
        packet: &[u8],
        segment: usize,
        reception: &mut Reception,
        free: &mut FreeFrames,
        discards: &Discards,
    ) -> Option<Frame> {
        let segments = packet.chunks(segment);
        let count = segments.len();
        let mut received = None;
        for (bytes, number) in segments.zip(1..) {
            assert!(received.is_none(), "a packet is complete with its last frame");
            let mut frame = free.allocate_for(bytes.len()).unwrap();
            assert!(frame.replace(bytes));
            received = reception.push(frame, number < count, free, discards);
        }
        received
    }

    /// Frames in descriptors, as the kernel returns them.
    fn sent(descriptors: &[FrameDesc], umem: &Arc<SharedUmem>) -> Vec<Frame> {
        // SAFETY: the descriptors are those of frames that were consumed, and each is used once.
        descriptors.iter().map(|descriptor| unsafe { umem.frame(descriptor) }.unwrap()).collect()
    }

    fn release(frames: impl IntoIterator<Item = Frame>, free: &mut FreeFrames) {
        for frame in frames {
            free.release(frame);
        }
    }

    #[test]
    fn a_packet_of_any_length_is_received_and_sent_unchanged() {
        let (mut free, discards, mut reception) = (free_frames(), Discards::default(), Reception::default());
        let total = free.umem.frames() as usize;
        let lengths = [1, 60, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 1, 9014, JUMBO_PACKET];
        for (length, segment) in
            lengths.into_iter().flat_map(|length| [40, 1500, SEGMENT].map(|segment| (length, segment)))
        {
            let packet = packet(length);
            let frame = receive(&packet, segment, &mut reception, &mut free, &discards).unwrap();
            assert_eq!((frame.bytes(), reception.frames()), (&packet[..], 0));
            let mut descriptors = Vec::new();
            send(frame, 64, &mut free, &mut descriptors).unwrap();
            assert_eq!(descriptors.len(), length.div_ceil(SEGMENT));
            let continues: Vec<_> = descriptors.iter().map(FrameDesc::has_more_frames).collect();
            assert!(continues.iter().rev().skip(1).all(|&it| it) && continues.last() == Some(&false), "{continues:?}");
            let frames = sent(&descriptors, &free.umem);
            let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.bytes().to_vec()).collect();
            assert_eq!(bytes, packet);
            release(frames, &mut free);
            assert_eq!(
                free.count() + free.umem.pool.len() + free.umem.jumbo_pool.as_ref().unwrap().len(),
                total,
                "no frame is lost"
            );
        }
    }

    #[test]
    fn a_packet_that_exceeds_a_jumbo_frame_is_discarded_and_the_next_one_is_received() {
        let (mut free, discards, mut reception) = (free_frames(), Discards::default(), Reception::default());
        for length in [JUMBO_PACKET + 1, 65_536] {
            let too_long = receive(&packet(length), SEGMENT, &mut reception, &mut free, &discards);
            assert!(too_long.is_none() && matches!(reception, Reception::Idle));
        }
        assert_eq!(discards.too_long.load(Ordering::Relaxed), 2);
        assert_eq!(discards.no_frame.load(Ordering::Relaxed), 0);
        let next = receive(&packet(60), SEGMENT, &mut reception, &mut free, &discards).unwrap();
        assert_eq!(next.bytes(), packet(60));
        free.release(next);
    }

    #[test]
    fn without_a_free_jumbo_frame_a_packet_is_discarded_and_short_ones_pass() {
        let (mut free, discards, mut reception) = (free_frames(), Discards::default(), Reception::default());
        let held: Vec<_> = std::iter::from_fn(|| free.allocate_jumbo()).collect();
        assert_eq!(held.len(), JUMBO_FRAMES);
        assert!(receive(&packet(9014), SEGMENT, &mut reception, &mut free, &discards).is_none());
        assert_eq!(discards.no_frame.load(Ordering::Relaxed), 1);
        let short = receive(&packet(SEGMENT), SEGMENT, &mut reception, &mut free, &discards).unwrap();
        free.release(short);
        release(held, &mut free);
        let long = receive(&packet(9014), SEGMENT, &mut reception, &mut free, &discards).unwrap();
        free.release(long);
    }

    #[test]
    fn a_packet_is_not_sent_in_parts() {
        let mut free = free_frames();
        let jumbo = |free: &mut FreeFrames| {
            let mut frame = free.allocate_jumbo().unwrap();
            assert!(frame.replace(&packet(9014)));
            frame
        };
        let (mut descriptors, frame) = (Vec::new(), jumbo(&mut free));
        let frame = send(frame, 2, &mut free, &mut descriptors).unwrap_err();
        let held: Vec<_> = std::iter::from_fn(|| free.allocate()).collect();
        assert!(held.len() == 512 && descriptors.is_empty());
        let mut held = held.into_iter();
        release(held.by_ref().take(2), &mut free);
        let frame = send(frame, 3, &mut free, &mut descriptors).unwrap_err();
        assert!(descriptors.is_empty());
        release(held, &mut free);
        send(frame, 3, &mut free, &mut descriptors).unwrap();
        assert_eq!(descriptors.len(), 3);
        let frames = sent(&descriptors, &free.umem);
        release(frames, &mut free);
    }
}
