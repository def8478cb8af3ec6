//! The scenario of a batch boundary test: packets and events, independent of batches.

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::net::SocketAddr;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_testkit::*;

use crate::fragments::udp_fragments;

/// Payload of a fragmented datagram: four fragments.
const DATAGRAM: usize = 1400;

/// An event between packets. All packets before it are sent by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GatewayEvent {
    Advance(u32),
    Policy(PolicyVariant),
    Flush,
    /// The process ends, and its successor restores its sessions.
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolicyVariant {
    Whole,
    NoPod,
    OtherVip,
    Excluded,
    Limited,
    NoBackend,
}

/// Identity of a packet: its tag, its flow, and the datagram that it is a fragment of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PacketId {
    pub(crate) tag: u32,
    pub(crate) flow: u32,
    /// 0: not a fragment.
    pub(crate) datagram: u32,
    /// Whether it may open a session; packets of the other direction then wait for it.
    pub(crate) may_open_session: bool,
}

/// Flag of a flow: the reply direction.
pub(crate) const REPLY_DIRECTION: u32 = 1 << 31;

/// One packet or event.
#[derive(Clone)]
pub(crate) enum Action {
    Packet {
        id: PacketId,
        class: &'static str,
        interface: InterfaceId,
        bytes: Vec<u8>,
    },
    /// The receiver of packet `to` replies: with a whole packet, or with this fragment.
    Reply {
        id: PacketId,
        to: u32,
        flags: &'static str,
        fragment: Option<usize>,
    },
    /// A router reports that packet `about` was undeliverable.
    Error {
        id: PacketId,
        about: u32,
        mtu: bool,
    },
    Event(GatewayEvent),
}

impl Debug for Action {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packet { id, class, bytes, .. } => {
                let seen = PacketSummary::of(bytes);
                let ends = seen.map(|it| (it.source, it.destination, it.ports));
                let flags = bytes.get(47).filter(|_| bytes[12] == 8 && bytes[23] == 6);
                write!(f, "{}: {class} {ends:?} {flags:02x?} of {:x}", id.tag, id.flow)
            }
            Self::Reply { id, to, flags, fragment } => {
                write!(f, "{}: reply to {to} {flags} {fragment:?}", id.tag)
            }
            Self::Error { id, about, .. } => write!(f, "{}: error about {about}", id.tag),
            Self::Event(event) => write!(f, "{event:?}"),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send {
        from: SocketAddr,
        to: SocketAddr,
        protocol: Protocol,
        flags: &'static [&'static str],
        ttl: u8,
    },
    Fragments {
        from: SocketAddr,
        to: SocketAddr,
        order: Vec<usize>,
        overlap: bool,
    },
    Reply {
        which: Index,
        flags: &'static str,
        fragments: Option<Vec<usize>>,
    },
    Error {
        which: Index,
        mtu: bool,
    },
    /// A client's connection with its only backend, in any batches.
    ServiceConnection {
        client: u16,
        v6: bool,
        flags: &'static [(&'static str, bool)],
    },
    Event(GatewayEvent),
}

/// The backend of all clients, in each address family.
pub(crate) const BACKENDS: [&str; 2] = ["10.244.1.6", "fd00:244:1::6"];
const SEGMENT_SEQUENCES: [&[&str]; 7] =
    [&["S"], &["S", "A", "PA"], &["S", "PA", "FA"], &["S", "R"], &["A"], &["S", "S", "FA", "S"], &["FA", "S"]];
/// Segments of a client's connection, and whether the backend sends them.
const SERVICE_CONNECTIONS: [&[(&str, bool)]; 4] = [
    &[("S", false), ("SA", true), ("A", false), ("PA", true)],
    &[("S", false), ("SA", true), ("A", false), ("FA", false), ("FA", true), ("S", false), ("SA", true)],
    &[("S", false), ("R", true), ("S", false)],
    &[("S", false), ("SA", true), ("PA", false), ("R", false), ("PA", true)],
];

