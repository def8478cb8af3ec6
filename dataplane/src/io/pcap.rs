//! Pcap device: replays captures as received packets and records sent packets as a capture, so that a packet captured
//! in production can be run through the engine on any machine.
//!
//! Reads and writes bytes, not files, in the classic libpcap format, in both byte orders, with micro- or nanoseconds
//! (draft-ietf-opsawg-pcap).

use std::cmp::Reverse;
use std::time::Duration;

use thiserror::Error;
use vipgate_mem::{Frame, MemoryError};

use super::memory::MemoryIo;
use super::{FrameAudit, PacketIo, Received};
use crate::flow::ids::InterfaceId;

const MICROSECONDS: u32 = 0xa1b2_c3d4;
const NANOSECONDS: u32 = 0xa1b2_3c4d;
const ETHERNET: u32 = 1;
const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;

/// Errors of reading a capture.
#[derive(Debug, Error)]
pub enum PcapError {
    /// Not a pcap file.
    #[error("not a pcap file: magic number {magic:#010x} (pcapng is not supported; editcap -F pcap converts it)")]
    NotPcap {
        /// Its first four bytes.
        magic: u32,
    },
    /// Not captured on Ethernet.
    #[error("captured on link type {link_type}; only Ethernet (1) can be replayed")]
    NotEthernet { link_type: u32 },
    /// Truncated within a packet.
    #[error("truncated in packet {packet}")]
    Truncated {
        /// Number of the packet, from 1.
        packet: usize,
    },
    /// Frames could not be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A captured packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Time of capture, since the epoch.
    pub at: Duration,
    /// The captured bytes.
    pub bytes: Vec<u8>,
}

/// Reads a capture.
///
/// # Errors
/// When it is not a capture or is damaged.
pub fn read(file: &[u8]) -> Result<Vec<Packet>, PcapError> {
    let word = |bytes: &[u8]| bytes.first_chunk().map(|word| u32::from_le_bytes(*word));
    let magic = word(file).unwrap_or_default();
    let swap = matches!(magic.swap_bytes(), MICROSECONDS | NANOSECONDS);
    let number = |at: usize| {
        let word = word(file.get(at..)?)?;
        Some(if swap { word.swap_bytes() } else { word })
    };
    let unit = match number(0) {
        Some(MICROSECONDS) => 1_000,
        Some(NANOSECONDS) => 1,
        _ => return Err(PcapError::NotPcap { magic }),
    };
    match number(20) {
        Some(ETHERNET) => {}
        link_type => return Err(PcapError::NotEthernet { link_type: link_type.unwrap_or_default() }),
    }
    let mut packets = Vec::new();
    let mut at = FILE_HEADER;
    while at < file.len() {
        let truncated = || PcapError::Truncated { packet: packets.len() + 1 };
        let field = |n: usize| number(at + n * 4).ok_or_else(truncated);
        let time = Duration::new(field(0)?.into(), 0) + Duration::from_nanos(u64::from(field(1)?) * unit);
        let start = at + RECORD_HEADER;
        let end = start.checked_add(field(2)? as usize).ok_or_else(truncated)?;
        let bytes = file.get(start..end).ok_or_else(truncated)?.to_vec();
        packets.push(Packet { at: time, bytes });
        at = end;
    }
    Ok(packets)
}

/// Writes a capture with nanosecond timestamps.
pub fn write<'a>(packets: impl IntoIterator<Item = &'a Packet>) -> Vec<u8> {
    let mut file = Vec::new();
    let header = [NANOSECONDS, 4 << 16 | 2, 0, 0, u32::from(u16::MAX), ETHERNET];
    file.extend(header.iter().flat_map(|word| word.to_le_bytes()));
    for packet in packets {
        let length = packet.bytes.len() as u32;
        let header = [packet.at.as_secs() as u32, packet.at.subsec_nanos(), length, length];
        file.extend(header.iter().flat_map(|word| word.to_le_bytes()));
        file.extend(&packet.bytes);
    }
    file
}

/// A device that replays captures, one per interface, in the order of their timestamps.
#[derive(Debug)]
pub struct PcapIo {
    memory: MemoryIo,
    /// Packets not received yet, latest first.
    pending: Vec<(InterfaceId, Packet)>,
    now: Duration,
    sent: Vec<(InterfaceId, Packet)>,
}

