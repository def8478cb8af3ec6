//! Random scenarios: packets, replies, delays, and changes of policy and of gateway membership, with small tables.

use std::net::SocketAddr;

use proptest::prelude::*;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::ports::PortRange;
use vipgate_testkit::cluster::{name, shared_policy};
use vipgate_testkit::services::{backend, service};
use vipgate_testkit::*;

/// Pods with and without a policy, VIPs, remotes that are reachable, excluded or unreachable, and unused addresses.
const ADDRESSES: [&str; 12] = [
    "10.244.1.5",
    "10.244.1.6",
    "10.244.1.21",
    "10.244.1.7",
    "192.0.2.10",
    "192.0.2.11",
    "198.51.100.10",
    "198.51.100.200",
    "203.0.113.9",
    "127.0.0.1",
    "192.0.2.99",
    "10.99.0.1",
];
const ADDRESSES_V6: [&str; 4] = ["fd00:244:1::5", "fd00:244:1::6", "2001:db8::10", "2001:db8:51::10"];
/// Source ports, ports of Services and their backends, and SNAT ports.
const PORTS: [u16; 8] = [1000, 1001, 80, 8080, 53, 5353, 20_000, 20_001];

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Packet {
        protocol: Protocol,
        flags: &'static str,
        ends: (SocketAddr, SocketAddr),
        worker: usize,
        inside: bool,
        ttl: u8,
    },
    /// A reply to one of the packets sent.
    Reply {
        which: prop::sample::Index,
        flags: &'static str,
        worker: usize,
    },
    Pass(u32),
    Policy(PolicyVariant),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum PolicyVariant {
    Initial,
    PodRemoved,
    VipChanged,
    Excluded,
    Limited,
    NoBackends,
    SourceRange,
    NoService,
    PerConnection,
    PeerActive(bool),
}

fn addresses() -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
    let port = || prop::sample::select(PORTS.to_vec());
    let of = |all: &'static [&'static str]| (prop::sample::select(all), port(), prop::sample::select(all), port());
    // From outside to a Service: random pairs rarely hit one.
    let to_service =
        || of(&["198.51.100.10", "203.0.113.9"]).prop_map(|(from, port, ..)| (from, port, "192.0.2.10", 80));
    prop_oneof![8 => of(&ADDRESSES), 2 => of(&ADDRESSES_V6), 1 => to_service()]
        .prop_map(|(from, from_port, to, to_port)| ((ip(from), from_port).into(), (ip(to), to_port).into()))
}

