//! Test packets: UDP or TCP over IPv4 or IPv6, computed from a flow number and written into a frame.

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::session::SessionFamily;
use vipgate_dataplane::wire::checksum;
use vipgate_dataplane::wire::ethernet::{self, Mac};

/// MAC addresses of the gateway and its neighbors.
pub(crate) const POD_MAC: Mac = [2, 0, 0, 0, 1, 1];
pub(crate) const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
pub(crate) const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
pub(crate) const ROUTER_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// The VIP of all pods.
pub(crate) const VIP: u32 = 0xcb00_710a;
/// Address of the first pod.
pub(crate) const FIRST_POD: u32 = 0x0a01_0000;
/// Number of pods.
pub(crate) const PODS: u32 = 1024;
/// First remote address.
const FIRST_REMOTE: u32 = 0xc633_0000;
/// Number of remote addresses. Of a million flows, 1024 go to each: 1.6 % of the VIP's ports are in use per remote
/// address.
const REMOTES: u32 = 1024;
/// Remote port of sessions of this gateway.
const REMOTE_PORT: u16 = 443;
/// Remote port of sessions of the peer gateway.
const PEER_REMOTE_PORT: u16 = 444;

/// The Service at the VIP: its port, the port of its backends, and the number of pods that are backends.
pub(crate) const SERVICE_PORT: u16 = 53;
pub(crate) const BACKEND_PORT: u16 = 5353;
pub(crate) const BACKENDS: u32 = 64;

/// Client address and port of an inbound flow.
fn client(number: u32) -> (u32, u16) {
    (FIRST_REMOTE + number % REMOTES, 1024 + (number / REMOTES) as u16)
}

/// An egress flow: pod address and port, remote address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) pod: u32,
    pub(crate) pod_port: u16,
    pub(crate) remote: u32,
    pub(crate) remote_port: u16,
}

impl Flow {
    /// The flow with this number.
    pub(crate) fn new(number: u32) -> Self {
        let (pod, rest) = (number % PODS, number / PODS);
        let (remote, port) = (rest % REMOTES, rest / REMOTES);
        Self {
            pod: FIRST_POD + pod,
            pod_port: 1024 + port as u16,
            remote: FIRST_REMOTE + remote,
            remote_port: REMOTE_PORT,
        }
    }

    /// The flow with this number, owned by the peer gateway.
    pub(crate) fn peer_owned(number: u32) -> Self {
        Self { remote_port: PEER_REMOTE_PORT, ..Self::new(number) }
    }

    /// The flow with this number, with the same remote address for all flows.
    pub(crate) fn to_one_remote(number: u32) -> Self {
        Self { pod_port: 1024 + (number / PODS) as u16, remote: FIRST_REMOTE, ..Self::new(number % PODS) }
    }
}

/// Writes a pod's packet of a flow into `frame`.
pub(crate) fn write_forward(frame: &mut [u8], flow: Flow) {
    write(frame, (INSIDE_MAC, POD_MAC), (flow.pod, flow.pod_port), (flow.remote, flow.remote_port));
}

/// Writes the reply to a flow with this SNAT port into `frame`.
pub(crate) fn write_reply(frame: &mut [u8], flow: Flow, port: u16) {
    write(frame, (OUTSIDE_MAC, ROUTER_MAC), (flow.remote, flow.remote_port), (VIP, port));
}

