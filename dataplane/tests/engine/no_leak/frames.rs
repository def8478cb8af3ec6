//! Frames of the leak oracle: tags, EtherTypes, MAC addresses and damage around its packets; and the steps of its runs.

use proptest::prelude::*;
use proptest::sample::{Index, select};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_testkit::*;

use super::packets::{
    COVERED_PLACES, EXTENSIONS, INSIDE_PLACES, OUTSIDE_PLACES, PLACES, Packet, Upper, any_upper, error_upper, packet,
};

/// A frame, or the frames of a packet's fragments.
#[derive(Clone, Debug)]
pub(super) struct FrameSpec {
    pub(super) arrival: Arrival,
    packet: Packet,
    mac: Mac,
    wrapping: Wrapping,
    damage: Damage,
    fragments: Option<Fragments>,
}

/// Where a frame arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) is_outside: bool,
    pub(super) worker: usize,
    v6: bool,
}

impl Arrival {
    pub(super) fn interface(self) -> InterfaceId {
        if self.is_outside { OUTSIDE } else { INSIDE }
    }
}

/// Whom a frame is addressed to.
#[derive(Clone, Copy, Debug)]
enum Mac {
    Own,
    Broadcast,
    Multicast,
    Other,
}

/// What stands between the MAC addresses and the packet.
#[derive(Clone, Debug)]
enum Wrapping {
    Plain,
    /// Tags, by type and control information.
    Tags(Vec<(u16, u16)>),
    /// LLC and SNAP in an IEEE 802.3 frame.
    Snap,
    EtherType(u16),
    Padding,
}

/// What is wrong with a frame.
#[derive(Clone, Copy, Debug)]
enum Damage {
    None,
    Truncated(Index),
    /// A byte has another value; with a valid checksum of the header or without.
    Byte(Index, u8, bool),
    /// The IP length differs.
    Length(u8),
}

/// Fragments of so many times eight bytes, from this one on, in this order.
#[derive(Clone, Copy, Debug)]
struct Fragments {
    unit: usize,
    first: Index,
    is_reversed: bool,
}

impl FrameSpec {
    /// The frames.
    pub(super) fn build(&self) -> Vec<Vec<u8>> {
        let v6 = self.arrival.v6;
        let Some(Fragments { unit, first, is_reversed }) = self.fragments else {
            return vec![self.frame(&self.packet.build(v6))];
        };
        let mut frames: Vec<_> = self.packet.fragments(v6, unit).iter().map(|piece| self.frame(piece)).collect();
        let first = first.index(frames.len());
        frames.rotate_left(first);
        if is_reversed {
            frames.reverse();
        }
        frames
    }

    fn frame(&self, packet: &[u8]) -> Vec<u8> {
        let own = if self.arrival.is_outside { OUTSIDE_MAC } else { INSIDE_MAC };
        let to = match (self.mac, self.arrival.v6) {
            (Mac::Own, _) => own,
            (Mac::Broadcast, _) => [0xff; 6],
            (Mac::Multicast, false) => [1, 0, 0x5e, 0, 0, 5],
            (Mac::Multicast, true) => [0x33, 0x33, 0, 0, 0, 5],
            (Mac::Other, _) => [2, 0, 0, 0, 9, 9],
        };
        let from = if self.arrival.is_outside { ROUTER_MAC } else { POD_MAC };
        let kind = if self.arrival.v6 { 0x86dd_u16 } else { 0x0800 }.to_be_bytes();
        let between = match &self.wrapping {
            Wrapping::Plain | Wrapping::Padding => kind.to_vec(),
            Wrapping::Tags(tags) => {
                let tags = tags.iter().flat_map(|(kind, control)| [kind.to_be_bytes(), control.to_be_bytes()].concat());
                tags.chain(kind).collect()
            }
            Wrapping::Snap => {
                let length = ((packet.len() + 8) as u16).to_be_bytes();
                [&length[..], &[0xaa, 0xaa, 3, 0, 0, 0], &kind].concat()
            }
            Wrapping::EtherType(other) => other.to_be_bytes().to_vec(),
        };
        let padding: &[u8] = if matches!(self.wrapping, Wrapping::Padding) { &[0; 46] } else { &[] };
        self.damaged([&to[..], &from, &between, packet, padding].concat())
    }

    fn damaged(&self, mut frame: Vec<u8>) -> Vec<u8> {
        match self.damage {
            Damage::None => {}
            Damage::Truncated(at) => frame.truncate(at.index(frame.len())),
            Damage::Byte(at, value, is_repaired) => {
                let at = at.index(frame.len());
                frame[at] = value;
                if is_repaired {
                    update_header_checksum(&mut frame);
                }
            }
            Damage::Length(difference) => {
                let at = if self.arrival.v6 { 19 } else { 17 };
                frame[at] = frame[at].wrapping_add(difference);
                update_header_checksum(&mut frame);
            }
        }
        frame
    }

