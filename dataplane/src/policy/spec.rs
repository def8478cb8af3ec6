//! Specs: the input of control to the engine as plain values: the compiled policy, and the kernel's view of the
//! network.
//!
//! Snapshots are built from specs; the stages don't read them. Names in them are for display in `vipgate vips`,
//! `endpoints`, `sessions` and in logs.

mod keyed;
mod service;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

pub use self::keyed::Keyed;
pub use self::service::{
    BackendSpec, BackendState, HealthSpec, Scope, ServicePortSpec, ServiceSpec, first_target, repeated_target,
};
use crate::flow::ids::InterfaceId;
use crate::io::frame_layout::FrameLayout;
use crate::ports::BLOCKS;
pub use crate::ports::BlockSet;

/// Cluster addresses. Empty: none are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSpec {
    /// Pod addresses, ascending.
    pub pods: Vec<IpNet>,
    /// Other internal addresses, ascending: cluster IPs of Services, and pod prefixes of nodes.
    pub others: Vec<IpNet>,
    /// Whether external traffic of `pods` that no policy covers is dropped; otherwise it is passed to the kernel.
    pub drop_uncovered: bool,
}

/// An overlay node: traffic of its pods is encapsulated in VXLAN, in both directions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSpec {
    /// Its name: key, and for display.
    pub name: Arc<str>,
    /// Address and UDP port of its tunnels.
    pub address: SocketAddr,
    /// VNI of its overlay network, 24 bits.
    pub vni: u32,
    /// MAC address of its overlay interface.
    pub mac: [u8; 6],
    /// Whether its packets must have `mac` as inner source: a MAC address that only the node and gateways know
    /// authenticates them.
    pub verify_mac: bool,
    /// Whether it sends packets of covered pods alone: what no policy covers doesn't leave the cluster, not even with
    /// `uncovered: pass`.
    pub sends_covered_only: bool,
    /// Its pod prefixes. The longest matching prefix of all nodes determines a pod's node.
    pub prefixes: Vec<IpNet>,
}

/// An egress policy: translated destinations and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressSpec {
    /// Key: `EgressPolicy namespace/name`, or `Service namespace/name` if it comes from the annotation.
    pub name: Arc<str>,
    /// Destinations that are translated.
    pub destinations: Vec<IpNet>,
    /// Destinations that are routed unchanged. The longest prefix of both lists decides; this list wins a tie.
    pub excluded: Vec<IpNet>,
    /// How a new session selects one of the endpoint's VIPs.
    pub address_selection: AddressSelection,
    /// Limits of each endpoint.
    pub limits: Limits,
    /// Reaction to a packet that can't open a session.
    pub on_exhaustion: OnExhaustion,
}

/// How a new session selects its VIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressSelection {
    /// An endpoint keeps one VIP per family for all its sessions (RFC 4787 REQ-2, "paired").
    #[default]
    PerEndpoint,
    /// Every session selects a VIP of its own.
    PerConnection,
}

/// Limits of an endpoint; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Open sessions.
    pub sessions: Option<u32>,
    /// New sessions per second.
    pub new_sessions_per_second: Option<u32>,
    /// Guaranteed ports per endpoint toward each destination, regardless of other endpoints.
    pub guaranteed_ports: Option<u32>,
}

/// Reaction to a packet that can't open a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExhaustion {
    /// Reject it: ICMP "administratively prohibited", or a TCP reset.
    #[default]
    Reject,
    /// Drop it silently.
    Drop,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VipSpec {
    /// The address; it isn't assigned to an interface.
    pub address: IpAddr,
    /// The `Service namespace/name` or `EgressPolicy namespace/name` that it belongs to.
    pub name: Arc<str>,
    /// How it is announced.
    pub announce: Announce,
    /// Ports that are never allocated for SNAT: frontends and health checks. Sorted, each once.
    pub reserved_ports: Vec<u16>,
    /// Its placement on gateways, listed; empty: it has a shard map, or all of it belongs to this gateway.
    pub shards: Vec<ShardSpec>,
    /// Its placement by a shard map, which it shares with other VIPs; takes precedence over `shards`.
    pub shard_map: Option<ShardMapRef>,
    /// Its private addresses at gateways. One of another family, or one that a VIP has, too, isn't translated.
    pub private: Vec<PrivateAddressSpec>,
}

/// The private address of a VIP at a gateway: packets outside have it instead of the VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivateAddressSpec {
    /// Name of the gateway.
    pub gateway: Arc<str>,
    pub address: IpAddr,
}

/// The shard map of a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMapRef {
    /// Its name.
    pub map: Arc<str>,
    /// Added to the number of a block to get its slot, modulo [`SLOTS`]: so that a gateway with few slots of the map
    /// doesn't lack the same ports of all VIPs.
    pub rotation: u16,
}

/// Slots of a shard map: one for each port block of a VIP.
pub const SLOTS: usize = BLOCKS;

/// Shard map: for each of its slots the gateways that may own it, in order. All VIPs with the same eligible gateways
/// share one, so the size of a placement doesn't depend on the number of VIPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMapSpec {
    /// Its name: key, and for display.
    pub name: Arc<str>,
    /// The distinct orders: the home gateway, then its backups.
    pub orders: Vec<Vec<Arc<str>>>,
    /// The index in `orders` of each slot; [`SLOTS`] of them.
    pub slots: Vec<u16>,
}