fn write(frame: &mut [u8], macs: (Mac, Mac), source: (u32, u16), destination: (u32, u16)) {
    let total = (frame.len() - 14) as u16;
    frame[..12].copy_from_slice(&ethernet::mac_pair(macs.0, macs.1));
    frame[12..14].copy_from_slice(&[8, 0]);
    let ip = &mut frame[14..34];
    ip.copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip[12..16].copy_from_slice(&source.0.to_be_bytes());
    ip[16..20].copy_from_slice(&destination.0.to_be_bytes());
    let sum = checksum::checksum(0, ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let pseudo = source.0.word_sum() + destination.0.word_sum();
    write_udp(&mut frame[34..], source.1, destination.1, pseudo);
}

fn write_udp(udp: &mut [u8], source: u16, destination: u16, addresses: u32) {
    let length = udp.len() as u16;
    udp[..2].copy_from_slice(&source.to_be_bytes());
    udp[2..4].copy_from_slice(&destination.to_be_bytes());
    udp[4..6].copy_from_slice(&length.to_be_bytes());
    udp[6..8].fill(0);
    let sum = checksum::checksum(addresses + 17 + u32::from(length), udp);
    udp[6..8].copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
}

/// Source and destination port.
fn udp_ports(udp: &[u8]) -> [u16; 2] {
    [u16::from_be_bytes([udp[0], udp[1]]), u16::from_be_bytes([udp[2], udp[3]])]
}

/// Whether the IPv4 and UDP checksums of a packet are valid.
pub(crate) fn has_valid_checksums(frame: &[u8]) -> bool {
    let (ip, udp) = frame[14..].split_at(20);
    let pseudo = checksum::sum(&ip[12..20]) + 17 + udp.len() as u32;
    checksum::verifies(0, ip) && checksum::verifies(pseudo, udp)
}

/// The IPv6 VIP of all pods.
pub(crate) const VIP6: V6 = V6 { high: 0x2001_0db8_0113_0000, low: 0x10 };

/// The IPv6 address of a pod, from its IPv4 address.
pub(crate) fn pod6(pod: u32) -> V6 {
    V6 { high: 0xfd00_0001_0000_0000, low: pod.into() }
}

fn remote6(remote: u32) -> V6 {
    V6 { high: 0x2001_0db8_0051_0000, low: remote.into() }
}

fn write6(frame: &mut [u8], macs: (Mac, Mac), source: (V6, u16), destination: (V6, u16)) {
    let payload = (frame.len() - 54) as u16;
    frame[..12].copy_from_slice(&ethernet::mac_pair(macs.0, macs.1));
    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
    frame[14..18].copy_from_slice(&[0x60, 0, 0, 0]);
    frame[18..20].copy_from_slice(&payload.to_be_bytes());
    frame[20..22].copy_from_slice(&[17, 64]);
    frame[22..38].copy_from_slice(&source.0.to_bits().to_be_bytes());
    frame[38..54].copy_from_slice(&destination.0.to_bits().to_be_bytes());
    let pseudo = source.0.word_sum() + destination.0.word_sum();
    write_udp(&mut frame[54..], source.1, destination.1, pseudo);
}

/// Offset of the transport header in a frame.
fn transport_offset(frame: &[u8]) -> usize {
    if frame[12] == 8 { 34 } else { 54 }
}

/// Type of a TCP segment. Segments carry no data: the engine doesn't read payloads, so they cost the same with data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcpStep {
    /// SYN from the pod, SYN-ACK from the remote.
    Handshake,
    /// ACK.
    Established,
}

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Converts a UDP frame into a TCP segment from the pod or from its remote. The bytes after the header are padding.
pub(crate) fn make_tcp(frame: &mut [u8], from_pod: bool, step: TcpStep) {
    let at = transport_offset(frame);
    let ports = udp_ports(&frame[at..]);
    let (sequence, ack) = if from_pod { (1000_u32, 5000_u32) } else { (5000, 1000) };
    let (sequence, ack, flags) = match step {
        TcpStep::Handshake if from_pod => (sequence - 1, 0, 0x02),
        TcpStep::Handshake => (sequence - 1, ack, 0x12),
        TcpStep::Established => (sequence, ack, 0x10),
    };
    let pseudo = if at == 34 {
        frame[16..18].copy_from_slice(&40_u16.to_be_bytes());
        frame[23] = 6;
        frame[24..26].fill(0);
        let sum = checksum::checksum(0, &frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        checksum::sum(&frame[26..34])
    } else {
        frame[18..20].copy_from_slice(&(TCP_HEADER as u16).to_be_bytes());
        frame[20] = 6;
        checksum::sum(&frame[22..54])
    };
    let tcp = &mut frame[at..];
    tcp[..2].copy_from_slice(&ports[0].to_be_bytes());
    tcp[2..4].copy_from_slice(&ports[1].to_be_bytes());
    tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
    tcp[8..12].copy_from_slice(&ack.to_be_bytes());
    tcp[12..TCP_HEADER].copy_from_slice(&[0x50, flags, 0xfa, 0, 0, 0, 0, 0]);
    let sum = checksum::checksum(pseudo + 6 + TCP_HEADER as u32, &tcp[..TCP_HEADER]);
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
}

/// Whether the IPv4 and TCP checksums of a segment are valid.
pub(crate) fn has_valid_tcp_checksums(frame: &[u8]) -> bool {
    let at = transport_offset(frame);
    let addresses = if at == 34 { 26..34 } else { 22..54 };
    let pseudo = checksum::sum(&frame[addresses]) + 6 + TCP_HEADER as u32;
    (at != 34 || checksum::verifies(0, &frame[14..34])) && checksum::verifies(pseudo, &frame[at..at + TCP_HEADER])
}

/// Packets of an address family.
pub(crate) trait PacketFamily: SessionFamily + 'static {
    /// Name in reports.
    const NAME: &'static str;
    /// Minimum frame size without FCS: Ethernet's, or that of the headers up to UDP if larger.
    const MIN_FRAME: u16;
    /// The same for TCP.
    const MIN_TCP_FRAME: u16;
    /// Writes a pod's packet of a flow into `frame`.
    fn write_forward(frame: &mut [u8], flow: Flow);
    /// Writes the reply to a flow with this SNAT port.
    fn write_reply(frame: &mut [u8], flow: Flow, port: u16);
    /// The source port of a packet.
    fn source_port(frame: &[u8]) -> u16;
    /// Writes a client's packet to the Service into `frame`.
    fn write_inbound(frame: &mut [u8], number: u32);
    /// Writes a backend's reply to a client.
    fn write_service_reply(frame: &mut [u8], number: u32, backend: u16);
    /// The index of the backend that an inbound packet was forwarded to.
    fn backend_index(frame: &[u8]) -> u16;
    /// Whether a packet is correctly translated: from a VIP to a remote or from a remote to a pod, with valid
    /// checksums.
    fn is_translated(frame: &[u8]) -> bool;
    /// Whether a packet is an untranslated reply: to a VIP, with valid checksums.
    fn is_untranslated_reply(frame: &[u8]) -> bool;
}