fn step() -> impl Strategy<Value = Step> {
    let protocol = || prop_oneof![3 => Just(Protocol::Tcp), 3 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    let flags = || prop::sample::select(vec!["S", "S", "A", "SA", "FA"]);
    // Pods mostly send from inside.
    let side = prop_oneof![6 => Just(None), 1 => any::<bool>().prop_map(Some)];
    let ttl = prop_oneof![8 => Just(64_u8), 1 => Just(1)];
    let packet = (protocol(), flags(), addresses(), 0..2_usize, side, ttl).prop_map(
        |(protocol, flags, ends, worker, side, ttl)| {
            let is_pod = ends.0.ip().to_string().starts_with("10.244.") || ends.0.ip().to_string().starts_with("fd00:");
            Step::Packet { protocol, flags, ends, worker, inside: side.unwrap_or(is_pod), ttl }
        },
    );
    let variant = prop::sample::select(vec![
        PolicyVariant::Initial,
        PolicyVariant::Initial,
        PolicyVariant::PodRemoved,
        PolicyVariant::VipChanged,
        PolicyVariant::Excluded,
        PolicyVariant::Limited,
        PolicyVariant::NoBackends,
        PolicyVariant::SourceRange,
        PolicyVariant::NoService,
        PolicyVariant::PerConnection,
        PolicyVariant::PeerActive(true),
        PolicyVariant::PeerActive(false),
    ]);
    prop_oneof![
        12 => packet,
        6 => (any::<prop::sample::Index>(), flags(), 0..2_usize)
            .prop_map(|(which, flags, worker)| Step::Reply { which, flags, worker }),
        1 => prop::sample::select(vec![10_u32, 2_500, 6_000]).prop_map(Step::Pass),
        2 => variant.prop_map(Step::Policy),
    ]
}

/// A policy variant; `in_group`: for one of two gateways.
fn policy_variant(variant: PolicyVariant, in_group: bool) -> PolicySet {
    let mut set = if in_group { shared_policy(2) } else { policy() };
    let mut api = service(&["10.244.1.5", "10.244.1.6", "fd00:244:1::5"].map(backend));
    match variant {
        PolicyVariant::Initial | PolicyVariant::NoService | PolicyVariant::PeerActive(_) => {}
        PolicyVariant::PodRemoved => set.endpoints.retain(|endpoint| endpoint.address != ip("10.244.1.6")),
        PolicyVariant::VipChanged => set.endpoints[0].vips = vec![ip("192.0.2.11")],
        PolicyVariant::Excluded => set.policies[0].excluded = vec!["198.51.100.0/24".parse().unwrap()],
        PolicyVariant::Limited => {
            set.policies[0].limits =
                Limits { sessions: Some(2), new_sessions_per_second: Some(3), guaranteed_ports: None };
            set.policies[0].on_exhaustion = OnExhaustion::Reject;
        }
        PolicyVariant::NoBackends => api.backends.clear(),
        PolicyVariant::SourceRange => api.source_ranges = vec!["203.0.113.0/24".parse().unwrap()],
        PolicyVariant::PerConnection => {
            set.policies[0].address_selection = AddressSelection::PerConnection;
            set.endpoints[0].vips = vec![ip("192.0.2.10"), ip("192.0.2.11")];
        }
    }
    if !matches!(variant, PolicyVariant::NoService) {
        set.services = vec![api];
    }
    set
}

fn membership(active: bool) -> MembersSpec {
    let gateways = (0..2).map(|number| MemberSpec {
        name: name(number),
        tunnel: Some(at(&format!("10.244.1.{}:4790", 5 + number))),
        active: number == 0 || active,
        connected: true,
        may_open: true,
        policy_release: PolicyRelease::NotAwaited,
        authentication: Authentication::None,
    });
    let changes = u64::from(active) + 1;
    MembersSpec { this: Some(name(0)), gateways: gateways.collect(), active_since: changes, active_changes: changes }
}

/// Steps of a scenario, the number of workers, and whether the gateway is one of two.
pub(crate) fn steps() -> impl Strategy<Value = (Vec<Step>, u8, bool)> {
    (prop::collection::vec(step(), 1..80), 1_u8..=2, any::<bool>())
}

/// A gateway that runs a scenario.
pub(crate) struct Scenario {
    pub(crate) gateway: Gateway,
    /// Packets sent, some of which get replies.
    pub(crate) sent: Vec<(InterfaceId, Vec<u8>)>,
    workers: u8,
    in_group: bool,
}

impl Scenario {
    pub(crate) fn new(workers: u8, in_group: bool) -> Self {
        let setup = Setup {
            workers,
            capacity: 8,
            reserve: Some(2),
            range: PortRange::new(20_000, 20_001).unwrap(),
            reject: true,
            ..Setup::default()
        };
        let mut gateway = Gateway::with(&setup, network(), &policy_variant(PolicyVariant::Initial, in_group));
        if in_group {
            gateway.publisher.publish(gateway.builder.with_members(&membership(true)));
        }
        gateway.skip_counter_check();
        Self { gateway, sent: Vec::new(), workers, in_group }
    }

    /// The packet that a step sends, with its worker and interface; other steps are applied to the gateway.
    pub(crate) fn packet(&mut self, step: &Step) -> Option<(usize, InterfaceId, Vec<u8>)> {
        let (interface, worker, packet) = match step {
            Step::Packet { protocol, flags, ends: (from, to), worker, inside, ttl } => {
                if from.is_ipv4() != to.is_ipv4() {
                    return None;
                }
                let mut bytes = match protocol {
                    Protocol::Tcp => tcp(*from, *to, flags, 1000, 1),
                    _ => packet(*protocol, *from, *to),
                };
                let interface = if *inside { INSIDE } else { OUTSIDE };
                set_ttl(&mut bytes, *ttl);
                (interface, *worker, on_link(interface, bytes))
            }
            Step::Reply { which, flags, worker } => {
                let (interface, bytes) = self.sent.get(which.index(self.sent.len().max(1)))?;
                (*interface, *worker, reply_for(bytes, flags)?)
            }
            Step::Pass(ms) => {
                self.gateway.advance(*ms);
                return None;
            }
            Step::Policy(PolicyVariant::PeerActive(active)) => {
                if self.in_group {
                    self.gateway.publisher.publish(self.gateway.builder.with_members(&membership(*active)));
                }
                return None;
            }
            Step::Policy(variant) => {
                self.gateway.set_policy(&policy_variant(*variant, self.in_group));
                return None;
            }
        };
        Some((worker % usize::from(self.workers), interface, packet))
    }
}

/// The receiver's reply to a packet, on the interface that the packet left from; `None` for packets without a reply.
fn reply_for(bytes: &[u8], flags: &'static str) -> Option<Vec<u8>> {
    let (protocol, l4) = if bytes[12] == 8 { (bytes[23], 34) } else { (bytes[20], 54) };
    let mut reply = match protocol {
        6 => {
            let (source, destination) = ends(bytes);
            tcp(destination, source, flags, 5000, 1001)
        }
        17 if bytes.len() > l4 + 8 && bytes[l4 + 2..l4 + 4] != [0x12, 0xb6] => reply_to(bytes, Protocol::Udp),
        1 | 58 if matches!(bytes[l4], 8 | 128) => reply_to(bytes, Protocol::Echo),
        _ => return None,
    };
    let (to, from) = (bytes[..6].to_vec(), bytes[6..12].to_vec());
    reply[..6].copy_from_slice(&from);
    reply[6..12].copy_from_slice(&to);
    Some(reply)
}
