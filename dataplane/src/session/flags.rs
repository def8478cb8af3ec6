//! Per-direction flags of a session.

use crate::flow::tunnel_metadata::HAIRPIN_SIDE;
use crate::policy::spec::Role;

/// Flags of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// Its packets arrive on an inside interface.
    pub const INSIDE: Self = Self(Role::Inside.sides());
    /// Its packets arrive on an outside interface.
    pub const OUTSIDE: Self = Self(Role::Outside.sides());
    /// TCP: a SYN was seen.
    pub const SYN: Self = Self(0x04);
    /// TCP: a FIN was seen.
    pub const FIN: Self = Self(0x08);
    /// TCP: a valid RST was seen.
    pub const RST: Self = Self(0x10);
    /// A packet was seen, and the next one needs no tracking: it can confirm nothing new (see [`Tracking`]).
    pub const SEEN: Self = Self(0x20);
    /// The session has ended; its port is quarantined.
    pub const QUARANTINED: Self = Self(0x40);
    /// This is the original direction.
    pub const ORIGIN: Self = Self(0x80);

    /// Whether all flags of `other` are set.
    #[inline]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Ingress side of its packets, as a bit: see [`Role::sides`]. 0: they are hairpinned via a VIP of this gateway and
    /// never arrive on an interface.
    #[inline]
    pub fn side(self) -> u8 {
        self.0 & (Self::INSIDE.0 | Self::OUTSIDE.0)
    }

    /// Whether its packets may arrive from these sides.
    #[inline]
    pub fn may_come_from(self, sides: u8) -> bool {
        (if self.side() == 0 { HAIRPIN_SIDE } else { self.side() }) & sides != 0
    }

    /// Whether a packet from these sides needs nothing but translation: it has a session that isn't quarantined, may
    /// arrive there, and isn't the first of its direction.
    #[inline]
    pub fn is_established_from(self, sides: u8) -> bool {
        self.0 & (Self::SEEN.0 | Self::QUARANTINED.0) == Self::SEEN.0 && self.side() & sides != 0
    }

    /// The same flags with another ingress side.
    #[must_use]
    pub fn with_side(self, side: u8) -> Self {
        let both = Self::INSIDE.with(Self::OUTSIDE);
        self.without(both).with(Self(side & both.0))
    }

    /// With the flags of `other`.
    #[inline]
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without the flags of `other`.
    #[inline]
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// Connection tracking state of one direction, as bits above the number of its
/// [`Direction`](crate::flow::direction::Direction).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tracking(pub u8);

impl Tracking {
    /// Original direction only: the initiator has proven that it receives the replies.
    pub const CONFIRMED: Self = Self(0x08);
    /// TCP: sequence and acknowledgement are verified. Without it they are only what the last segment claimed.
    pub const SYNCHRONIZED: Self = Self(0x10);
    /// TCP: the last segment was out of window.
    pub const OUT_OF_WINDOW: Self = Self(0x20);
    /// TCP: not synchronized, and the last segment carried an unverified FIN.
    pub const UNVERIFIED_FIN: Self = Self(0x40);
    /// All bits.
    pub const ALL: Self = Self(0x78);

    /// Whether all bits of `other` are set.
    #[inline]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// With the bits of `other`.
    #[inline]
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without the bits of `other`.
    #[inline]
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}
