//! Packets in the tunnel between gateways: each crosses it at most once.

use std::collections::HashMap;
use std::net::IpAddr;

use super::packet::{Packet, UDP, client_identity};
use super::pcap::Frame;

/// Length of the VXLAN header (RFC 7348).
const VXLAN: usize = 8;
const ETHERNET: usize = 14;
const VNI: std::ops::Range<usize> = 4..7;

/// A packet in the tunnel, decapsulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelPacket<'a> {
    /// Sending and receiving gateway.
    pub gateways: [IpAddr; 2],
    /// VXLAN network identifier, which carries the product's flags.
    pub vni: u32,
    /// The inner packet.
    pub packet: Packet<'a>,
}

/// Packets in the tunnel at `port`, with their capture times. A packet that was captured at both gateways counts
/// once: `is_sender` says whether an address is that of a capture's gateway.
pub fn tunnel_packets<'a>(
    frames: &'a [Frame],
    port: u16,
    is_sender: impl Fn(usize, IpAddr) -> bool,
) -> Vec<(u64, TunnelPacket<'a>)> {
    let inner = |frame: &'a Frame| {
        let outer = Packet::in_frame(&frame.bytes)?;
        let is_ours = outer.protocol == UDP && outer.ports?[1] == port && is_sender(frame.capture, outer.addresses[0]);
        let header = outer.payload.get(..VXLAN).filter(|_| is_ours)?;
        let vni = header[VNI].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let packet = Packet::new(outer.payload.get(VXLAN + ETHERNET..)?)?;
        Some((frame.time, TunnelPacket { gateways: outer.addresses, vni, packet }))
    };
    frames.iter().filter_map(inner).collect()
}

/// A numbered datagram: its addresses and the start of its payload.
type Datagram<'a> = ([IpAddr; 2], &'a [u8]);

/// The datagram of an unfragmented packet or a first fragment. TCP may retransmit, so it isn't counted.
fn numbered<'a>(packet: &Packet<'a>) -> Option<Datagram<'a>> {
    let is_numbered = packet.protocol == UDP && packet.ports.is_some() && client_identity(packet.payload).is_some();
    is_numbered.then(|| (packet.addresses, &packet.payload[..packet.payload.len().min(15)]))
}

/// The numbered datagram with the most tunnel traversals per arrival, and their count, of whole datagrams or of
/// fragmented ones. `outside` are the frames captured there; `arrives` says whether a destination MAC address is that
/// of a capture's gateway: a network that duplicates packets lets a reply arrive more than once. Pods send every
/// datagram once.
pub fn most_traversed(
    packets: &[(u64, TunnelPacket<'_>)],
    outside: &[Frame],
    arrives: impl Fn(usize, &[u8]) -> bool,
    fragmented: bool,
) -> (usize, String) {
    let mut arrived: HashMap<Datagram<'_>, usize> = HashMap::new();
    for frame in outside.iter().filter(|frame| frame.bytes.get(..6).is_some_and(|to| arrives(frame.capture, to))) {
        if let Some(datagram) = Packet::in_frame(&frame.bytes).as_ref().and_then(numbered) {
            *arrived.entry(datagram).or_default() += 1;
        }
    }
    let mut copies: HashMap<Datagram<'_>, usize> = HashMap::new();
    for (_, TunnelPacket { packet, .. }) in packets.iter().filter(|(_, inner)| inner.packet.is_fragment == fragmented) {
        // Outbound it has a pod's address, inbound a VIP: both directions are counted separately.
        if let Some(datagram) = numbered(packet) {
            *copies.entry(datagram).or_default() += 1;
        }
    }
    let times = copies.into_iter().map(|(datagram, count)| {
        let arrivals = arrived.get(&datagram).copied().unwrap_or(0).max(1);
        (datagram, count.div_ceil(arrivals))
    });
    let most = times.max_by_key(|(_, count)| *count);
    most.map_or((0, String::new()), |((addresses, number), count)| {
        (count, format!("{addresses:?} {}", String::from_utf8_lossy(number)))
    })
}