impl PacketFamily for u32 {
    const NAME: &'static str = "ipv4";
    const MIN_FRAME: u16 = 60;
    const MIN_TCP_FRAME: u16 = 60;

    fn write_forward(frame: &mut [u8], flow: Flow) {
        write_forward(frame, flow);
    }

    fn write_reply(frame: &mut [u8], flow: Flow, port: u16) {
        write_reply(frame, flow, port);
    }

    fn source_port(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[34], frame[35]])
    }

    fn write_inbound(frame: &mut [u8], number: u32) {
        write(frame, (OUTSIDE_MAC, ROUTER_MAC), client(number), (VIP, SERVICE_PORT));
    }

    fn write_service_reply(frame: &mut [u8], number: u32, backend: u16) {
        let source = (FIRST_POD + u32::from(backend), BACKEND_PORT);
        write(frame, (INSIDE_MAC, POD_MAC), source, client(number));
    }

    fn backend_index(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[32], frame[33]])
    }

    fn is_translated(frame: &[u8]) -> bool {
        let (ip, udp) = frame[14..].split_at(20);
        let [source, destination] = udp_ports(udp);
        let from_vip = ip[12..16] == VIP.to_be_bytes() && (destination == REMOTE_PORT || source == SERVICE_PORT);
        let to_pod = ip[16..18] == [10, 1] && (source == REMOTE_PORT || destination == BACKEND_PORT);
        (from_vip || to_pod) && has_valid_checksums(frame)
    }

    fn is_untranslated_reply(frame: &[u8]) -> bool {
        frame[30..34] == VIP.to_be_bytes() && has_valid_checksums(frame)
    }
}

impl PacketFamily for V6 {
    const NAME: &'static str = "ipv6";
    const MIN_FRAME: u16 = 62;
    const MIN_TCP_FRAME: u16 = 74;

    fn write_forward(frame: &mut [u8], flow: Flow) {
        let (pod, remote) = ((pod6(flow.pod), flow.pod_port), (remote6(flow.remote), flow.remote_port));
        write6(frame, (INSIDE_MAC, POD_MAC), pod, remote);
    }

