//! Packets of the leak oracle: every protocol, options and extension headers, ICMP errors about any of it, in fragments
//! or whole.

use std::net::IpAddr;

use proptest::prelude::*;
use proptest::sample::select;
use vipgate_dataplane::wire::checksum::{checksum, sum};
use vipgate_testkit::ip;

/// Addresses of both families, by what they are to the gateway.
pub(super) const PLACES: [(&str, [&str; 2]); 15] = [
    ("covered pod", ["10.244.1.5", "fd00:244:1::5"]),
    ("covered backend", ["10.244.1.6", "fd00:244:1::6"]),
    ("pod of another policy", ["10.244.1.21", "fd00:244:1::21"]),
    ("uncovered pod", ["10.244.1.7", "fd00:244:1::7"]),
    ("uncovered backend", ["10.244.1.8", "fd00:244:1::8"]),
    ("router inside", ["10.99.0.1", "fd00:99::1"]),
    ("router in a pod prefix", ["10.244.9.1", "fd00:244:9::1"]),
    ("VIP", ["192.0.2.10", "2001:db8::10"]),
    ("another VIP", ["192.0.2.11", "2001:db8::10"]),
    ("remote", ["198.51.100.10", "2001:db8:51::10"]),
    ("another remote", ["203.0.113.9", "2001:db8:113::9"]),
    ("excluded remote", ["198.51.100.200", "2001:db8:51::c8"]),
    ("cluster address", ["10.96.0.10", "fd00:96::10"]),
    ("multicast", ["224.0.0.5", "ff02::5"]),
    ("broadcast or loopback", ["255.255.255.255", "::1"]),
];
/// The places of hosts inside, of covered pods, and of hosts outside.
pub(super) const INSIDE_PLACES: std::ops::Range<usize> = 0..7;
pub(super) const COVERED_PLACES: std::ops::Range<usize> = 0..3;
pub(super) const OUTSIDE_PLACES: std::ops::Range<usize> = 9..13;

pub(super) fn address(place: usize, v6: bool) -> IpAddr {
    ip(PLACES[place].1[usize::from(v6)])
}

/// An IP packet; its family is chosen when it is built.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    pub(super) source: usize,
    pub(super) destination: usize,
    pub(super) options: &'static [u8],
    pub(super) extensions: Vec<Extension>,
    pub(super) upper: Upper,
    pub(super) ttl: u8,
    pub(super) dont_fragment: bool,
}

/// What an IP packet carries.
#[derive(Clone, Debug)]
pub(super) enum Upper {
    Tcp {
        ports: [u16; 2],
        flags: u8,
    },
    Udp {
        ports: [u16; 2],
    },
    Sctp {
        ports: [u16; 2],
        chunk: u8,
    },
    /// Echo and other queries, but any type.
    Icmp {
        kind: u8,
        code: u8,
    },
    Raw {
        protocol: u8,
    },
    Error(Box<ErrorSpec>),
}

/// An ICMP error.
#[derive(Clone, Debug)]
pub(super) struct ErrorSpec {
    pub(super) kind: u8,
    pub(super) code: u8,
    /// The length field of RFC 4884.
    length: u8,
    quoted: Packet,
    /// It is addressed to the source of the quoted packet, as it must be.
    is_addressed: bool,
    /// It quotes a packet of the other family.
    is_other_family: bool,
    /// Bytes of the quoted packet.
    quote_length: usize,
}

/// An IPv6 extension header, or what looks like one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extension {
    HopByHop,
    LongOptions,
    Destination,
    Routing(u8),
    /// A fragment header of a whole packet.
    Atomic,
    Authentication,
    Encrypted,
    Mobility,
    HostIdentity,
    Shim6,
    NoNext,
}

pub(super) const EXTENSIONS: [Extension; 13] = [
    Extension::HopByHop,
    Extension::LongOptions,
    Extension::Destination,
    Extension::Routing(0),
    Extension::Routing(2),
    Extension::Routing(4),
    Extension::Atomic,
    Extension::Authentication,
    Extension::Encrypted,
    Extension::Mobility,
    Extension::HostIdentity,
    Extension::Shim6,
    Extension::NoNext,
];