fn order() -> impl Strategy<Value = Vec<usize>> {
    let whole = Just((0..4).collect::<Vec<usize>>()).prop_shuffle();
    (whole, prop::collection::vec(0..4_usize, 0..3)).prop_map(|(mut order, more)| {
        order.extend(more);
        order
    })
}

fn step() -> impl Strategy<Value = Step> {
    let v4 = (
        select(vec!["10.244.1.5", "10.244.1.6", "10.244.1.21"]),
        select(vec!["198.51.100.10:53", "198.51.100.11:443", "192.0.2.10:80"]),
    );
    let v6 =
        (select(vec!["fd00:244:1::5", "fd00:244:1::6"]), select(vec!["[2001:db8:51::10]:53", "[2001:db8::10]:80"]));
    let ends = || {
        prop_oneof![3 => v4.clone(), 1 => v6.clone()]
            .prop_flat_map(|(pod, remote)| (4000..4003_u16).prop_map(move |port| ((ip(pod), port).into(), at(remote))))
    };
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 2 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    let ttl = prop_oneof![15 => Just(64_u8), 1 => Just(1)];
    let flags = || select(vec!["SA", "A", "FA", "R", "PA"]);
    let changes = vec![
        PolicyVariant::Whole,
        PolicyVariant::Whole,
        PolicyVariant::NoPod,
        PolicyVariant::OtherVip,
        PolicyVariant::Excluded,
        PolicyVariant::Limited,
        PolicyVariant::Limited,
        PolicyVariant::Limited,
        PolicyVariant::NoBackend,
    ];
    let event = prop_oneof![
        3 => select(vec![10_u32, 4_000, 12_000]).prop_map(GatewayEvent::Advance),
        4 => select(changes).prop_map(GatewayEvent::Policy),
        1 => Just(GatewayEvent::Flush),
        1 => Just(GatewayEvent::Restart),
    ];
    let (from, to) = (at("198.51.100.10:9"), at("192.0.2.10:9"));
    let stray = Step::Send { from, to, protocol: Protocol::Udp, flags: &[], ttl: 64 };
    prop_oneof![
        8 => (ends(), protocol, select(SEGMENT_SEQUENCES.to_vec()), ttl)
            .prop_map(|((from, to), protocol, flags, ttl)| Step::Send { from, to, protocol, flags, ttl }),
        5 => (ends(), order(), prop::bool::weighted(0.2))
            .prop_map(|((from, to), order, overlap)| Step::Fragments { from, to, order, overlap }),
        6 => (any::<Index>(), flags(), prop::option::weighted(0.3, order()))
            .prop_map(|(which, flags, fragments)| Step::Reply { which, flags, fragments }),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(which, mtu)| Step::Error { which, mtu }),
        3 => (0..3_u16, any::<bool>(), select(SERVICE_CONNECTIONS.to_vec()))
            .prop_map(|(client, v6, flags)| Step::ServiceConnection { client, v6, flags }),
        1 => Just(stray),
        2 => event.prop_map(Step::Event),
    ]
}

/// A scenario. `pipelined`: some replies arrive without waiting for the packet that they reply to.
pub(crate) fn scenarios(pipelined: bool) -> impl Strategy<Value = Vec<Action>> {
    prop::collection::vec(step(), 4..40).prop_map(move |steps| actions(steps, pipelined))
}

fn actions(steps: Vec<Step>, pipelined: bool) -> Vec<Action> {
    let mut script = Script::default();
    for (n, step) in steps.into_iter().enumerate() {
        script.add(step, n as u32 + 1, pipelined);
    }
    script.actions
}

