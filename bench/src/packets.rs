//! The packets of a flow, by its number: UDP or TCP over either family, written into a frame without any table.

use vipgate_dataplane::address::{Address, V6};
use vipgate_dataplane::session::SessionFamily;
use vipgate_dataplane::wire::checksum;
use vipgate_dataplane::wire::ethernet::{self, Mac};

/// Link addresses of the two sides, and of the gateway on each.
pub(crate) const POD_MAC: Mac = [2, 0, 0, 0, 1, 1];
pub(crate) const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
pub(crate) const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
pub(crate) const ROUTER_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// The VIP of all pods.
pub(crate) const VIP: u32 = 0xcb00_710a;
/// First pod; there are [`PODS`].
pub(crate) const FIRST_POD: u32 = 0x0a01_0000;
/// Pods.
pub(crate) const PODS: u32 = 1024;
/// First far side. Every flow has its own number here or there.
const FIRST_FAR: u32 = 0xc633_0000;
/// Far sides. With a million flows, each has 1024 of them: 1.6 % of the VIP's ports are in use toward it.
const FARS: u32 = 1024;
/// Their port.
const FAR_PORT: u16 = 443;
/// The port of far sides to which this gateway has no sessions.
const STRANGE_PORT: u16 = 444;

/// The Service at the VIP: its port, that of its backends, and how many of the pods those are.
pub(crate) const SERVICE_PORT: u16 = 53;
pub(crate) const BACKEND_PORT: u16 = 5353;
pub(crate) const BACKENDS: u32 = 64;

/// The client of a flow to the Service: address and port.
fn client(number: u32) -> (u32, u16) {
    (FIRST_FAR + number % FARS, 1024 + (number / FARS) as u16)
}

/// Both ends of a flow: pod and port, far side and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) pod: u32,
    pub(crate) pod_port: u16,
    pub(crate) far: u32,
    pub(crate) far_port: u16,
}

impl Flow {
    /// The flow with this number.
    pub(crate) fn new(number: u32) -> Self {
        let (pod, rest) = (number % PODS, number / PODS);
        let (far, port) = (rest % FARS, rest / FARS);
        Self { pod: FIRST_POD + pod, pod_port: 1024 + port as u16, far: FIRST_FAR + far, far_port: FAR_PORT }
    }

    /// The same, but another gateway's.
    pub(crate) fn elsewhere(number: u32) -> Self {
        Self { far_port: STRANGE_PORT, ..Self::new(number) }
    }

    /// The same, but all to one far side.
    pub(crate) fn to_one(number: u32) -> Self {
        Self { pod_port: 1024 + (number / PODS) as u16, far: FIRST_FAR, ..Self::new(number % PODS) }
    }
}

/// Writes a pod's packet of a flow over `frame`.
pub(crate) fn write_forward(frame: &mut [u8], flow: Flow) {
    write(frame, (INSIDE_MAC, POD_MAC), (flow.pod, flow.pod_port), (flow.far, flow.far_port));
}

/// Writes the answer to a flow's packet that left with this port.
pub(crate) fn write_reply(frame: &mut [u8], flow: Flow, port: u16) {
    write(frame, (OUTSIDE_MAC, ROUTER_MAC), (flow.far, flow.far_port), (VIP, port));
}

