//! pcapng writer (draft-ietf-opsawg-pcapng): each packet as received and as sent, on its ingress and egress interface,
//! with its verdict as a comment.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::Duration;

use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::pcapng::{Block, PcapNgWriter};
use pcap_file::{DataLink, Endianness, PcapError};

use crate::admin::capture::CapturedPacket;

/// Direction: the lowest bits of `epb_flags`.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
/// Approximate size of a block beside packet data and comment, in bytes.
const OVERHEAD: u64 = 64;

/// A pcapng file being written.
pub(super) struct Pcapng<W: Write> {
    state: Option<State<W>>,
    written: u64,
}

enum State<W: Write> {
    /// Nothing is written yet: the interfaces are unknown.
    Empty(W),
    Open(PcapNgWriter<W>),
}

impl<W: Write> Pcapng<W> {
    pub(super) fn new(to: W) -> Self {
        Self { state: Some(State::Empty(to)), written: 0 }
    }

    /// Approximate number of bytes written.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Writes the section header and the interface descriptions.
    pub(super) fn begin(&mut self, interfaces: &[String]) -> io::Result<()> {
        let to = match self.state.take() {
            Some(State::Empty(to)) => to,
            other => {
                self.state = other;
                return Ok(());
            }
        };
        let program = format!("vipgate {}", env!("CARGO_PKG_VERSION"));
        let section = SectionHeaderBlock {
            endianness: Endianness::native(),
            options: vec![SectionHeaderOption::UserApplication(Cow::Owned(program))],
            ..SectionHeaderBlock::default()
        };
        let mut writer = PcapNgWriter::with_section_header(to, section).map_err(io_error)?;
        for name in interfaces {
            let interface = InterfaceDescriptionBlock {
                linktype: DataLink::ETHERNET,
                snaplen: 0,
                options: vec![
                    InterfaceDescriptionOption::IfName(Cow::Borrowed(name)),
                    // Nanoseconds: the resolution that the library writes.
                    InterfaceDescriptionOption::IfTsResol(9),
                ],
            };
            writer.write_pcapng_block(interface).map_err(io_error)?;
        }
        self.state = Some(State::Open(writer));
        Ok(())
    }

    /// Writes a packet as received and, if it was sent, as sent.
    pub(super) fn put(&mut self, packet: &CapturedPacket) -> io::Result<()> {
        let time = Duration::from_millis(packet.time_ms);
        self.block(packet.interface, time, &packet.before, packet.before_length, INBOUND, &packet.verdict)?;
        if let Some(out) = packet.out.filter(|_| !packet.after.is_empty()) {
            self.block(out, time, &packet.after, packet.after_length, OUTBOUND, &packet.verdict)?;
        }
        Ok(())
    }

    /// Writes one packet: its captured bytes, and its length before it was cut.
    fn block(
        &mut self,
        interface: u32,
        at: Duration,
        bytes: &[u8],
        length: u32,
        flags: u32,
        comment: &str,
    ) -> io::Result<()> {
        let Some(State::Open(writer)) = &mut self.state else { return Ok(()) };
        let block = EnhancedPacketBlock {
            interface_id: interface,
            timestamp: at,
            original_len: length,
            data: Cow::Borrowed(bytes),
            options: vec![EnhancedPacketOption::Comment(Cow::Borrowed(comment)), EnhancedPacketOption::Flags(flags)],
        };
        writer.write_block(&Block::EnhancedPacket(block)).map_err(io_error)?;
        self.written += bytes.len() as u64 + comment.len() as u64 + OVERHEAD;
        Ok(())
    }

    /// Flushes the underlying writer.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match &mut self.state {
            Some(State::Open(writer)) => writer.get_mut().flush(),
            Some(State::Empty(to)) => to.flush(),
            None => Ok(()),
        }
    }
}

/// The library's error without its prefix.
fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}