/// Pods with a policy and without one, also from ports of their Services.
const PODS: [&str; 4] = ["10.244.1.5", "10.244.1.6", "10.244.1.21", "10.244.1.7"];
const PODS_V6: [&str; 3] = ["fd00:244:1::5", "fd00:244:1::6", "fd00:244:1::7"];
const POD_PORTS: [u16; 5] = [4000, 4001, 4002, 8080, 5353];
/// Clients outside; policy excludes the second one.
const CLIENTS: [&str; 2] = ["198.51.100.10", "198.51.100.11"];
const CLIENTS_V6: [&str; 2] = ["2001:db8:51::10", "2001:db8:51::11"];
/// The backend that isn't a pod.
pub(crate) const OUTSIDE_BACKEND: &str = "198.51.100.50";
/// The backend that is a pod without a policy.
pub(crate) const UNCOVERED_BACKEND: &str = "10.244.1.7";
const FRONTENDS: [&str; 6] =
    ["192.0.2.10:80", "192.0.2.10:53", "192.0.2.11:80", "192.0.2.11:81", "192.0.2.11:90", "192.0.2.11:91"];
const FRONTENDS_V6: [&str; 2] = ["[2001:db8::10]:80", "[2001:db8::10]:53"];

fn step_beside_services() -> impl Strategy<Value = Step> {
    let of = |hosts: &'static [&'static str], ports: &'static [u16]| {
        (select(hosts), select(ports)).prop_map(|(host, port)| SocketAddr::new(ip(host), port))
    };
    let ends = prop_oneof![
        4 => (of(&CLIENTS, &[7000, 7001]), select(&FRONTENDS[..]).prop_map(at)),
        2 => (of(&CLIENTS_V6, &[7000, 7001]), select(&FRONTENDS_V6[..]).prop_map(at)),
        2 => (of(&PODS, &POD_PORTS), select(&FRONTENDS[..]).prop_map(at)),
        1 => (of(&PODS_V6, &POD_PORTS), select(&FRONTENDS_V6[..]).prop_map(at)),
        2 => (of(&PODS, &POD_PORTS), of(&CLIENTS, &[53, 443, 7000])),
        1 => (of(&PODS_V6, &POD_PORTS), of(&CLIENTS_V6, &[53, 443, 7000])),
        1 => (of(&PODS, &POD_PORTS), of(&PODS, &POD_PORTS)),
    ];
    let protocol = prop_oneof![4 => Just(Protocol::Tcp), 3 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    let ttl = prop_oneof![15 => Just(64_u8), 1 => Just(1)];
    // A backend's bare SYN belongs to its client's connection, too: both have opened it at once.
    let reply_flags = select(vec!["SA", "SA", "A", "FA", "R", "PA", "S"]);
    let changes = vec![PolicyVariant::Whole, PolicyVariant::NoPod, PolicyVariant::OtherVip, PolicyVariant::NoBackend];
    let event = prop_oneof![
        3 => select(vec![10_u32, 4_000, 12_000]).prop_map(GatewayEvent::Advance),
        3 => select(changes).prop_map(GatewayEvent::Policy),
        1 => Just(GatewayEvent::Flush),
        1 => Just(GatewayEvent::Restart),
    ];
    prop_oneof![
        8 => (ends.clone(), protocol, select(SEGMENT_SEQUENCES.to_vec()), ttl)
            .prop_map(|((from, to), protocol, flags, ttl)| Step::Send { from, to, protocol, flags, ttl }),
        2 => (ends, order(), prop::bool::weighted(0.2))
            .prop_map(|((from, to), order, overlap)| Step::Fragments { from, to, order, overlap }),
        12 => (any::<Index>(), reply_flags, prop::option::weighted(0.2, order()))
            .prop_map(|(which, flags, fragments)| Step::Reply { which, flags, fragments }),
        3 => (any::<Index>(), any::<bool>()).prop_map(|(which, mtu)| Step::Error { which, mtu }),
        2 => event.prop_map(Step::Event),
    ]
}

/// A scenario among Services that share backends.
pub(crate) fn scenarios_beside_services() -> impl Strategy<Value = Vec<Action>> {
    prop::collection::vec(step_beside_services(), 4..60).prop_map(|steps| actions(steps, false))
}

/// The quarantine of the ports of ended sessions.
pub(crate) const QUARANTINE_MS: u32 = 2_000;

