//! The classes of frames, each with all of its members or with random ones.

use std::net::IpAddr;

use vipgate_dataplane::wire::ethernet::{BROADCAST, Mac};

use super::packets::{ETHERNET, Ends, Packet, Upper, echo, icmp, ip, octets, tcp, udp, update_header_checksum};
use super::{Frame, GATEWAY, INNER_ROUTERS, Macs, PODS, ROUTER, Sender};
use crate::flood::Random;
use crate::{EXCLUDED, SERVER, VIP_A, VIP_B};

/// The classes. Every list has members of each.
pub const CLASSES: [&str; 18] = [
    "plain",
    "tags",
    "EtherTypes",
    "LLC and SNAP",
    "MAC addresses",
    "truncated",
    "IPv4 headers",
    "IPv4 options",
    "IPv6 headers",
    "extension headers",
    "protocols",
    "fragments",
    "scopes",
    "neighbor discovery",
    "to the gateway",
    "spoofed outside",
    "errors",
    "errors behind headers",
];

/// Destinations of pods' packets, by family: servers, VIPs, another pod.
const DESTINATIONS: [[&str; 2]; 5] = [SERVER, EXCLUDED, VIP_A, VIP_B, PODS[1]];
/// The pods that send: of both tenants, and the uncovered one.
const SENDERS: [usize; 3] = [0, 2, 3];
/// EtherTypes by family.
const IP: [u16; 2] = [0x0800, 0x86dd];