    fn write_reply(frame: &mut [u8], flow: Flow, port: u16) {
        write6(frame, (OUTSIDE_MAC, ROUTER_MAC), (remote6(flow.remote), flow.remote_port), (VIP6, port));
    }

    fn source_port(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[54], frame[55]])
    }

    fn write_inbound(frame: &mut [u8], number: u32) {
        let (client, port) = client(number);
        write6(frame, (OUTSIDE_MAC, ROUTER_MAC), (remote6(client), port), (VIP6, SERVICE_PORT));
    }

    fn write_service_reply(frame: &mut [u8], number: u32, backend: u16) {
        let (client, port) = client(number);
        let source = (pod6(FIRST_POD + u32::from(backend)), BACKEND_PORT);
        write6(frame, (INSIDE_MAC, POD_MAC), source, (remote6(client), port));
    }

    fn backend_index(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[52], frame[53]])
    }

    fn is_translated(frame: &[u8]) -> bool {
        let (ip, udp) = frame[14..].split_at(40);
        let pseudo = checksum::sum(&ip[8..40]) + 17 + udp.len() as u32;
        let [source, destination] = udp_ports(udp);
        let is_vip = ip[8..24] == VIP6.to_bits().to_be_bytes();
        let from_vip = is_vip && (destination == REMOTE_PORT || source == SERVICE_PORT);
        let to_pod = ip[24..26] == [0xfd, 0] && (source == REMOTE_PORT || destination == BACKEND_PORT);
        (from_vip || to_pod) && checksum::verifies(pseudo, udp)
    }

    fn is_untranslated_reply(frame: &[u8]) -> bool {
        let (ip, udp) = frame[14..].split_at(40);
        let pseudo = checksum::sum(&ip[8..40]) + 17 + udp.len() as u32;
        ip[24..40] == VIP6.to_bits().to_be_bytes() && checksum::verifies(pseudo, udp)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use etherparse::SlicedPacket;

    use super::*;

    #[test]
    fn flows_are_distinct_and_their_packets_parse_with_etherparse() {
        let flows: HashSet<_> =
            (0..200_000).map(|n| (Flow::new(n).pod, Flow::new(n).pod_port, Flow::new(n).remote)).collect();
        assert_eq!(flows.len(), 200_000);
        let mut frame = [0; 60];
        write_forward(&mut frame, Flow::new(77));
        frame[26..30].copy_from_slice(&VIP.to_be_bytes());
        let stale_checksum = frame;
        write_forward(&mut frame, Flow::new(77));
        assert!(!u32::is_translated(&stale_checksum) && !u32::is_translated(&frame), "untranslated packets are wrong");
        write_reply(&mut frame, Flow::new(77), 5000);
        let mut reply = frame;
        write(&mut reply, (POD_MAC, INSIDE_MAC), (Flow::new(77).remote, 443), (Flow::new(77).pod, 1024));
        assert!(u32::is_translated(&reply));
        let mut v6 = [0; 62];
        V6::write_forward(&mut v6, Flow::new(77));
        assert!(SlicedPacket::from_ethernet(&v6).unwrap().transport.is_some() && !V6::is_translated(&v6));
        write6(&mut v6, (ROUTER_MAC, OUTSIDE_MAC), (VIP6, 9), (remote6(1), 443));
        assert!(V6::is_translated(&v6));
        assert!(SlicedPacket::from_ethernet(&frame).unwrap().transport.is_some());
        reply[41] ^= 1;
        assert!(!u32::is_translated(&reply));
    }

    #[test]
    fn tcp_segments_parse_with_etherparse() {
        let (mut v4, mut v6) = ([0; 60], [0; 74]);
        for from_pod in [true, false] {
            for step in [TcpStep::Handshake, TcpStep::Established] {
                u32::write_forward(&mut v4, Flow::new(77));
                V6::write_forward(&mut v6, Flow::new(77));
                for frame in [&mut v4[..], &mut v6[..]] {
                    make_tcp(frame, from_pod, step);
                    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
                    let Some(etherparse::TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("no TCP") };
                    assert_eq!((tcp.destination_port(), tcp.syn()), (REMOTE_PORT, step == TcpStep::Handshake));
                    assert!(tcp.payload().is_empty() && has_valid_tcp_checksums(frame));
                }
            }
        }
    }
}
