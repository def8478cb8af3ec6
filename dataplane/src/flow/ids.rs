//! Numbers of things: interfaces, workers, gateways, and what policy and session table index.

use super::address::Address;
/// VIPs per gateway, retired ones included.
pub const MAX_VIPS: usize = 16_384;
/// [`EndpointId`]: bits of the index within a bucket, and the bit of IPv6.
pub(crate) const INDEX_BITS: u32 = 20;
pub(crate) const IPV6_BIT: u32 = 1 << 31;

/// A VIP's index in the workers' port tables: stable while any port of it is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VipId(pub u16);

/// An egress policy's number: stable while there is a policy of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EgressId(pub u32);

/// An endpoint's number within a policy: family, bucket and index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointId(pub(crate) u32);

impl EndpointId {
    /// Placeholder until the endpoint is looked up.
    pub const NONE: Self = Self(0);

    pub(crate) fn new<A: Address>(bucket: usize, index: u32) -> Self {
        let family = if A::BITS == 32 { 0 } else { IPV6_BIT };
        Self(family | (bucket as u32) << INDEX_BITS | index)
    }

    /// Whether the endpoint is an IPv6 address.
    pub(crate) fn is_v6(self) -> bool {
        self.0 & IPV6_BIT != 0
    }
}

/// A shard map's number: stable while there is a map of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardMapId(pub u32);

/// A gateway's number, valid for the lifetime of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GatewayId(pub u8);

/// A node's number: its index in the policy's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(pub u32);

/// A Service's number: stable while there is a Service of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u32);

/// A port of a Service, at all its VIPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendId {
    pub service: ServiceId,
    /// Index of its port in `ServiceSpec::ports`.
    pub port: u16,
}

impl FrontendId {
    /// Placeholder until the frontend is looked up.
    pub const NONE: Self = Self { service: ServiceId(u32::MAX), port: 0 };

    /// The health check of a Service: a frontend without backends.
    pub(crate) fn health(service: ServiceId) -> Self {
        Self { service, port: u16::MAX }
    }

    /// Whether it is a Service's health check.
    #[inline]
    pub fn is_health(self) -> bool {
        self.port == u16::MAX
    }
}

/// Owner, relative to this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This gateway.
    This,
    /// Another gateway.
    Other(GatewayId),
    /// None: no gateway that could own it is active.
    Unowned,
}

/// Remote end of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelRemote {
    /// Another gateway.
    Gateway(GatewayId),
    /// An overlay node.
    Node(NodeId),
}

/// An interface of the gateway: its index in the configured list of interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InterfaceId(pub u8);

/// A worker of this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u8);

/// Home group of a hash in a session table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HomeGroup(pub u32);

/// Slot number of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub u32);
