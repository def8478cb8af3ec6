//! What happens in a story, packet by packet, before anybody says in which batches it comes.

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::net::SocketAddr;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::watch::glimpse::Glimpse;

use crate::fragments::pieces;
use crate::support::*;

/// Bytes of a datagram that comes in fragments: four of them.
const DATAGRAM: usize = 1400;

/// What happens to the gateway between packets. All that came before has left by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Pass(u32),
    Policy(Change),
    Flush,
    /// The process ends, and another one takes up its sessions.
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Whole,
    NoPod,
    OtherVip,
    Excluded,
    Limited,
    NoBackend,
}

/// A packet's place: which one it is, its flow, and the datagram that it is a fragment of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) tag: u32,
    pub(crate) flow: u32,
    /// 0: none.
    pub(crate) datagram: u32,
    /// Whether it may open a session, which the other direction then waits for.
    pub(crate) opens: bool,
}

/// Of a flow: it is the other direction, which answers.
pub(crate) const REPLY: u32 = 1 << 31;

/// One thing after the other.
#[derive(Clone)]
pub(crate) enum Action {
    Packet {
        place: Place,
        class: &'static str,
        interface: InterfaceId,
        bytes: Vec<u8>,
    },
    /// Whoever got packet `to` answers: in one piece, or with this fragment.
    Answer {
        place: Place,
        to: u32,
        flags: &'static str,
        piece: Option<usize>,
    },
    /// A router on the way says that it couldn't deliver packet `about`.
    Error {
        place: Place,
        about: u32,
        mtu: bool,
    },
    Event(Event),
}

impl Debug for Action {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packet { place, class, bytes, .. } => {
                let seen = Glimpse::of(bytes);
                let ends = seen.map(|it| (it.source, it.destination, it.ports));
                let flags = bytes.get(47).filter(|_| bytes[12] == 8 && bytes[23] == 6);
                write!(f, "{}: {class} {ends:?} {flags:02x?} of {:x}", place.tag, place.flow)
            }
            Self::Answer { place, to, flags, piece } => write!(f, "{}: answer to {to} {flags} {piece:?}", place.tag),
            Self::Error { place, about, .. } => write!(f, "{}: error about {about}", place.tag),
            Self::Event(event) => write!(f, "{event:?}"),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Talk {
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
    Answer {
        which: Index,
        flags: &'static str,
        pieces: Option<Vec<usize>>,
    },
    Error {
        which: Index,
        mtu: bool,
    },
    /// A client asks, and its only backend answers, in whatever batches.
    Served {
        client: u16,
        v6: bool,
        flags: &'static [(&'static str, bool)],
    },
    Event(Event),
}

/// The backend of all clients, in each family.
pub(crate) const BACKENDS: [&str; 2] = ["10.244.1.6", "fd00:244:1::6"];
const OPENINGS: [&[&str]; 7] =
    [&["S"], &["S", "A", "PA"], &["S", "PA", "FA"], &["S", "R"], &["A"], &["S", "S", "FA", "S"], &["FA", "S"]];
/// Segments of a client's connection, and which of them the backend sends.
const SERVED: [&[(&str, bool)]; 4] = [
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
            .prop_flat_map(|(pod, far)| (4000..4003_u16).prop_map(move |port| ((ip(pod), port).into(), at(far))))
    };
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 2 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    let ttl = prop_oneof![15 => Just(64_u8), 1 => Just(1)];
    let flags = || select(vec!["SA", "A", "FA", "R", "PA"]);
    let event = prop_oneof![
        3 => select(vec![10_u32, 4_000, 12_000]).prop_map(Event::Pass),
        4 => select(vec![Change::Whole, Change::Whole, Change::NoPod, Change::OtherVip, Change::Excluded, Change::Limited, Change::Limited, Change::Limited, Change::NoBackend])
            .prop_map(Event::Policy),
        1 => Just(Event::Flush),
        1 => Just(Event::Restart),
    ];
    prop_oneof![
        8 => (ends(), protocol, select(OPENINGS.to_vec()), ttl)
            .prop_map(|((from, to), protocol, flags, ttl)| Step::Talk { from, to, protocol, flags, ttl }),
        5 => (ends(), order(), prop::bool::weighted(0.2))
            .prop_map(|((from, to), order, overlap)| Step::Fragments { from, to, order, overlap }),
        6 => (any::<Index>(), flags(), prop::option::weighted(0.3, order()))
            .prop_map(|(which, flags, pieces)| Step::Answer { which, flags, pieces }),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(which, mtu)| Step::Error { which, mtu }),
        3 => (0..3_u16, any::<bool>(), select(SERVED.to_vec())).prop_map(|(client, v6, flags)| Step::Served { client, v6, flags }),
        1 => Just(Step::Talk { from: at("198.51.100.10:9"), to: at("192.0.2.10:9"), protocol: Protocol::Udp, flags: &[], ttl: 64 }),
        2 => event.prop_map(Step::Event),
    ]
}

/// A story. `foreseen`: some answers come without anybody's having waited for what they answer.
pub(crate) fn stories(foreseen: bool) -> impl Strategy<Value = Vec<Action>> {
    prop::collection::vec(step(), 4..40).prop_map(move |steps| {
        let mut script = Script::default();
        for (n, step) in steps.into_iter().enumerate() {
            script.add(step, n as u32 + 1, foreseen);
        }
        script.actions
    })
}

/// For so long nobody else gets the port of a session that has ended.
pub(crate) const QUARANTINE_MS: u32 = 2_000;

#[derive(Default)]
struct Script {
    actions: Vec<Action>,
    flows: BTreeMap<(SocketAddr, SocketAddr, u8), u32>,
    /// Whole packets, which can be answered, and when they came. Not those of long ago: by then another session may have their port,
    /// or may not, as ports are random.
    whole: Vec<(Place, u32)>,
    now: u32,
}

