//! What control tells the engine, as plain values: the compiled policy, and what the kernel knows of the network.
//!
//! These are descriptions for building a snapshot, not what the stages read. Names in them are for people: they come
//! back in `vipgate vips`, `endpoints`, `sessions` and in logs.

mod service;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

pub use self::service::{BackendSpec, BackendState, HealthSpec, Scope, ServicePortSpec, ServiceSpec};
use crate::io::{InterfaceId, MAX_MTU};
pub use crate::ports::BlockSet;

/// A whole compiled policy. Building a snapshot from it checks what the compiler already promised and fails otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicySet {
    /// What people call this state of the policy: shown in `status` and in `vipgate_policy_version_info`.
    pub version: String,
    /// The egress policies, sorted by name.
    pub policies: Vec<EgressSpec>,
    /// Every VIP, whoever owns it, sorted by address.
    pub vips: Vec<VipSpec>,
    /// Every covered pod address, sorted by address, each once.
    pub endpoints: Vec<EndpointSpec>,
    /// Every Service that is reached at a VIP, sorted by name.
    pub services: Vec<ServiceSpec>,
    /// The nodes of the overlay network, sorted by name.
    pub nodes: Vec<NodeSpec>,
    /// The cluster's own addresses.
    pub cluster: ClusterSpec,
}

/// The cluster's own addresses, as far as one gateway knows them. None: nothing is known to be inside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSpec {
    /// Pods' addresses, ascending.
    pub pods: Vec<IpNet>,
    /// What else is inside the cluster: Services' own addresses, and what nodes say of their pods. Ascending.
    pub others: Vec<IpNet>,
    /// What becomes of a packet from `pods` to the outside that no policy covers: it is dropped, or left to the kernel.
    pub drop_uncovered: bool,
}

/// A node of the overlay network: its pods' packets come, and packets to them go, in VXLAN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSpec {
    /// Its name, for people. Its key.
    pub name: Arc<str>,
    /// Where its tunnels end and begin, and the UDP port there.
    pub address: SocketAddr,
    /// The number of the overlay network there: 24 bits.
    pub vni: u32,
    /// The link address of its end of the overlay network.
    pub mac: [u8; 6],
    /// Its pods' addresses. Of several nodes, the one with the longest prefix has a pod.
    pub prefixes: Vec<IpNet>,
}

/// One egress policy: where its endpoints' traffic is translated, and within which limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressSpec {
    /// `EgressPolicy namespace/name`, or `Service namespace/name` where the annotation made it. Its key.
    pub name: Arc<str>,
    /// Destinations that are translated.
    pub destinations: Vec<IpNet>,
    /// Destinations that are routed unchanged. The longest prefix of both lists decides; here wins where both name one.
    pub excluded: Vec<IpNet>,
    /// How a new session picks one of the endpoint's VIPs.
    pub address_selection: AddressSelection,
    /// What one endpoint may have open.
    pub limits: Limits,
    /// What an endpoint hears when it gets no session.
    pub on_exhaustion: OnExhaustion,
}

/// How a new session picks its VIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressSelection {
    /// An endpoint keeps one VIP per family for all its sessions (RFC 4787 REQ-2, "paired").
    #[default]
    PerEndpoint,
    /// Each session picks anew.
    PerConnection,
}

/// Limits of one endpoint; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Sessions open at once.
    pub sessions: Option<u32>,
    /// New sessions a second.
    pub new_sessions_per_second: Option<u32>,
    /// Ports that one endpoint can have toward each destination whatever the others have.
    pub guaranteed_ports: Option<u32>,
}

/// What an endpoint hears when it gets no session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExhaustion {
    /// ICMP "administratively prohibited"; TCP gets a reset.
    #[default]
    Reject,
    /// Nothing.
    Drop,
}

/// One VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VipSpec {
    /// The address; it is on no interface.
    pub address: IpAddr,
    /// `Service namespace/name` or `EgressPolicy namespace/name` that it belongs to.
    pub name: Arc<str>,
    /// How the network learns where it is.
    pub announce: Announce,
    /// Ports that are never given out as SNAT ports: frontends and health checks. Sorted, each once.
    pub reserved_ports: Vec<u16>,
    /// Who was dealt which part of it; empty: all of it is this gateway's.
    pub shares: Vec<ShareSpec>,
}

/// What one gateway was dealt of a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareSpec {
    /// Its home: the gateway's name.
    pub gateway: Arc<str>,
    /// Its blocks of ports; `None`: all.
    pub blocks: Option<Arc<BlockSet>>,
    /// Who serves it while its home doesn't: the first of these that serves.
    pub backups: Vec<Arc<str>>,
}