impl Extension {
    /// Its number, and its bytes before header `next`.
    fn bytes(self, next: u8) -> (u8, Vec<u8>) {
        let options = |units: u8| {
            let padding = 6 + units * 8;
            [&[next, units, 1, padding - 2][..], &vec![0; usize::from(padding) - 2]].concat()
        };
        match self {
            Self::HopByHop => (0, options(0)),
            Self::LongOptions => (60, options(2)),
            Self::Destination => (60, options(0)),
            Self::Routing(kind) => (43, [&[next, 2, kind, 0][..], &[0; 20]].concat()),
            Self::Atomic => (44, vec![next, 0, 0, 0, 0, 0, 0, 7]),
            Self::Authentication => (51, [&[next, 2, 0, 0][..], &[7; 12]].concat()),
            Self::Encrypted => (50, vec![7; 16]),
            Self::Mobility => (135, vec![next, 0, 0, 0, 0, 0, 0, 0]),
            Self::HostIdentity => (139, vec![next, 0, 0, 0, 0, 0, 0, 0]),
            Self::Shim6 => (140, vec![next, 0, 0x80, 0, 0, 0, 0, 0]),
            Self::NoNext => (59, vec![]),
        }
    }
}

impl Packet {
    /// The whole packet.
    pub(super) fn build(&self, v6: bool) -> Vec<u8> {
        self.between([address(self.source, v6), address(self.destination, v6)])
    }

    fn between(&self, ends: [IpAddr; 2]) -> Vec<u8> {
        let (protocol, upper) = self.upper.bytes(ends);
        if ends.iter().all(IpAddr::is_ipv4) {
            return self.v4(ends, protocol, if self.dont_fragment { 0x4000 } else { 0 }, &upper);
        }
        let (first, payload) = self.chain(protocol, upper);
        self.v6(ends, first, &payload)
    }

    /// Its fragments, of `unit` times eight bytes each.
    pub(super) fn fragments(&self, v6: bool, unit: usize) -> Vec<Vec<u8>> {
        let ends = [address(self.source, v6), address(self.destination, v6)];
        let (protocol, upper) = self.upper.bytes(ends);
        let (first, payload) = if v6 { self.chain(protocol, upper) } else { (protocol, upper) };
        let count = payload.chunks(unit * 8).count();
        let pieces = payload.chunks(unit * 8).enumerate();
        pieces
            .map(|(n, piece)| {
                let (offset, more) = ((n * unit) as u16, u16::from(n + 1 < count));
                if v6 {
                    let field = (offset << 3 | more).to_be_bytes();
                    let header = [first, 0, field[0], field[1], 0, 0, 0, 9];
                    self.v6(ends, 44, &[&header[..], piece].concat())
                } else {
                    self.v4(ends, first, more << 13 | offset, piece)
                }
            })
            .collect()
    }

    /// The extension headers with what follows them, and the number of the first one.
    fn chain(&self, protocol: u8, upper: Vec<u8>) -> (u8, Vec<u8>) {
        self.extensions.iter().rev().fold((protocol, upper), |(next, rest), extension| {
            let (number, bytes) = extension.bytes(next);
            (number, [bytes, rest].concat())
        })
    }

    fn v4(&self, ends: [IpAddr; 2], protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let length = 20 + self.options.len();
        let mut packet = vec![0x40 | (length / 4) as u8, 0];
        packet.extend(((length + payload.len()) as u16).to_be_bytes());
        packet.extend([0, 9]);
        packet.extend(fragment.to_be_bytes());
        packet.extend([self.ttl, protocol, 0, 0]);
        packet.extend(ends.iter().flat_map(|end| octets(*end)));
        packet.extend(self.options);
        let header = checksum(0, &packet);
        packet[10..12].copy_from_slice(&header.to_be_bytes());
        packet.extend(payload);
        packet
    }

