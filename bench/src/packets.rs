//! The packets of a flow, by its number: UDP over IPv4, written into a frame without any table.

use vipgate_dataplane::wire::checksum;
use vipgate_dataplane::wire::ethernet::Mac;

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
        Self { pod: FIRST_POD + pod, pod_port: 1024 + port as u16, far: FIRST_FAR + far, far_port: 443 }
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
    frame[..6].copy_from_slice(&link.0);
    frame[6..12].copy_from_slice(&link.1);
    frame[12..14].copy_from_slice(&[8, 0]);
    let ip = &mut frame[14..34];
    ip.copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip[12..16].copy_from_slice(&source.0.to_be_bytes());
    ip[16..20].copy_from_slice(&destination.0.to_be_bytes());
    let sum = checksum::checksum(0, ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let udp = &mut frame[34..];
    udp[..2].copy_from_slice(&source.1.to_be_bytes());
    udp[2..4].copy_from_slice(&destination.1.to_be_bytes());
    udp[4..6].copy_from_slice(&(total - 20).to_be_bytes());
    udp[6..8].fill(0);
    let pseudo = [source.0, destination.0].iter().map(|word| (word >> 16) + (word & 0xffff)).sum::<u32>();
    let sum = checksum::checksum(pseudo + 17 + u32::from(total - 20), udp);
    udp[6..8].copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
}

/// Whether both checksums of a packet are right.
pub(crate) fn is_right(frame: &[u8]) -> bool {
    let (ip, udp) = frame[14..].split_at(20);
    let length = udp.len() as u32;
    let pseudo = checksum::sum(&ip[12..20]) + 17 + length;
    checksum::verifies(0, ip) && checksum::verifies(pseudo, udp)
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
        assert!(is_right(&frame));
        assert!(SlicedPacket::from_ethernet(&frame).unwrap().transport.is_some());
        frame[40] ^= 1;
        assert!(!is_right(&frame));
    }
}