impl PcapIo {
    /// A device with this many frames that replays these captures.
    ///
    /// # Errors
    /// When a capture can't be read, or there is no memory for the frames.
    pub fn new(frames: usize, captures: &[(InterfaceId, &[u8])]) -> Result<Self, PcapError> {
        let mut pending = Vec::new();
        for &(interface, file) in captures {
            pending.extend(read(file)?.into_iter().map(|packet| (interface, packet)));
        }
        pending.sort_by_key(|(_, packet)| Reverse(packet.at));
        Ok(Self { memory: MemoryIo::new(frames)?, pending, now: Duration::ZERO, sent: Vec::new() })
    }

    /// When the next packet is received; `None` after the last one.
    pub fn next_at(&self) -> Option<Duration> {
        self.pending.last().map(|(_, packet)| packet.at)
    }

    /// Advances the time: packets captured until `now` are received. Packets that find no free frame, or are longer
    /// than one, are lost, as on a NIC.
    pub fn advance(&mut self, now: Duration) {
        self.now = now;
        while self.next_at().is_some_and(|at| at <= now) {
            let Some((interface, packet)) = self.pending.pop() else { return };
            self.memory.inject(interface, &packet.bytes);
        }
    }

    /// A capture of what was sent on an interface.
    pub fn capture(&mut self, interface: InterfaceId) -> Vec<u8> {
        self.collect();
        write(self.sent.iter().filter(|(on, _)| *on == interface).map(|(_, packet)| packet))
    }

    fn collect(&mut self) {
        while let Some((interface, bytes)) = self.memory.pop_sent() {
            self.sent.push((interface, Packet { at: self.now, bytes }));
        }
    }
}

impl PacketIo for PcapIo {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        self.memory.rx(into, limit)
    }

    fn tx(&mut self, interface: InterfaceId, frame: Frame) -> Result<(), Frame> {
        self.memory.tx(interface, frame)
    }

    fn allocate(&mut self, length: usize) -> Option<Frame> {
        self.memory.allocate(length)
    }

    fn release(&mut self, frame: Frame) {
        self.memory.release(frame);
    }

    fn flush(&mut self) {
        self.collect();
    }

    fn wait(&mut self, timeout: Duration) {
        self.memory.wait(timeout);
    }

    fn audit(&self) -> FrameAudit {
        self.memory.audit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(ms: u64, byte: u8) -> Packet {
        Packet { at: Duration::from_millis(ms), bytes: vec![byte; 20] }
    }

    #[test]
    fn a_written_capture_can_be_read() {
        let packets = [packet(1, 1), packet(2_500, 2)];
        assert_eq!(read(&write(&packets)).unwrap(), packets);
    }

    #[test]
    fn both_byte_orders_and_microseconds_are_read() {
        let header: [u32; 6] = [MICROSECONDS, 2 << 16 | 4, 0, 0, 65_535, 1];
        let record: [u32; 4] = [3, 250_000, 2, 2];
        let words = header.iter().chain(&record);
        let mut file: Vec<u8> = words.flat_map(|word| word.to_be_bytes()).collect();
        file.extend([7, 8]);
        assert_eq!(read(&file).unwrap(), [Packet { at: Duration::from_millis(3_250), bytes: vec![7, 8] }]);
        file.pop();
        assert!(matches!(read(&file), Err(PcapError::Truncated { packet: 1 })));
        assert!(matches!(read(b"\x0a\x0d\x0d\x0a...."), Err(PcapError::NotPcap { .. })));
        file[23] = 113;
        assert!(matches!(read(&file), Err(PcapError::NotEthernet { link_type: 113 })));
    }

    #[test]
    fn packets_are_received_in_timestamp_order_and_sent_ones_are_captured() {
        let (one, two) = (InterfaceId(0), InterfaceId(1));
        let captures = [(one, write(&[packet(1, 1), packet(30, 3)])), (two, write(&[packet(20, 2)]))];
        let mut io = PcapIo::new(8, &captures.each_ref().map(|(id, file)| (*id, file.as_slice()))).unwrap();
        let mut got = Vec::new();
        io.advance(Duration::from_millis(25));
        assert_eq!(io.rx(&mut got, 8), 2);
        assert_eq!(io.next_at(), Some(Duration::from_millis(30)));
        for received in got.drain(..) {
            io.tx(received.interface, received.frame).unwrap();
        }
        io.flush();
        let sent = read(&io.capture(two)).unwrap();
        assert_eq!(sent, [Packet { at: Duration::from_millis(25), bytes: vec![2; 20] }]);
    }
}