/// VLAN tags: EtherType and control information. Those with an ID other than 0 are for VLANs that don't exist here.
const TAGS: [&[(u16, u16)]; 12] = [
    &[(0x8100, 0)],
    &[(0x88a8, 0)],
    &[(0x9100, 0)],
    &[(0x8100, 5 << 13)],
    &[(0x8100, 0), (0x8100, 0)],
    &[(0x88a8, 0), (0x8100, 1 << 12)],
    &[(0x8100, 0), (0x88a8, 0), (0x8100, 0)],
    &[(0x8100, 0), (0x8100, 0), (0x8100, 0), (0x8100, 0), (0x8100, 0)],
    &[(0x8100, 5)],
    &[(0x8100, 0), (0x8100, 5)],
    &[(0x8100, 5), (0x8100, 0)],
    &[(0x88a8, 5), (0x8100, 0)],
];
/// Other EtherTypes: ARP, RARP, AppleTalk, PPPoE, MPLS, MACsec, bridging, NSH, LLC of Linux.
const ETHER_TYPES: [u16; 11] = [0x0806, 0x8035, 0x809b, 0x8863, 0x8864, 0x8847, 0x8848, 0x88e5, 0x6558, 0x894f, 0x0004];
/// Options: no-operation, record route, timestamp, router alert, loose and strict source route, unknown, broken ones.
const OPTIONS: [&[u8]; 10] = [
    &[1; 40],
    &[7, 7, 4, 0, 0, 0, 0, 0],
    &[68, 8, 5, 0, 0, 0, 0, 0],
    &[148, 4, 0, 0],
    &[131, 7, 4, 10, 0, 0, 1, 0],
    &[137, 7, 4, 198, 51, 100, 10, 0],
    &[200, 3, 9, 0],
    &[7, 1, 0, 0],
    &[7, 40, 4, 0],
    &[0, 0, 0, 0],
];
/// IPv6 extension headers, and what looks like one: hop-by-hop and destination options (short, long, router alert,
/// jumbo), routing of several types, an atomic fragment, authentication, encryption, mobility, HIP, Shim6, none.
pub(super) const EXTENSIONS: [(u8, &[u8]); 17] = [
    (0, &[0, 0, 1, 4, 0, 0, 0, 0]),
    (60, &[0, 0, 1, 4, 0, 0, 0, 0]),
    (43, &[0, 0, 0, 0, 0, 0, 0, 0]),
    (44, &[0, 0, 0, 0, 0, 0, 0, 7]),
    (60, &[0, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (0, &[0, 0, 5, 2, 0, 0, 1, 0]),
    (0, &[0, 0, 0xc2, 4, 0, 1, 0, 0]),
    (43, &[0, 2, 0, 1, 0, 0, 0, 0, 0x20, 1, 0xd, 0xb8, 0, 0x51, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10]),
    (43, &[0, 2, 2, 1, 0, 0, 0, 0, 0x20, 1, 0xd, 0xb8, 0, 0x51, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10]),
    (43, &[0, 2, 4, 0, 0, 0, 0, 0, 0x20, 1, 0xd, 0xb8, 0, 0x51, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10]),
    (51, &[0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 7, 7, 7, 7]),
    (50, &[0, 0, 0, 1, 0, 0, 0, 1]),
    (135, &[0, 0, 0, 0, 0, 0, 0, 0]),
    (139, &[0, 0, 0, 0, 0, 0, 0, 0]),
    (140, &[0, 0, 0x80, 0, 0, 0, 0, 0]),
    (59, &[0, 0, 0, 0, 0, 0, 0, 0]),
    (253, &[0, 0, 0, 0, 0, 0, 0, 0]),
];
/// Destinations of some scope: multicast, limited and directed broadcast, link-local, reserved.
const SCOPES: [&str; 13] = [
    "224.0.0.5",
    "239.1.1.1",
    "255.255.255.255",
    "203.0.113.255",
    "10.1.0.255",
    "169.254.1.1",
    "169.254.169.254",
    "240.0.0.1",
    "ff02::5",
    "ff05::1:3",
    "ff0e::1",
    "fe80::1",
    "2001:db8:113::",
];

/// The frames of one list, in the order in which each sender sends them.
pub fn list(seed: u64, macs: Macs) -> Vec<Frame> {
    let mut generator = Generator { random: Random(seed), macs, frames: Vec::new(), class: CLASSES[0] };
    generator.open_sessions();
    for (class, add) in CLASSES.into_iter().zip(GENERATORS) {
        generator.class = class;
        add(&mut generator);
    }
    generator.report_on_sessions();
    generator.frames
}

/// A list under construction.
pub(super) struct Generator {
    random: Random,
    macs: Macs,
    frames: Vec<Frame>,
    pub(super) class: &'static str,
}

/// One for each of [`CLASSES`].
const GENERATORS: [fn(&mut Generator); CLASSES.len()] = [
    Generator::plain,
    Generator::tags,
    Generator::ether_types,
    Generator::llc_and_snap,
    Generator::mac_addresses,
    Generator::truncated,
    Generator::ipv4_headers,
    Generator::ipv4_options,
    Generator::ipv6_headers,
    Generator::extension_headers,
    Generator::protocols,
    Generator::fragments,
    Generator::scopes,
    Generator::neighbor_discovery,
    Generator::addressed_to_gateway,
    Generator::spoofed_outside,
    Generator::errors,
    Generator::errors_behind_headers,
];

impl Generator {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.random.next_u64() % limit as u64) as usize
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.random.next_u64() as u8
    }

    /// The number of the next frame.
    pub(super) fn number(&self) -> usize {
        self.frames.len()
    }

    /// A pod, and the ends of a packet of it to anybody.
    fn flow(&mut self, family: usize) -> (usize, Ends) {
        let (pod, to) = (self.pick(&SENDERS), self.pick(&DESTINATIONS));
        (pod, [ip(PODS[pod][family]), ip(to[family])])
    }

    pub(super) fn upper(&mut self, ends: Ends) -> Upper {
        let ports = [4000 + self.below(2000) as u16, self.pick(&[53, 80, 443, 5353, 8080])];
        match self.below(5) {
            0 => tcp(ends, ports, 2),
            1 => tcp(ends, ports, self.pick(&[0x10, 0x11, 0x12, 0x18, 4, 0])),
            2 => echo(ends),
            3 => (132, [&ports.map(u16::to_be_bytes).concat()[..], &[7; 28]].concat()),
            _ => udp(ends, ports),
        }
    }

    /// A packet of a pod to anybody.
    fn packet(&mut self, family: usize) -> (usize, Packet) {
        let (pod, ends) = self.flow(family);
        (pod, Packet::new(ends, self.upper(ends)))
    }

    fn push(&mut self, sender: Sender, bytes: Vec<u8>) {
        self.frames.push(Frame { class: self.class, sender, bytes });
    }

    /// Adds a frame from a pod to the gateway.
    fn push_typed(&mut self, pod: usize, kind: u16, packet: &[u8]) {
        let macs = [self.macs.gateway[0], self.macs.pods[pod]].concat();
        self.push(Sender::Pod(pod), [&macs[..], &kind.to_be_bytes(), packet].concat());
    }

    /// Adds a packet from a pod to the gateway.
    pub(super) fn push_packet(&mut self, pod: usize, family: usize, packet: &[u8]) {
        self.push_typed(pod, IP[family], packet);
    }

    fn plain(&mut self) {
        for family in [0, 1] {
            for (pod, to) in SENDERS.into_iter().flat_map(|pod| DESTINATIONS.map(|to| (pod, to))) {
                let ends = [ip(PODS[pod][family]), ip(to[family])];
                for upper in [tcp(ends, [4000, 80], 2), udp(ends, [4001, 5353]), echo(ends), self.upper(ends)] {
                    let packet = Packet::new(ends, upper).build(self.number());
                    self.push_packet(pod, family, &packet);
                }
            }
            // As long as a frame may be.
            let (pod, ends) = self.flow(family);
            let packet = Packet::new(ends, (17, vec![9; 1500 - [20, 40][family]])).build(self.number());
            self.push_packet(pod, family, &packet);
        }
    }

    fn tags(&mut self) {
        for (tags, family) in TAGS.into_iter().flat_map(|tags| [(tags, 0), (tags, 1)]) {
            for _ in 0..4 {
                let (pod, packet) = self.packet(family);
                let packet = packet.build(self.number());
                let tags: Vec<u16> = tags.iter().flat_map(|(kind, control)| [*kind, *control]).collect();
                let words: Vec<u8> = tags[1..].iter().chain([&IP[family]]).flat_map(|it| it.to_be_bytes()).collect();
                self.push_typed(pod, tags[0], &[&words[..], &packet].concat());
            }
        }
    }

    fn ether_types(&mut self) {
        for family in [0, 1] {
            let (pod, packet) = self.packet(family);
            let packet = packet.build(self.number());
            self.push_typed(pod, IP[1 - family], &packet);
            for (kind, prefix) in ETHER_TYPES.into_iter().flat_map(|kind| [0, 4, 8].map(|prefix| (kind, prefix))) {
                let (pod, packet) = self.packet(family);
                let packet = [&[0, 1, 1, 64, 0, 0, 0, 0x21][..prefix], &packet.build(self.number())].concat();
                self.push_typed(pod, kind, &packet);
            }
        }
    }

    fn llc_and_snap(&mut self) {
        for (family, kind) in [(0, [8, 0]), (1, [0x86, 0xdd])] {
            for header in [&[0xaa, 0xaa, 3, 0, 0, 0, kind[0], kind[1]][..], &[6, 6, 3], &[0xfe, 0xfe, 3, 0xcc]] {
                let (pod, packet) = self.packet(family);
                let packet = [header, &packet.build(self.number())].concat();
                self.push_typed(pod, packet.len() as u16, &packet);
            }
        }
    }

    fn mac_addresses(&mut self) {
        let [inside, outside] = self.macs.gateway;
        let multicast: [Mac; 2] = [[1, 0, 0x5e, 0, 0, 5], [0x33, 0x33, 0, 0, 0, 5]];
        let macs = [inside, outside, BROADCAST, multicast[0], multicast[1], [2, 0, 0, 0, 9, 9]];
        for (mac, family) in macs.into_iter().flat_map(|mac| [(mac, 0), (mac, 1)]) {
            for _ in 0..4 {
                let (pod, packet) = self.packet(family);
                let packet = packet.build(self.number());
                let macs = [mac, self.macs.pods[pod]].concat();
                self.push(Sender::Pod(pod), [&macs[..], &IP[family].to_be_bytes(), &packet].concat());
            }
        }
    }

    fn truncated(&mut self) {
        for (family, is_tagged) in [(0, false), (0, true), (1, false), (1, true)] {
            for length in ETHERNET..=80 {
                let (pod, packet) = self.packet(family);
                let packet = packet.build(self.number());
                let tag: &[u8] = if is_tagged { &[0x81, 0, 0, 0] } else { &[] };
                let macs = [self.macs.gateway[0], self.macs.pods[pod]].concat();
                let mut frame = [&macs[..], tag, &IP[family].to_be_bytes(), &packet].concat();
                frame.truncate(length);
                self.push(Sender::Pod(pod), frame);
            }
        }
    }

    /// Adds a pod's packet with some bytes replaced, with the checksum of its IPv4 header.
    fn push_changed(&mut self, family: usize, changes: &[(usize, &[u8])]) {
        let (pod, packet) = self.packet(family);
        let mut packet = packet.build(self.number());
        for (at, bytes) in changes {
            packet[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        if family == 0 {
            update_header_checksum(&mut packet);
        }
        self.push_packet(pod, family, &packet);
    }

    fn ipv4_headers(&mut self) {
        for version_and_length in 0..=255_u8 {
            self.push_changed(0, &[(0, &[version_and_length])]);
        }
        for length in [0_u16, 1, 19, 20, 21, 28, 40, 47, 49, 59, 61, 69, 1500, 0xffff] {
            self.push_changed(0, &[(2, &length.to_be_bytes())]);
        }
        for ttl in [0, 1, 2, 255] {
            self.push_changed(0, &[(8, &[ttl])]);
        }
        for flags in [0, 0x80, 0xc0] {
            self.push_changed(0, &[(6, &[flags, 0])]);
        }
        let (pod, packet) = self.packet(0);
        let mut packet = packet.build(self.number());
        packet[10] ^= 0xff;
        self.push_packet(pod, 0, &packet);
    }

    fn ipv4_options(&mut self) {
        let lengths = (1..=10).map(|words| vec![1; words * 4]);
        let random: Vec<Vec<u8>> = (1..=20).map(|n| (0..n % 10 * 4 + 4).map(|_| self.byte()).collect()).collect();
        for options in OPTIONS.map(<[u8]>::to_vec).into_iter().chain(lengths).chain(random) {
            let (pod, mut packet) = self.packet(0);
            packet.options = options;
            let packet = packet.build(self.number());
            self.push_packet(pod, 0, &packet);
        }
    }

    fn ipv6_headers(&mut self) {
        for version in 0..=15_u8 {
            self.push_changed(1, &[(0, &[version << 4])]);
        }
        for length in [0_u16, 1, 7, 8, 27, 29, 47, 49, 1400, 0xffff] {
            self.push_changed(1, &[(4, &length.to_be_bytes())]);
        }
        for hops in [0, 1, 2, 255] {
            self.push_changed(1, &[(7, &[hops])]);
        }
    }

    fn extension_headers(&mut self) {
        let mut chains: Vec<Vec<(u8, &[u8])>> = EXTENSIONS.iter().map(|it| vec![*it]).collect();
        chains.extend((0..60).map(|_| vec![self.pick(&EXTENSIONS), self.pick(&EXTENSIONS)]));
        chains.extend((3..20).map(|count| vec![EXTENSIONS[1]; count]));
        chains.extend((0..20).map(|_| (0..5).map(|_| self.pick(&EXTENSIONS)).collect::<Vec<_>>()));
        for chain in chains {
            let (pod, mut packet) = self.packet(1);
            packet.extensions = chain.into_iter().map(|(number, bytes)| (number, bytes.to_vec())).collect();
            let packet = packet.build(self.number());
            self.push_packet(pod, 1, &packet);
        }
    }

    /// Of pods, and of a router inside.
    fn protocols(&mut self) {
        for (protocol, family) in (0..=255).flat_map(|protocol| [(protocol, 0), (protocol, 1)]) {
            let (pod, ends) = self.flow(family);
            let router = [ip(self.pick(&INNER_ROUTERS)[family]), ip(self.pick(&[SERVER, EXCLUDED])[family])];
            for (pod, ends) in [(pod, ends), (3, router)] {
                let payload = (0..24).map(|_| self.byte()).collect();
                let packet = Packet::new(ends, (protocol, payload)).build(self.number());
                self.push_packet(pod, family, &packet);
            }
        }
    }

    fn fragments(&mut self) {
        for (family, units) in [0, 1].into_iter().flat_map(|family| [1, 2, 4].map(|units| (family, units))) {
            for _ in 0..6 {
                let (pod, packet) = self.packet(family);
                let number = self.number();
                let in_order = packet.fragments(number, units);
                let reversed: Vec<_> = in_order.iter().rev().cloned().collect();
                let first = in_order[..1].to_vec();
                let later = in_order[1..].to_vec();
                let overlapping = [packet.fragments(number, units + 1), in_order.clone()].concat();
                let fragments = match self.below(5) {
                    0 => reversed,
                    1 => first,
                    2 => later,
                    3 => overlapping,
                    _ => in_order,
                };
                for fragment in &fragments {
                    self.push_packet(pod, family, fragment);
                }
            }
        }
    }

    fn scopes(&mut self) {
        for (to, pod) in SCOPES.into_iter().flat_map(|to| SENDERS.map(|pod| (to, pod))) {
            let family = usize::from(to.contains(':'));
            let ends = [ip(PODS[pod][family]), ip(to)];
            let packet = Packet::new(ends, self.upper(ends)).build(self.number());
            self.push_packet(pod, family, &packet);
            let group = match ends[1] {
                IpAddr::V4(v4) => [1, 0, 0x5e, v4.octets()[1] & 0x7f, v4.octets()[2], v4.octets()[3]],
                IpAddr::V6(v6) => [0x33, 0x33, v6.octets()[12], v6.octets()[13], v6.octets()[14], v6.octets()[15]],
            };
            let macs = [group, self.macs.pods[pod]].concat();
            let packet = Packet::new(ends, self.upper(ends)).build(self.number());
            self.push(Sender::Pod(pod), [&macs[..], &IP[family].to_be_bytes(), &packet].concat());
        }
    }

    /// ARP, and neighbor discovery for what isn't on the pods' link. The gateway alone gets it: pods would change
    /// routes.
    fn neighbor_discovery(&mut self) {
        let targets = [SERVER, VIP_A, ROUTER, GATEWAY[1]];
        for (target, pod) in targets.into_iter().flat_map(|to| SENDERS.map(|pod| (to, pod))) {
            let mac = self.macs.pods[pod];
            for operation in [1, 2] {
                let [sender, target] = [PODS[pod][0], target[0]].map(|address| octets(ip(address)));
                let arp = [&[0, 1, 8, 0, 6, 4, 0, operation][..], &mac, &sender, &[0; 6], &target].concat();
                self.push_typed(pod, 0x0806, &arp);
            }
            for (kind, to) in (133..=137).flat_map(|kind| [target[1], GATEWAY[0][1], "ff02::1"].map(|to| (kind, to))) {
                let ends = [ip(PODS[pod][1]), ip(to)];
                let body = match kind {
                    133 => vec![],
                    // No default router: the lifetime is 0.
                    134 => vec![0; 8],
                    137 => octets(ip(target[1])).repeat(2),
                    _ => octets(ip(target[1])),
                };
                let mut packet = Packet::new(ends, icmp(ends, [kind, 0], [0; 4], &body));
                packet.ttl = self.pick(&[255, 64]);
                let packet = packet.build(self.number());
                self.push_packet(pod, 1, &packet);
            }
        }
    }

    fn addressed_to_gateway(&mut self) {
        for (gateway, pod) in GATEWAY.into_iter().flat_map(|to| SENDERS.map(|pod| (to, pod))) {
            for family in [0, 1, 0, 1, 0, 1] {
                let ends = [ip(PODS[pod][family]), ip(gateway[family])];
                let packet = Packet::new(ends, self.upper(ends)).build(self.number());
                self.push_packet(pod, family, &packet);
            }
        }
    }

    /// With a covered pod's address as source, from the router outside.
    fn spoofed_outside(&mut self) {
        for (to, family) in DESTINATIONS.into_iter().flat_map(|to| [(to, 0), (to, 1)]) {
            for pod in [0, 2] {
                let ends = [ip(PODS[pod][family]), ip(to[family])];
                let packet = Packet::new(ends, self.upper(ends)).build(self.number());
                let macs = [self.macs.gateway[1], self.macs.router].concat();
                self.push(Sender::Router, [&macs[..], &IP[family].to_be_bytes(), &packet].concat());
            }
        }
    }
}