fn write(frame: &mut [u8], link: (Mac, Mac), source: (u32, u16), destination: (u32, u16)) {
    let total = (frame.len() - 14) as u16;
    frame[..12].copy_from_slice(&ethernet::link(link.0, link.1));
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

/// Source and destination.
fn udp_ports(udp: &[u8]) -> [u16; 2] {
    [u16::from_be_bytes([udp[0], udp[1]]), u16::from_be_bytes([udp[2], udp[3]])]
}

/// Whether both checksums of an IPv4 packet are right.
pub(crate) fn is_right(frame: &[u8]) -> bool {
    let (ip, udp) = frame[14..].split_at(20);
    let pseudo = checksum::sum(&ip[12..20]) + 17 + udp.len() as u32;
    checksum::verifies(0, ip) && checksum::verifies(pseudo, udp)
}

/// The VIP of all pods' IPv6 addresses.
pub(crate) const VIP6: V6 = V6 { high: 0x2001_0db8_0113_0000, low: 0x10 };

/// The IPv6 address of a pod, by its IPv4 one.
pub(crate) fn pod6(pod: u32) -> V6 {
    V6 { high: 0xfd00_0001_0000_0000, low: pod.into() }
}

fn far6(far: u32) -> V6 {
    V6 { high: 0x2001_0db8_0051_0000, low: far.into() }
}

fn write6(frame: &mut [u8], link: (Mac, Mac), source: (V6, u16), destination: (V6, u16)) {
    let payload = (frame.len() - 54) as u16;
    frame[..12].copy_from_slice(&ethernet::link(link.0, link.1));
    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
    frame[14..18].copy_from_slice(&[0x60, 0, 0, 0]);
    frame[18..20].copy_from_slice(&payload.to_be_bytes());
    frame[20..22].copy_from_slice(&[17, 64]);
    frame[22..38].copy_from_slice(&source.0.to_bits().to_be_bytes());
    frame[38..54].copy_from_slice(&destination.0.to_bits().to_be_bytes());
    let pseudo = source.0.word_sum() + destination.0.word_sum();
    write_udp(&mut frame[54..], source.1, destination.1, pseudo);
}

/// Where the transport header of a frame begins.
fn transport_at(frame: &[u8]) -> usize {
    if frame[12] == 8 { 34 } else { 54 }
}

/// What a segment of the connection says that a flow is with TCP. Both ends never say more than that they are there: a packet costs what
/// one with data costs, for data is not looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// SYN, and the SYN that answers it.
    Opens,
    /// ACK.
    GoesOn,
}

/// Bytes of the shortest TCP header.
const TCP_HEADER: usize = 20;

/// Makes a TCP segment of a frame that was written for UDP: from the pod or its remote. What is behind the header is padding.
pub(crate) fn make_tcp(frame: &mut [u8], from_pod: bool, step: Step) {
    let at = transport_at(frame);
    let ports = udp_ports(&frame[at..]);
    let (sequence, ack) = if from_pod { (1000_u32, 5000_u32) } else { (5000, 1000) };
    let (sequence, ack, flags) = match step {
        Step::Opens if from_pod => (sequence - 1, 0, 0x02),
        Step::Opens => (sequence - 1, ack, 0x12),
        Step::GoesOn => (sequence, ack, 0x10),
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

/// Whether the checksums of a TCP segment are right.
pub(crate) fn is_right_tcp(frame: &[u8]) -> bool {
    let at = transport_at(frame);
    let addresses = if at == 34 { 26..34 } else { 22..54 };
    let pseudo = checksum::sum(&frame[addresses]) + 6 + TCP_HEADER as u32;
    (at != 34 || checksum::verifies(0, &frame[14..34])) && checksum::verifies(pseudo, &frame[at..at + TCP_HEADER])
}

/// Packets of an address family.
pub(crate) trait PacketFamily: SessionFamily + 'static {
    /// Its name in reports.
    const NAME: &'static str;
    /// Bytes of the shortest frame with a payload, or what the link demands.
    const SHORTEST: u16;
    /// The same with TCP.
    const SHORTEST_TCP: u16;
    /// Writes a pod's packet of a flow over `frame`.
    fn write_forward(frame: &mut [u8], flow: Flow);
    /// Writes the answer to a flow's packet that left with this port.
    fn write_reply(frame: &mut [u8], flow: Flow, port: u16);
    /// The source port of a packet.
    fn source_port(frame: &[u8]) -> u16;
    /// Writes a client's packet to the Service over `frame`.
    fn write_inbound(frame: &mut [u8], number: u32);
    /// Writes a backend's answer to it.
    fn write_service_reply(frame: &mut [u8], number: u32, backend: u16);
    /// The number of the backend that a client's packet went to.
    fn backend(frame: &[u8]) -> u16;
    /// Whether all checksums of a packet are right, and it is between a VIP and a far side or a far side and a pod.
    fn is_right(frame: &[u8]) -> bool;
    /// Whether all checksums of a packet are right, and it is on its way to a VIP.
    fn is_untouched_reply(frame: &[u8]) -> bool;
}

impl PacketFamily for u32 {
    const NAME: &'static str = "ipv4";
    const SHORTEST: u16 = 60;
    const SHORTEST_TCP: u16 = 60;

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

    fn backend(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[32], frame[33]])
    }

    fn is_right(frame: &[u8]) -> bool {
        let (ip, udp) = frame[14..].split_at(20);
        let [source, destination] = udp_ports(udp);
        let left_as_vip = ip[12..16] == VIP.to_be_bytes() && (destination == FAR_PORT || source == SERVICE_PORT);
        let reached_pod = ip[16..18] == [10, 1] && (source == FAR_PORT || destination == BACKEND_PORT);
        (left_as_vip || reached_pod) && is_right(frame)
    }

    fn is_untouched_reply(frame: &[u8]) -> bool {
        frame[30..34] == VIP.to_be_bytes() && is_right(frame)
    }
}

