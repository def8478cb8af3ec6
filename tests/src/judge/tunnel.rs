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

/// How often the numbered datagram that travelled most often has travelled, and which it is; of whole ones, or of those that
/// are cut into pieces. Datagrams are told apart by what they carry and where they go; TCP may repeat itself, so it doesn't count here.
pub fn most_copies(travelled: &[(u64, Inner<'_>)], in_pieces: bool) -> (usize, String) {
    let mut copies: HashMap<([IpAddr; 2], &[u8]), usize> = HashMap::new();
    for (_, Inner { packet, .. }) in travelled {
        if packet.protocol == UDP
            && packet.ports.is_some()
            && packet.is_fragment == in_pieces
            && identity(packet.payload).is_some()
        {
            let number = &packet.payload[..packet.payload.len().min(15)];
            // On its way out it has a pod's address, on its way back a VIP: both legs are counted by themselves.
            *copies.entry((packet.addresses, number)).or_default() += 1;
        }
    }
    let most = copies.into_iter().max_by_key(|(_, count)| *count);
    most.map_or((0, String::new()), |((addresses, number), count)| {
        (count, format!("{addresses:?} {}", String::from_utf8_lossy(number)))
    })
}