    /// The classes that it belongs to.
    pub(super) fn classes(&self) -> Vec<String> {
        let family = if self.arrival.v6 { "IPv6" } else { "IPv4" };
        let mac = match self.mac {
            Mac::Own => "own MAC address",
            Mac::Broadcast => "broadcast MAC address",
            Mac::Multicast => "multicast MAC address",
            Mac::Other => "other MAC address",
        };
        let wrapping = match &self.wrapping {
            Wrapping::Plain => "untagged",
            Wrapping::Tags(_) => "tagged",
            Wrapping::Snap => "LLC and SNAP",
            Wrapping::EtherType(_) => "other EtherType",
            Wrapping::Padding => "padded",
        };
        let damage = match self.damage {
            Damage::None => "undamaged",
            Damage::Truncated(_) => "truncated",
            Damage::Byte(..) => "changed byte",
            Damage::Length(_) => "wrong length",
        };
        let extended = match (self.arrival.v6, self.packet.options.is_empty(), self.packet.extensions.is_empty()) {
            (false, false, _) => "with options",
            (true, _, false) => "with extension headers",
            _ => "without options",
        };
        let fragments = if self.fragments.is_some() { "in fragments" } else { "whole" };
        let side = if self.arrival.is_outside { "from outside" } else { "from inside" };
        let Packet { source, destination, .. } = self.packet;
        let mut all: Vec<String> = [mac, wrapping, damage, extended, fragments, side].map(str::to_owned).into();
        all.push(format!("{} over {family}", self.packet.upper.name()));
        all.push(format!("from: {}", PLACES[source].0));
        all.push(format!("to: {}", PLACES[destination].0));
        all
    }
}

/// Variations of one frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sweep {
    /// Every protocol number.
    Protocols,
    /// ICMP errors of every type, or of every code.
    Types,
    Codes,
    /// Truncated at every byte.
    Truncations,
    /// Every extension header, alone and before every other one.
    Extensions,
}

impl Sweep {
    /// The frames of a sweep; all but its variation as in `spec`, and undamaged.
    pub(super) fn frames(self, spec: &FrameSpec) -> Vec<Vec<u8>> {
        let mut spec = FrameSpec { damage: Damage::None, fragments: None, ..spec.clone() };
        let mut vary = |change: &dyn Fn(&mut Packet, u8)| -> Vec<Vec<u8>> {
            let build = |n| {
                change(&mut spec.packet, n);
                spec.build()
            };
            (0..=u8::MAX).flat_map(build).collect()
        };
        match self {
            Self::Protocols => vary(&|packet, n| packet.upper = Upper::Raw { protocol: n }),
            Self::Types => vary(&|packet, n| {
                if let Upper::Error(error) = &mut packet.upper {
                    error.kind = n;
                }
            }),
            Self::Codes => vary(&|packet, n| {
                if let Upper::Error(error) = &mut packet.upper {
                    error.code = n;
                }
            }),
            Self::Truncations => {
                let whole = spec.build().concat();
                (0..whole.len()).map(|length| whole[..length].to_vec()).collect()
            }
            Self::Extensions => {
                let after = |first| EXTENSIONS.iter().map(move |second| vec![first, *second]);
                let chains = EXTENSIONS.iter().flat_map(|first| after(*first).chain([vec![*first]]));
                let build = |extensions| {
                    spec.packet.extensions = extensions;
                    spec.build()
                };
                chains.flat_map(build).collect()
            }
        }
    }
}

/// Which pods a policy covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Covered {
    All,
    /// Not the first one.
    Others,
    /// There are policies and VIPs, but no pods.
    Nobody,
    /// There is no policy at all.
    NoPolicy,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyKind {
    pub(super) covered: Covered,
    /// `pod_cidrs`, with or without `drop_uncovered`.
    pub(super) pods: Option<bool>,
    pub(super) has_exclusions: bool,
    pub(super) has_services: bool,
}

impl PolicyKind {
    pub(super) fn classes(self) -> [String; 3] {
        let pods = match self.pods {
            None => "no pod prefixes",
            Some(true) => "uncovered pods are dropped",
            Some(false) => "uncovered pods pass",
        };
        let exclusions = if self.has_exclusions { "policy with exclusions" } else { "policy without exclusions" };
        [format!("covered: {:?}", self.covered), pods.to_owned(), exclusions.to_owned()]
    }
}