impl ShardMapSpec {
    /// The gateways of a slot, home first; empty if it has none.
    pub fn order(&self, slot: u16) -> &[Arc<str>] {
        let order = self.slots.get(usize::from(slot)).and_then(|order| self.orders.get(usize::from(*order)));
        order.map_or(&[], Vec::as_slice)
    }
}

/// A slot of a shard map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotRef {
    /// The map's name; `None`: the map of the endpoint's first VIP that has one.
    pub map: Option<Arc<str>>,
    /// The slot, less than [`SLOTS`].
    pub slot: u16,
}

/// A shard of a VIP, placed on one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardSpec {
    /// Name of its home gateway.
    pub gateway: Arc<str>,
    /// Its port blocks; `None`: all.
    pub blocks: Option<Arc<BlockSet>>,
    /// Gateways for failover, in order: while the home is inactive, the first active one owns the shard.
    pub backups: Vec<Arc<str>>,
}

/// How a VIP is announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Announce {
    /// L2: its owner answers ARP and ND, and sends gratuitous ARP and unsolicited NA.
    #[default]
    L2,
    /// By BGP; ARP and ND requests are answered nevertheless.
    Bgp,
}

/// An endpoint: a covered pod address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    /// The pod's address: the source address of its packets at the gateway.
    pub address: IpAddr,
    /// `namespace/pod`; empty if no manifest names it.
    pub name: Arc<str>,
    /// Name of its egress policy.
    pub policy: Arc<str>,
    /// VIPs for its sessions, of its own address family. Empty: its traffic is dropped.
    pub vips: Vec<IpAddr>,
    /// Its home gateway; `None`: that of its slot, or, without one, any gateway that receives its packets.
    pub gateway: Option<Arc<str>>,
    /// Its slot of a shard map, whose owner has its packets; takes precedence over `gateway`.
    pub slot: Option<SlotRef>,
    /// Sentences for display: why this policy, if several cover it, and why no VIPs, if it has none.
    pub remarks: Vec<Arc<str>>,
}

/// The network as reported by netlink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkSpec {
    /// The gateway's interfaces; `interfaces[i].id.0 == i`.
    pub interfaces: Vec<InterfaceSpec>,
    /// Routes of the main and local tables with the best metric.
    pub routes: Vec<RouteSpec>,
    /// Neighbors with a valid MAC address.
    pub neighbors: Vec<NeighborSpec>,
    /// All local addresses of the gateway's kernel, broadcast addresses included, ascending.
    pub locals: Vec<IpAddr>,
}

impl NetworkSpec {
    /// The packet buffers of the gateway, which all of its interfaces share.
    pub fn frames(&self) -> FrameLayout {
        self.interfaces.first().map(|interface| interface.frames).unwrap_or_default()
    }
}

/// An interface polled by the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceSpec {
    /// Its index in the configuration.
    pub id: InterfaceId,
    pub name: String,
    /// Its interface index in the kernel.
    pub ifindex: u32,
    /// Its side of the gateway.
    pub role: Role,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its MTU, possibly larger than the gateway supports: see [`Self::usable_mtu`].
    pub mtu: u16,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// Its addresses in the kernel.
    pub addresses: Vec<IpAddr>,
    /// The gateway's packet buffers.
    pub frames: FrameLayout,
    /// Whether received packets may have partial checksums: see [`crate::wire::partial_checksum`].
    pub partial_checksums: bool,
}

impl InterfaceSpec {
    /// The usable MTU, bytes: limited by the size of packet buffers.
    pub fn usable_mtu(&self) -> u16 {
        self.mtu.min(self.frames.max_mtu())
    }
}

/// Side of the gateway that an interface is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Toward the pods.
    Inside,
    /// Toward external networks.
    Outside,
    /// One-armed: both.
    Both,
}

impl Role {
    /// Its sides as bits: 1 is inside, 2 outside.
    #[inline]
    pub const fn sides(self) -> u8 {
        match self {
            Self::Inside => 1,
            Self::Outside => 2,
            Self::Both => 3,
        }
    }

    /// The side on which replies to packets sent here arrive, as a bit: outside for one-armed interfaces.
    pub const fn reply_side(self) -> u8 {
        match self {
            Self::Inside => Self::Inside.sides(),
            Self::Outside | Self::Both => Self::Outside.sides(),
        }
    }

    /// The side on which packets of pods behind it arrive, as a bit: inside for one-armed interfaces.
    pub const fn pod_side(self) -> u8 {
        match self {
            Self::Inside | Self::Both => Self::Inside.sides(),
            Self::Outside => Self::Outside.sides(),
        }
    }

    /// Whether packets from pods are accepted here.
    pub fn is_inside(self) -> bool {
        matches!(self, Self::Inside | Self::Both)
    }

    /// Whether packets from external networks are accepted here.
    pub fn is_outside(self) -> bool {
        matches!(self, Self::Outside | Self::Both)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSpec {
    /// Its destination prefix.
    pub prefix: IpNet,
    pub target: RouteTarget,
}

/// Target of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteTarget {
    /// Next hops; with several (ECMP), sessions are distributed by hash.
    Via(Vec<HopSpec>),
    /// The gateway's own kernel (local and broadcast addresses).
    Local,
    /// None: blackhole, unreachable, prohibit, or an interface that vipgate doesn't poll.
    Unreachable,
}

/// A next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopSpec {
    pub interface: InterfaceId,
    /// The router's address; `None`: the destination is on-link.
    pub gateway: Option<IpAddr>,
}

/// A neighbor with a known MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighborSpec {
    pub interface: InterfaceId,
    pub address: IpAddr,
    /// Its MAC address.
    pub mac: [u8; 6],
}