/// How the network learns where a VIP is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Announce {
    /// The gateway answers ARP and NDP for it and announces itself.
    #[default]
    L2,
    /// Routing does; ARP and NDP are answered all the same when somebody asks.
    Bgp,
}

/// One covered pod address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    /// The pod's address: the source of its packets as they reach the gateway.
    pub address: IpAddr,
    /// `namespace/pod`, where a manifest names it; else empty.
    pub name: Arc<str>,
    /// Name of its policy.
    pub policy: Arc<str>,
    /// The VIPs that its sessions may leave with, of its own address family. Empty: its traffic is dropped (closed).
    pub vips: Vec<IpAddr>,
    /// The home of its shares: the gateway that it was dealt to; `None`: whichever gets its packets.
    pub gateway: Option<Arc<str>>,
    /// Why this policy, where others cover it too, and why no VIPs, where it has none: sentences for people.
    pub remarks: Vec<Arc<str>>,
}

/// What the kernel knows of the network, as netlink told it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkSpec {
    /// The gateway's interfaces; `interfaces[i].id.0 == i`.
    pub interfaces: Vec<InterfaceSpec>,
    /// The routes of the main and local tables, best metric only.
    pub routes: Vec<RouteSpec>,
    /// Neighbours with a usable link address.
    pub neighbours: Vec<NeighbourSpec>,
    /// Every address that the gateway's own kernel answers for, broadcast addresses included, ascending.
    pub locals: Vec<IpAddr>,
}

/// One interface that the gateway polls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceSpec {
    /// Its place in the configuration.
    pub id: InterfaceId,
    /// Its name.
    pub name: String,
    /// The kernel's index of it.
    pub ifindex: u32,
    /// Which side of the gateway it is.
    pub role: Role,
    /// Its link address.
    pub mac: [u8; 6],
    /// Its MTU, which may be more than the gateway can use: see [`Self::carried`].
    pub mtu: u16,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// The kernel's addresses on it.
    pub addresses: Vec<IpAddr>,
}

impl InterfaceSpec {
    /// The longest IP packet that goes through it, bytes: its MTU, or what a frame receives.
    pub fn carried(&self) -> u16 {
        self.mtu.min(MAX_MTU)
    }
}

/// The side of packets that come around by way of a VIP, as a bit beside those of [`Role::sides`].
pub const AROUND: u8 = 4;

/// Which side of the gateway an interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Where pods are.
    Inside,
    /// Where the world is.
    Outside,
    /// One-armed: both.
    Both,
}

impl Role {
    /// The sides as bits: 1 is inside, 2 outside.
    #[inline]
    pub const fn sides(self) -> u8 {
        match self {
            Self::Inside => 1,
            Self::Outside => 2,
            Self::Both => 3,
        }
    }

    /// The side that the answers to what leaves here come from, as a bit: the outside, if it can be.
    pub const fn answers_from(self) -> u8 {
        match self {
            Self::Inside => Self::Inside.sides(),
            Self::Outside | Self::Both => Self::Outside.sides(),
        }
    }

    /// The side that pods behind it are heard from, as a bit: the inside, if it can be.
    pub const fn pods_from(self) -> u8 {
        match self {
            Self::Inside | Self::Both => Self::Inside.sides(),
            Self::Outside => Self::Outside.sides(),
        }
    }

    /// Whether pods' packets may come in here.
    pub fn is_inside(self) -> bool {
        matches!(self, Self::Inside | Self::Both)
    }

    /// Whether the world's packets may come in here.
    pub fn is_outside(self) -> bool {
        matches!(self, Self::Outside | Self::Both)
    }
}

/// One route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSpec {
    /// The destinations it is for.
    pub prefix: IpNet,
    /// Where they go.
    pub target: RouteTarget,
}

/// Where a route leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteTarget {
    /// To these next hops; with more than one, sessions are spread by hash.
    Via(Vec<HopSpec>),
    /// To the gateway's own kernel (local and broadcast addresses).
    Local,
    /// Nowhere: blackhole, unreachable, prohibit, or an interface that vipgate doesn't poll.
    Unreachable,
}

/// One next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopSpec {
    /// The interface it is on.
    pub interface: InterfaceId,
    /// The router's address; `None`: the destination itself is on the link.
    pub gateway: Option<IpAddr>,
}

/// A neighbour whose link address is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourSpec {
    /// The interface it is on.
    pub interface: InterfaceId,
    /// Its address.
    pub address: IpAddr,
    /// Its link address.
    pub mac: [u8; 6],
}