/// A step of a run.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Frames(FrameSpec),
    Sweep(Sweep, FrameSpec),
    /// A covered pod opens a session, or a client outside one with a Service.
    Open {
        pod: usize,
        remote: usize,
        protocol: Protocol,
        v6: bool,
    },
    Call {
        remote: usize,
        protocol: Protocol,
        v6: bool,
    },
    /// The receiver of a packet sent replies.
    Reply {
        which: Index,
        worker: usize,
    },
    /// A router reports on a packet sent.
    Report {
        which: Index,
        router: usize,
        kind: usize,
        worker: usize,
    },
    Policy(PolicyKind),
    Advance(u32),
}

pub(super) fn policy_kind() -> impl Strategy<Value = PolicyKind> {
    let covered = select(&[Covered::All, Covered::All, Covered::Others, Covered::Nobody, Covered::NoPolicy][..]);
    let pods = select(&[None, Some(true), Some(false)][..]);
    (covered, pods, any::<bool>(), any::<bool>()).prop_map(|(covered, pods, has_exclusions, has_services)| PolicyKind {
        covered,
        pods,
        has_exclusions,
        has_services,
    })
}

fn arrival() -> impl Strategy<Value = Arrival> {
    (prop::bool::weighted(0.2), 0..3_usize, any::<bool>()).prop_map(|(is_outside, worker, v6)| Arrival {
        is_outside,
        worker,
        v6,
    })
}

fn frame_spec(upper: impl Strategy<Value = Upper> + 'static) -> impl Strategy<Value = FrameSpec> {
    let tag = (select(&[0x8100_u16, 0x88a8, 0x9100][..]), prop_oneof![Just(0_u16), any::<u16>()]);
    let wrapping = prop_oneof![
        20 => Just(Wrapping::Plain),
        2 => prop::collection::vec(tag, 1..4).prop_map(Wrapping::Tags),
        1 => Just(Wrapping::Snap),
        1 => any::<u16>().prop_map(Wrapping::EtherType),
        1 => Just(Wrapping::Padding),
    ];
    let mac = prop_oneof![12 => Just(Mac::Own), 1 => select(&[Mac::Broadcast, Mac::Multicast, Mac::Other][..])];
    let damage = prop_oneof![
        10 => Just(Damage::None),
        1 => any::<Index>().prop_map(Damage::Truncated),
        2 => (any::<Index>(), any::<u8>(), any::<bool>()).prop_map(|(at, value, is_repaired)| {
            Damage::Byte(at, value, is_repaired)
        }),
        1 => any::<u8>().prop_map(Damage::Length),
    ];
    let fragments = (1..8_usize, any::<Index>(), any::<bool>()).prop_map(|(unit, first, is_reversed)| Fragments {
        unit,
        first,
        is_reversed,
    });
    (arrival(), packet(upper), mac, wrapping, damage, prop::option::weighted(0.15, fragments)).prop_map(
        |(arrival, packet, mac, wrapping, damage, fragments)| FrameSpec {
            arrival,
            packet,
            mac,
            wrapping,
            damage,
            fragments,
        },
    )
}

fn sweep() -> impl Strategy<Value = Step> {
    let of_packets = (select(&[Sweep::Protocols, Sweep::Truncations, Sweep::Extensions][..]), frame_spec(any_upper()));
    let of_errors =
        (select(&[Sweep::Types, Sweep::Codes, Sweep::Truncations, Sweep::Extensions][..]), frame_spec(error_upper()));
    prop_oneof![of_packets, of_errors].prop_map(|(sweep, spec)| Step::Sweep(sweep, spec))
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let protocol = || select(&[Protocol::Tcp, Protocol::Udp, Protocol::Echo][..]);
    prop_oneof![
        24 => frame_spec(any_upper()).prop_map(Step::Frames),
        1 => sweep(),
        6 => (COVERED_PLACES, OUTSIDE_PLACES, protocol(), any::<bool>())
            .prop_map(|(pod, remote, protocol, v6)| Step::Open { pod, remote, protocol, v6 }),
        2 => (OUTSIDE_PLACES, protocol(), any::<bool>())
            .prop_map(|(remote, protocol, v6)| Step::Call { remote, protocol, v6 }),
        8 => (any::<Index>(), 0..3_usize).prop_map(|(which, worker)| Step::Reply { which, worker }),
        8 => (any::<Index>(), INSIDE_PLACES, 0..4_usize, 0..3_usize)
            .prop_map(|(which, router, kind, worker)| Step::Report { which, router, kind, worker }),
        2 => policy_kind().prop_map(Step::Policy),
        1 => select(&[10_u32, 600, 3_000][..]).prop_map(Step::Advance),
    ]
}