#[derive(Default)]
struct Script {
    actions: Vec<Action>,
    flows: BTreeMap<(SocketAddr, SocketAddr, u8), u32>,
    /// Whole packets, which may get replies, with their time. Old ones are left out: another session may have their
    /// port by then, or may not, as ports are random.
    whole: Vec<(PacketId, u32)>,
    now: u32,
}

impl Script {
    fn next_id(&mut self, flow: u32, datagram: u32, opens: bool) -> PacketId {
        PacketId { tag: self.actions.len() as u32 + 1, flow, datagram, may_open_session: opens }
    }

    fn flow(&mut self, from: SocketAddr, to: SocketAddr, protocol: Protocol) -> u32 {
        let next = self.flows.len() as u32;
        *self.flows.entry((from, to, protocol as u8)).or_insert(next)
    }

    fn packet(&mut self, id: PacketId, class: &'static str, mut bytes: Vec<u8>) {
        let is_inside = bytes[..6] == INSIDE_MAC;
        write_tag(&mut bytes, id.tag);
        let interface = if is_inside { INSIDE } else { OUTSIDE };
        self.actions.push(Action::Packet { id, class, interface, bytes });
    }

    fn add(&mut self, step: Step, number: u32, pipelined: bool) {
        match step {
            Step::Send { from, to, protocol, flags, ttl } => {
                let flow = self.flow(from, to, protocol);
                for flags in if protocol == Protocol::Tcp { flags } else { &["", ""][..] } {
                    let opens = protocol != Protocol::Tcp || *flags == "S";
                    let id = self.next_id(flow, 0, opens);
                    let mut bytes = taggable_packet(protocol, from, to, flags);
                    set_ttl(&mut bytes, ttl);
                    self.whole.push((id, self.now));
                    self.packet(id, "whole", bytes);
                }
            }
            Step::Fragments { from, to, order, overlap } => {
                self.add_fragments((from, to), order, overlap, number);
            }
            Step::Reply { which, flags, fragments } => {
                let Some((to, _)) = self.whole.get(which.index(self.whole.len().max(1))).copied() else { return };
                let flow = to.flow ^ REPLY_DIRECTION;
                for fragment in fragments.map_or(vec![None], |order| order.into_iter().map(Some).collect()) {
                    let id = self.next_id(flow, if fragment.is_some() { number } else { 0 }, false);
                    self.actions.push(Action::Reply { id, to: to.tag, flags, fragment });
                }
            }
            Step::Error { which, mtu } => {
                let Some((about, _)) = self.whole.get(which.index(self.whole.len().max(1))).copied() else { return };
                let id = self.next_id(about.flow ^ REPLY_DIRECTION, 0, false);
                self.actions.push(Action::Error { id, about: about.tag, mtu });
            }
            Step::ServiceConnection { client, v6, flags } if pipelined => {
                self.add_service_connection(client, v6, flags);
            }
            Step::ServiceConnection { .. } => {}
            Step::Event(event) => {
                if let GatewayEvent::Advance(ms) = event {
                    self.now += ms;
                    self.whole.retain(|&(_, received)| self.now - received < QUARANTINE_MS);
                }
                self.actions.push(Action::Event(event));
            }
        }
    }

    /// The fragments of datagram `number`, in this order.
    fn add_fragments(&mut self, (from, to): (SocketAddr, SocketAddr), order: Vec<usize>, overlap: bool, number: u32) {
        let flow = self.flow(from, to, Protocol::Udp);
        let mut all = udp_fragments(from, to, DATAGRAM, number);
        if overlap && from.is_ipv4() {
            // It begins before the end of another fragment.
            let mut overlapping = all[2].clone();
            overlapping[20..22].copy_from_slice(&(0x2000_u16 + 90).to_be_bytes());
            update_header_checksum(&mut overlapping);
            all[3] = overlapping;
        }
        let first = order.iter().position(|fragment| *fragment == 0);
        let class = if overlap {
            "overlap"
        } else if first == Some(0) {
            "first fragment first"
        } else {
            "first fragment later"
        };
        for fragment in order {
            let id = self.next_id(flow, number, true);
            self.packet(id, class, all[fragment].clone());
        }
    }

