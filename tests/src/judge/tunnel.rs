//! What travels between gateways: each packet at most once.

use std::collections::HashMap;
use std::net::IpAddr;

use super::packet::{Packet, UDP, identity};
use super::pcap::Frame;

/// Header of VXLAN, RFC 7348.
const VXLAN: usize = 8;
const ETHERNET: usize = 14;
const VNI: std::ops::Range<usize> = 4..7;

/// A packet in the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner<'a> {
    /// The gateways: who sent it, and to whom.
    pub gateways: [IpAddr; 2],
    /// VXLAN's number of the network, which carries marks.
    pub vni: u32,
    /// The packet.
    pub packet: Packet<'a>,
}

/// The packets that gateways have sent each other through the tunnel at `port`. One that was captured at both ends counts once:
/// what `is_sender` says belongs to the place of capture.
pub fn travelled<'a>(
    frames: &'a [Frame],
    port: u16,
    is_sender: impl Fn(usize, IpAddr) -> bool,
) -> Vec<(u64, Inner<'a>)> {
    let inner = |frame: &'a Frame| {
        let outer = Packet::in_frame(&frame.bytes)?;
        let is_ours = outer.protocol == UDP && outer.ports?[1] == port && is_sender(frame.place, outer.addresses[0]);
        let header = outer.payload.get(..VXLAN).filter(|_| is_ours)?;
        let vni = header[VNI].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let packet = Packet::new(outer.payload.get(VXLAN + ETHERNET..)?)?;
        Some((frame.time, Inner { gateways: outer.addresses, vni, packet }))
    };
    frames.iter().filter_map(inner).collect()
}

/// A numbered datagram: what it carries, and where it goes.
type Datagram<'a> = ([IpAddr; 2], &'a [u8]);

/// Whole, or the first of its pieces. TCP may repeat itself, so it has no number.
fn numbered<'a>(packet: &Packet<'a>) -> Option<Datagram<'a>> {
    let is_numbered = packet.protocol == UDP && packet.ports.is_some() && identity(packet.payload).is_some();
    is_numbered.then(|| (packet.addresses, &packet.payload[..packet.payload.len().min(15)]))
}

/// How often the numbered datagram that travelled most often has travelled each time that it came in, and which it is; of whole ones,
/// or of those that are cut into pieces. `outside` is what was captured there, and `arrives` says of a place and a link address whether
/// that is a gateway's: a network that repeats packets lets an answer come in more than once. Pods say everything once.
pub fn most_copies(
    travelled: &[(u64, Inner<'_>)],
    outside: &[Frame],
    arrives: impl Fn(usize, &[u8]) -> bool,
    in_pieces: bool,
) -> (usize, String) {
    let mut arrived: HashMap<Datagram<'_>, usize> = HashMap::new();
    for frame in outside.iter().filter(|frame| frame.bytes.get(..6).is_some_and(|to| arrives(frame.place, to))) {
        if let Some(datagram) = Packet::in_frame(&frame.bytes).as_ref().and_then(numbered) {
            *arrived.entry(datagram).or_default() += 1;
        }
    }
    let mut copies: HashMap<Datagram<'_>, usize> = HashMap::new();
    for (_, Inner { packet, .. }) in travelled.iter().filter(|(_, inner)| inner.packet.is_fragment == in_pieces) {
        // On its way out it has a pod's address, on its way back a VIP: both legs are counted by themselves.
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