impl PacketFamily for V6 {
    const NAME: &'static str = "ipv6";
    const SHORTEST: u16 = 62;
    const SHORTEST_TCP: u16 = 74;

    fn write_forward(frame: &mut [u8], flow: Flow) {
        let ends = ((pod6(flow.pod), flow.pod_port), (far6(flow.far), flow.far_port));
        write6(frame, (INSIDE_MAC, POD_MAC), ends.0, ends.1);
    }

    fn write_reply(frame: &mut [u8], flow: Flow, port: u16) {
        write6(frame, (OUTSIDE_MAC, ROUTER_MAC), (far6(flow.far), flow.far_port), (VIP6, port));
    }

    fn source_port(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[54], frame[55]])
    }

    fn write_inbound(frame: &mut [u8], number: u32) {
        let (client, port) = client(number);
        write6(frame, (OUTSIDE_MAC, ROUTER_MAC), (far6(client), port), (VIP6, SERVICE_PORT));
    }

    fn write_service_reply(frame: &mut [u8], number: u32, backend: u16) {
        let (client, port) = client(number);
        let source = (pod6(FIRST_POD + u32::from(backend)), BACKEND_PORT);
        write6(frame, (INSIDE_MAC, POD_MAC), source, (far6(client), port));
    }

    fn backend(frame: &[u8]) -> u16 {
        u16::from_be_bytes([frame[52], frame[53]])
    }

    fn is_right(frame: &[u8]) -> bool {
        let (ip, udp) = frame[14..].split_at(40);
        let pseudo = checksum::sum(&ip[8..40]) + 17 + udp.len() as u32;
        let [source, destination] = udp_ports(udp);
        let from_vip = ip[8..24] == VIP6.to_bits().to_be_bytes();
        let left_as_vip = from_vip && (destination == FAR_PORT || source == SERVICE_PORT);
        let reached_pod = ip[24..26] == [0xfd, 0] && (source == FAR_PORT || destination == BACKEND_PORT);
        (left_as_vip || reached_pod) && checksum::verifies(pseudo, udp)
    }

    fn is_untouched_reply(frame: &[u8]) -> bool {
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
    fn flows_differ_and_their_packets_are_what_an_independent_parser_expects() {
        let flows: HashSet<_> =
            (0..200_000).map(|n| (Flow::new(n).pod, Flow::new(n).pod_port, Flow::new(n).far)).collect();
        assert_eq!(flows.len(), 200_000);
        let mut frame = [0; 60];
        write_forward(&mut frame, Flow::new(77));
        frame[26..30].copy_from_slice(&VIP.to_be_bytes());
        let left = frame;
        write_forward(&mut frame, Flow::new(77));
        assert!(!u32::is_right(&left) && !u32::is_right(&frame), "as the pod sent it, it must not leave");
        write_reply(&mut frame, Flow::new(77), 5000);
        let mut home = frame;
        write(&mut home, (POD_MAC, INSIDE_MAC), (Flow::new(77).far, 443), (Flow::new(77).pod, 1024));
        assert!(u32::is_right(&home));
        let mut six = [0; 62];
        V6::write_forward(&mut six, Flow::new(77));
        assert!(SlicedPacket::from_ethernet(&six).unwrap().transport.is_some() && !V6::is_right(&six));
        write6(&mut six, (ROUTER_MAC, OUTSIDE_MAC), (VIP6, 9), (far6(1), 443));
        assert!(V6::is_right(&six));
        assert!(SlicedPacket::from_ethernet(&frame).unwrap().transport.is_some());
        home[41] ^= 1;
        assert!(!u32::is_right(&home));
    }

    #[test]
    fn a_segment_is_what_an_independent_parser_expects() {
        let (mut four, mut six) = ([0; 60], [0; 74]);
        for from_pod in [true, false] {
            for step in [Step::Opens, Step::GoesOn] {
                u32::write_forward(&mut four, Flow::new(77));
                V6::write_forward(&mut six, Flow::new(77));
                for frame in [&mut four[..], &mut six[..]] {
                    make_tcp(frame, from_pod, step);
                    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
                    let Some(etherparse::TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("no TCP") };
                    assert_eq!((tcp.destination_port(), tcp.syn()), (FAR_PORT, step == Step::Opens));
                    assert!(tcp.payload().is_empty() && is_right_tcp(frame));
                }
            }
        }
    }
}