    fn v6(&self, ends: [IpAddr; 2], next: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend((payload.len() as u16).to_be_bytes());
        packet.extend([next, self.ttl]);
        packet.extend(ends.iter().flat_map(|end| octets(*end)));
        packet.extend(payload);
        packet
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

impl Upper {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Tcp { .. } => "TCP",
            Self::Udp { .. } => "UDP",
            Self::Sctp { .. } => "SCTP",
            Self::Icmp { .. } => "ICMP query",
            Self::Raw { .. } => "other protocol",
            Self::Error(error) if matches!(error.quoted.upper, Self::Error(_)) => "error about an error",
            Self::Error(_) => "ICMP error",
        }
    }

    /// Protocol number and bytes, with the checksum of ICMP.
    fn bytes(&self, ends: [IpAddr; 2]) -> (u8, Vec<u8>) {
        let v6 = ends[0].is_ipv6();
        let [from, to] = match self {
            Self::Tcp { ports, .. } | Self::Udp { ports } | Self::Sctp { ports, .. } => ports.map(u16::to_be_bytes),
            _ => [[0; 2]; 2],
        };
        let ports = [from, to].concat();
        match self {
            Self::Tcp { flags, .. } => {
                (6, [&ports[..], &[0, 0, 3, 232, 0, 0, 0, 1, 0x50, *flags, 4, 0, 0, 0, 0, 0, 1, 2, 3, 4]].concat())
            }
            Self::Udp { .. } => (17, [&ports[..], &[0, 16, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]].concat()),
            Self::Sctp { chunk, .. } => {
                let chunk = [*chunk, 0, 0, 20, 0, 0, 0, 7, 0, 0, 16, 0, 0, 1, 0, 1, 0, 0, 0, 9];
                (132, [&ports[..], &[0; 8], &chunk].concat())
            }
            Self::Icmp { kind, code } => icmp(ends, [*kind, *code, 0x0f, 0xa0, 0, 1], b"query of a host"),
            Self::Raw { protocol } => (*protocol, vec![7; 24]),
            Self::Error(error) => {
                let own = [ends[1], address(error.quoted.destination, v6)];
                let quoted = match (error.is_other_family, error.is_addressed) {
                    (true, _) => error.quoted.build(!v6),
                    (false, true) => error.quoted.between(own),
                    (false, false) => error.quoted.build(v6),
                };
                let quote = &quoted[..quoted.len().min(error.quote_length)];
                error_message(ends, (error.kind, error.code), error.length, quote)
            }
        }
    }
}

/// The protocol number and the bytes of an ICMP error.
pub(super) fn error_message(ends: [IpAddr; 2], (kind, code): (u8, u8), length: u8, quote: &[u8]) -> (u8, Vec<u8>) {
    let rest = match (ends[0].is_ipv6(), kind, code) {
        // The MTU.
        (false, 3, 4) | (true, 2, _) => [0, 0, 5, 120],
        (false, ..) => [0, length, 0, 0],
        (true, ..) => [length, 0, 0, 0],
    };
    icmp(ends, [kind, code, rest[0], rest[1], rest[2], rest[3]], quote)
}