impl Script {
    fn place(&mut self, flow: u32, datagram: u32, opens: bool) -> Place {
        Place { tag: self.actions.len() as u32 + 1, flow, datagram, opens }
    }

    fn flow(&mut self, from: SocketAddr, to: SocketAddr, protocol: Protocol) -> u32 {
        let next = self.flows.len() as u32;
        *self.flows.entry((from, to, protocol as u8)).or_insert(next)
    }

    fn packet(&mut self, place: Place, class: &'static str, mut bytes: Vec<u8>) {
        let is_inside = bytes[..6] == INSIDE_MAC;
        tag(&mut bytes, place.tag);
        let interface = if is_inside { INSIDE } else { OUTSIDE };
        self.actions.push(Action::Packet { place, class, interface, bytes });
    }

    fn add(&mut self, step: Step, number: u32, foreseen: bool) {
        match step {
            Step::Talk { from, to, protocol, flags, ttl } => {
                let flow = self.flow(from, to, protocol);
                for flags in if protocol == Protocol::Tcp { flags } else { &["", ""][..] } {
                    let opens = protocol != Protocol::Tcp || *flags == "S";
                    let place = self.place(flow, 0, opens);
                    let mut bytes = segment(protocol, from, to, flags);
                    set_ttl(&mut bytes, ttl);
                    self.whole.push((place, self.now));
                    self.packet(place, "whole", bytes);
                }
            }
            Step::Fragments { from, to, order, overlap } => {
                let flow = self.flow(from, to, Protocol::Udp);
                let mut all = pieces(from, to, DATAGRAM, number);
                if overlap && from.is_ipv4() {
                    // It begins where another one hasn't ended.
                    let mut bent = all[2].clone();
                    bent[20..22].copy_from_slice(&(0x2000_u16 + 90).to_be_bytes());
                    seal_header(&mut bent);
                    all[3] = bent;
                }
                let first = order.iter().position(|piece| *piece == 0);
                let class = if overlap {
                    "overlap"
                } else if first == Some(0) {
                    "first one first"
                } else {
                    "first one later"
                };
                for piece in order {
                    let place = self.place(flow, number, true);
                    self.packet(place, class, all[piece].clone());
                }
            }
            Step::Answer { which, flags, pieces } => {
                let Some((to, _)) = self.whole.get(which.index(self.whole.len().max(1))).copied() else { return };
                let flow = to.flow ^ REPLY;
                for piece in pieces.map_or(vec![None], |order| order.into_iter().map(Some).collect()) {
                    let place = self.place(flow, if piece.is_some() { number } else { 0 }, false);
                    self.actions.push(Action::Answer { place, to: to.tag, flags, piece });
                }
            }
            Step::Error { which, mtu } => {
                let Some((about, _)) = self.whole.get(which.index(self.whole.len().max(1))).copied() else { return };
                let place = self.place(about.flow ^ REPLY, 0, false);
                self.actions.push(Action::Error { place, about: about.tag, mtu });
            }
            Step::Served { client, v6, flags } if foreseen => {
                let clients = ["198.51.100.10", "2001:db8:51::10"];
                let (client, vip) =
                    ((ip(clients[usize::from(v6)]), 7000 + client).into(), ["192.0.2.10:80", "[2001:db8::10]:80"]);
                let (vip, backend) = (at(vip[usize::from(v6)]), (ip(BACKENDS[usize::from(v6)]), 8080).into());
                let flow = self.flow(client, vip, Protocol::Tcp);
                for (flags, is_backend) in flags {
                    let (from, to) = if *is_backend { (backend, client) } else { (client, vip) };
                    let flow = if *is_backend { flow | REPLY } else { flow };
                    let place = self.place(flow, 0, *flags == "S");
                    self.whole.push((place, self.now));
                    self.packet(place, "served", segment(Protocol::Tcp, from, to, flags));
                }
                // The backend's node says that it couldn't deliver what the client sent first.
                let place = self.place(flow | REPLY, 0, false);
                let mut quoted = segment(Protocol::Tcp, client, backend, "S");
                tag(&mut quoted, place.tag);
                let node = if v6 { "fd00:244:1::5" } else { "10.244.1.5" };
                let error = vipgate_dataplane::wire::icmp_error::Error::HostUnreachable;
                let bytes = crate::icmp::error_about(&quoted, node, error, true);
                self.actions.push(Action::Packet { place, class: "foreseen error", interface: INSIDE, bytes });
            }
            Step::Served { .. } => {}
            Step::Event(event) => {
                if let Event::Pass(ms) = event {
                    self.now += ms;
                    self.whole.retain(|&(_, came)| self.now - came < QUARANTINE_MS);
                }
                self.actions.push(Action::Event(event));
            }
        }
    }
}

/// A packet of a connection or a datagram, with room for a tag at its end.
pub(crate) fn segment(protocol: Protocol, from: SocketAddr, to: SocketAddr, flags: &str) -> Vec<u8> {
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

/// Writes which packet it is at its end, and makes lengths and checksums right.
pub(crate) fn tag(bytes: &mut Vec<u8>, tag: u32) {
    let at = bytes.len() - 4;
    bytes[at..].copy_from_slice(&tag.to_be_bytes());
    let v4 = bytes[12] == 8;
    let (protocol, l4) = if v4 { (bytes[23], 34) } else { (bytes[20], 54) };
    let is_fragment = v4 && u16::from_be_bytes([bytes[20], bytes[21]]) & 0x3fff != 0;
    match protocol {
        6 => *bytes = sealed_tcp(std::mem::take(bytes)),
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
