//! Metadata of packets between gateways.

/// Side of hairpinned packets (via a VIP of the same gateway), as a bit beside those of `Role::sides`.
pub const HAIRPIN_SIDE: u8 = 4;

/// Metadata of a packet between gateways, carried in the VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelMetadata {
    /// The sides that it was received on: the bits of `Role::sides`, or [`HAIRPIN_SIDE`].
    pub sides: u8,
    /// How often it has been forwarded between gateways, this time included: see `MAX_GATEWAY_HOPS`.
    pub hop_count: u8,
    /// Whether the gateway of its endpoint has no port for it: the receiver opens its session.
    pub requests_port: bool,
}

/// The upper bits of VNIs between gateways.
const VNI_PREFIX: u32 = 0x7670;
const SIDES_MASK: u32 = 7;
const HOPS_SHIFT: u32 = 3;
const PORT_REQUEST: u32 = 1 << 5;

impl TunnelMetadata {
    /// Encodes it as a VNI.
    #[inline]
    pub fn vni(self) -> u32 {
        let request = if self.requests_port { PORT_REQUEST } else { 0 };
        VNI_PREFIX << 8 | u32::from(self.sides) & SIDES_MASK | u32::from(self.hop_count & 3) << HOPS_SHIFT | request
    }

    /// Decodes a VNI; `None` if it isn't one of gateways.
    #[inline]
    pub fn of_vni(vni: u32) -> Option<Self> {
        let is_valid = vni >> 8 == VNI_PREFIX && vni & 0xff & !(SIDES_MASK | 3 << HOPS_SHIFT | PORT_REQUEST) == 0;
        let sides = (vni & SIDES_MASK) as u8;
        // Either received on an interface or hairpinned, not both, and not neither.
        let is_possible = (1..=HAIRPIN_SIDE).contains(&sides);
        let hop_count = ((vni >> HOPS_SHIFT) as u8 & 3).max(1);
        (is_valid && is_possible).then_some(Self { sides, hop_count, requests_port: vni & PORT_REQUEST != 0 })
    }
}
