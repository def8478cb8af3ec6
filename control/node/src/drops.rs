//! Why the rules of a node drop packets: each reason is a named counter of the nftables table.

/// Reason of a drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No gateway.
    Unreachable,
    NoVip,
    /// Of a pod that policy doesn't know, by a Service to the outside.
    UnknownPod,
    /// Marked for a gateway, but routed elsewhere.
    Guard,
    /// Out of a tunnel, but not to a pod.
    NotAPod,
    /// Out of a tunnel, to the node itself.
    ToNode,
    /// Out of a tunnel, of no known gateway by its MAC address.
    UnknownGateway,
    /// A tunnel packet from an address that is no gateway's.
    TunnelUnknown,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::Unreachable,
        Self::NoVip,
        Self::UnknownPod,
        Self::Guard,
        Self::NotAPod,
        Self::ToNode,
        Self::UnknownGateway,
        Self::TunnelUnknown,
    ];

    /// Its name, and that of its counter.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::NoVip => "no_vip",
            Self::UnknownPod => "unknown_pod",
            Self::Guard => "guard",
            Self::NotAPod => "not_a_pod",
            Self::ToNode => "to_node",
            Self::UnknownGateway => "unknown_gateway",
            Self::TunnelUnknown => "tunnel_unknown",
        }
    }

    /// For people.
    pub fn description(self) -> &'static str {
        match self {
            Self::Unreachable => {
                "a covered pod's packet, but no gateway can be used: its sender receives an ICMP error"
            }
            Self::NoVip => "a covered pod's packet, but its policy has no VIP for it",
            Self::UnknownPod => {
                "of a pod that policy doesn't know, to a Service whose endpoint is outside of the cluster"
            }
            Self::Guard => {
                "a covered pod's packet that would have left by the node: somebody has changed rules or routes"
            }
            Self::NotAPod => "from a gateway, but not to a pod of this node",
            Self::ToNode => "from a gateway, to the node itself",
            Self::UnknownGateway => "out of a tunnel, but not from a gateway by its inner source MAC address",
            Self::TunnelUnknown => "a tunnel packet from an address that is no gateway's",
        }
    }
}