fn icmp(ends: [IpAddr; 2], [kind, code, a, b, c, d]: [u8; 6], body: &[u8]) -> (u8, Vec<u8>) {
    let mut message = [&[kind, code, 0, 0, a, b, c, d][..], body].concat();
    let (protocol, pseudo) = match ends {
        [IpAddr::V6(from), IpAddr::V6(to)] => (58, sum(&from.octets()) + sum(&to.octets()) + 58 + message.len() as u32),
        _ => (1, 0),
    };
    let sum = checksum(pseudo, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    (protocol, message)
}

/// A packet without options that carries a finished message.
pub(super) fn packet_with(ends: [IpAddr; 2], (protocol, message): (u8, Vec<u8>)) -> Vec<u8> {
    let shell = Packet {
        source: 0,
        destination: 0,
        options: &[],
        extensions: vec![],
        upper: Upper::Raw { protocol },
        ttl: 64,
        dont_fragment: true,
    };
    if ends[0].is_ipv4() { shell.v4(ends, protocol, 0x4000, &message) } else { shell.v6(ends, protocol, &message) }
}

/// IPv4 options: none, no-operation, record route, timestamp, router alert, a source route, an unknown and a broken one.
const OPTIONS: [&[u8]; 8] = [
    &[],
    &[1; 40],
    &[7, 7, 4, 0, 0, 0, 0, 0],
    &[68, 8, 5, 0, 0, 0, 0, 0],
    &[148, 4, 0, 0],
    &[131, 7, 4, 10, 0, 0, 1, 0],
    &[200, 3, 9, 0],
    &[7, 1, 0, 0],
];
const PORTS: [u16; 7] = [4000, 4001, 8080, 5353, 53, 80, 443];

fn place() -> impl Strategy<Value = usize> {
    0..PLACES.len()
}

fn ports() -> impl Strategy<Value = [u16; 2]> {
    (select(&PORTS[..]), select(&PORTS[..])).prop_map(|(source, destination)| [source, destination])
}

/// Whatever isn't an ICMP error on purpose.
fn plain_upper() -> impl Strategy<Value = Upper> {
    let echo = select(&[0_u8, 8, 128, 129][..]);
    let flags = select(&[2_u8, 0x12, 0x10, 0x18, 0x11, 4][..]);
    prop_oneof![
        4 => (ports(), flags).prop_map(|(ports, flags)| Upper::Tcp { ports, flags }),
        4 => ports().prop_map(|ports| Upper::Udp { ports }),
        2 => (ports(), 0..15_u8).prop_map(|(ports, chunk)| Upper::Sctp { ports, chunk }),
        2 => echo.prop_map(|kind| Upper::Icmp { kind, code: 0 }),
        1 => (any::<u8>(), 0..3_u8).prop_map(|(kind, code)| Upper::Icmp { kind, code }),
        2 => any::<u8>().prop_map(|protocol| Upper::Raw { protocol }),
    ]
}

/// ICMP errors about packets that carry this.
fn error_about(upper: impl Strategy<Value = Upper> + 'static) -> impl Strategy<Value = Upper> {
    let kind = prop_oneof![5 => select(&[1_u8, 2, 3, 4, 5, 11, 12][..]), 1 => any::<u8>()];
    let code = prop_oneof![3 => 0..5_u8, 1 => any::<u8>()];
    let length = prop_oneof![8 => Just(0_u8), 1 => any::<u8>()];
    let quote_length = prop_oneof![3 => Just(usize::MAX), 1 => 0..80_usize];
    let misfits = (prop::bool::weighted(0.8), prop::bool::weighted(0.04));
    (kind, code, length, packet(upper), misfits, quote_length).prop_map(
        |(kind, code, length, quoted, (is_addressed, is_other_family), quote_length)| {
            let error = ErrorSpec { kind, code, length, quoted, is_addressed, is_other_family, quote_length };
            Upper::Error(Box::new(error))
        },
    )
}

/// An ICMP error about anything, also about another error.
pub(super) fn error_upper() -> impl Strategy<Value = Upper> {
    prop_oneof![5 => error_about(plain_upper()), 1 => error_about(error_about(plain_upper()).boxed())]
}

pub(super) fn any_upper() -> impl Strategy<Value = Upper> {
    prop_oneof![3 => plain_upper(), 3 => error_upper()]
}

pub(super) fn packet(upper: impl Strategy<Value = Upper> + 'static) -> impl Strategy<Value = Packet> {
    let options = prop_oneof![4 => Just(OPTIONS[0]), 1 => select(&OPTIONS[..])];
    let extensions = prop_oneof![
        3 => Just(vec![]),
        1 => prop::collection::vec(select(&EXTENSIONS[..]), 1..4),
        // More than a parser should follow.
        1 => (0..12_usize).prop_map(|count| vec![Extension::Destination; count]),
    ];
    let ttl = prop_oneof![12 => Just(64_u8), 1 => 0..3_u8];
    (place(), place(), options, extensions, upper, ttl, any::<bool>()).prop_map(
        |(source, destination, options, extensions, upper, ttl, dont_fragment)| Packet {
            source,
            destination,
            options,
            extensions,
            upper,
            ttl,
            dont_fragment,
        },
    )
}