    /// A client's connection with its backend, and an ICMP error about it.
    fn add_service_connection(&mut self, client: u16, v6: bool, flags: &[(&str, bool)]) {
        let clients = ["198.51.100.10", "2001:db8:51::10"];
        let (client, vip) =
            ((ip(clients[usize::from(v6)]), 7000 + client).into(), ["192.0.2.10:80", "[2001:db8::10]:80"]);
        let (vip, backend) = (at(vip[usize::from(v6)]), (ip(BACKENDS[usize::from(v6)]), 8080).into());
        let flow = self.flow(client, vip, Protocol::Tcp);
        for (flags, is_backend) in flags {
            let (from, to) = if *is_backend { (backend, client) } else { (client, vip) };
            let flow = if *is_backend { flow | REPLY_DIRECTION } else { flow };
            let id = self.next_id(flow, 0, *flags == "S");
            self.whole.push((id, self.now));
            self.packet(id, "service connection", taggable_packet(Protocol::Tcp, from, to, flags));
        }
        // The backend's node reports that the client's first packet was undeliverable.
        let id = self.next_id(flow | REPLY_DIRECTION, 0, false);
        let mut quoted = taggable_packet(Protocol::Tcp, client, backend, "S");
        write_tag(&mut quoted, id.tag);
        let node = if v6 { "fd00:244:1::5" } else { "10.244.1.5" };
        let error = vipgate_dataplane::wire::icmp_error::IcmpError::HostUnreachable;
        let bytes = crate::icmp::error_about(&quoted, node, error, true);
        self.actions.push(Action::Packet { id, class: "pipelined error", interface: INSIDE, bytes });
    }
}

/// A segment, datagram or echo request with space for a tag at its end.
pub(crate) fn taggable_packet(protocol: Protocol, from: SocketAddr, to: SocketAddr, flags: &str) -> Vec<u8> {
    match protocol {
        Protocol::Tcp => {
            let (sequence, ack) = match flags {
                "S" => (1000, 0),
                "SA" => (5000, 1001),
                _ => (1001, 5001),
            };
            let mut bytes = tcp(from, to, flags, sequence, ack);
            bytes.extend([0; 4]);
            bytes
        }
        Protocol::Udp => {
            let mut bytes = Vec::new();
            let builder = on_ip(from, to);
            builder.udp(from.port(), to.port()).write(&mut bytes, &[0; 4]).unwrap();
            bytes
        }
        Protocol::Echo => echo(true, from, to, from.port()),
    }
}

/// Writes the packet's tag at its end, and updates lengths and checksums.
pub(crate) fn write_tag(bytes: &mut Vec<u8>, tag: u32) {
    let at = bytes.len() - 4;
    bytes[at..].copy_from_slice(&tag.to_be_bytes());
    let v4 = bytes[12] == 8;
    let (protocol, l4) = if v4 { (bytes[23], 34) } else { (bytes[20], 54) };
    let is_fragment = v4 && u16::from_be_bytes([bytes[20], bytes[21]]) & 0x3fff != 0;
    match protocol {
        6 => *bytes = with_tcp_checksums(std::mem::take(bytes)),
        17 | 1 | 58 if !is_fragment => {
            let sum_at = l4 + if protocol == 17 { 6 } else { 2 };
            bytes[sum_at..sum_at + 2].fill(0);
            let addresses = if v4 { 26..34 } else { 22..54 };
            let pseudo = vipgate_dataplane::wire::checksum::sum(&bytes[addresses])
                + u32::from(protocol)
                + (bytes.len() - l4) as u32;
            let pseudo = if protocol == 1 { 0 } else { pseudo };
            let sum = vipgate_dataplane::wire::checksum::checksum(pseudo, &bytes[l4..]);
            bytes[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        _ => {}
    }
}
