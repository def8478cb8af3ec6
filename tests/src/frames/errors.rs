//! ICMP errors of routers inside: about packets to pods and of pods, with and without a session.

use std::net::IpAddr;

use super::classes::{EXTENSIONS, Generator};
use super::packets::{Ends, Packet, icmp, ip, udp};
use super::{INNER_ROUTERS, PODS};
use crate::{EXCLUDED, SERVER};

/// Ports of a session of p1 with the server that the list opens first, and that errors at its end are about.
pub const SESSION: [u16; 2] = [3999, 9];

/// Types of errors, by family: unreachable, source quench, redirect, time exceeded, parameter problem; unreachable, too
/// big, time exceeded, parameter problem.
const KINDS: [&[u8]; 2] = [&[3, 4, 5, 11, 12], &[1, 2, 3, 4]];
/// Time exceeded, by family.
const EXPIRED: [u8; 2] = [11, 3];
/// The host that sends in place of routers.
const HOST: usize = 3;
/// Extension headers of [`EXTENSIONS`] with eight bytes, as a packet of a router might have.
const SHORT_EXTENSIONS: usize = 4;

impl Generator {
    pub(super) fn open_sessions(&mut self) {
        for family in [0, 1] {
            let ends = [ip(PODS[0][family]), ip(SERVER[family])];
            let packet = Packet::new(ends, udp(ends, SESSION)).build(self.number());
            self.push_packet(0, family, &packet);
        }
    }

    /// The last errors of the list, about replies in the sessions that it has opened first.
    pub(super) fn report_on_sessions(&mut self) {
        self.class = "errors";
        for (router, family) in INNER_ROUTERS.into_iter().flat_map(|router| [(router, 0), (router, 1)]) {
            let [pod, server] = [PODS[0][family], SERVER[family]].map(ip);
            let reply = [server, pod];
            let quote = Packet::new(reply, udp(reply, [SESSION[1], SESSION[0]])).build(0);
            for _ in 0..3 {
                let ends = [ip(router[family]), server];
                self.push_error(family, &error(ends, [EXPIRED[family], 0], &quote));
            }
        }
    }

    pub(super) fn errors(&mut self) {
        for (kind, family) in (0..=255).flat_map(|kind| [(kind, 0), (kind, 1)]) {
            let code = self.below(16) as u8;
            let packet = self.error(family, [kind, code], usize::MAX);
            self.push_error(family, &packet);
        }
        for (length, family) in (0..=60).flat_map(|length| [(length, 0), (length, 1)]) {
            let packet = self.error(family, [EXPIRED[family], 0], length);
            self.push_error(family, &packet);
        }
        for family in [0, 1].repeat(100) {
            let message = [self.pick(KINDS[family]), self.below(6) as u8];
            let length = if self.below(4) == 0 { self.below(100) } else { usize::MAX };
            let packet = self.error(family, message, length);
            self.push_error(family, &packet);
        }
    }

    /// Behind IPv4 options, behind extension headers, and in fragments.
    pub(super) fn errors_behind_headers(&mut self) {
        for words in 1..=10 {
            let mut packet = self.error(0, [EXPIRED[0], 0], usize::MAX);
            packet.options = vec![1; words * 4];
            self.push_error(0, &packet);
        }
        let short = &EXTENSIONS[..SHORT_EXTENSIONS];
        let pairs = short.iter().flat_map(|first| short.iter().map(move |second| vec![*first, *second]));
        for chain in short.iter().map(|it| vec![*it]).chain(pairs) {
            let mut packet = self.error(1, [EXPIRED[1], 0], usize::MAX);
            packet.extensions = chain.into_iter().map(|(number, bytes)| (number, bytes.to_vec())).collect();
            self.push_error(1, &packet);
        }
        for (units, family) in (1..=8).flat_map(|units| [(units, 0), (units, 1)]) {
            let packet = self.error(family, [EXPIRED[family], 0], usize::MAX);
            for fragment in packet.fragments(self.number(), units) {
                self.push_packet(HOST, family, &fragment);
            }
        }
    }

    fn push_error(&mut self, family: usize, packet: &Packet) {
        let packet = packet.build(self.number());
        self.push_packet(HOST, family, &packet);
    }

    /// An error of a router inside to somebody outside; it quotes at most `length` bytes.
    fn error(&mut self, family: usize, message: [u8; 2], length: usize) -> Packet {
        let ends = [self.pick(&INNER_ROUTERS), self.pick(&[SERVER, EXCLUDED])].map(|both| ip(both[family]));
        let mut quote = self.quote(family, ends[1]);
        quote.truncate(length);
        error(ends, message, &quote)
    }

    /// A packet of or to a pod: whole, in fragments, an error, of the other family.
    fn quote(&mut self, family: usize, receiver: IpAddr) -> Vec<u8> {
        let pod = ip(self.pick(&PODS)[family]);
        let ends = match self.below(4) {
            0 => [pod, receiver],
            1 => [ip(self.pick(&[SERVER, EXCLUDED])[family]), pod],
            _ => [receiver, pod],
        };
        let packet = Packet::new(ends, self.upper(ends));
        match self.below(8) {
            0 => packet.fragments(7, 1).swap_remove(self.below(2)),
            1 => {
                let request = Packet::new([ends[1], ends[0]], self.upper([ends[1], ends[0]])).build(7);
                error(ends, [KINDS[family][0], 0], &request).build(7)
            }
            2 => {
                let ends = [SERVER, self.pick(&PODS)].map(|both| ip(both[1 - family]));
                Packet::new(ends, self.upper(ends)).build(7)
            }
            _ => packet.build(7),
        }
    }
}

fn error(ends: Ends, message: [u8; 2], quote: &[u8]) -> Packet {
    Packet::new(ends, icmp(ends, message, [0; 4], quote))
}
