//! What is known of one direction of a session, as bits.

use crate::snapshot::spec::{AROUND, Role};

/// What is known of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// Its packets come in on an inside interface.
    pub const INSIDE: Self = Self(Role::Inside.sides());
    /// Its packets come in on an outside interface.
    pub const OUTSIDE: Self = Self(Role::Outside.sides());
    /// TCP: a SYN has passed.
    pub const SYN: Self = Self(0x04);
    /// TCP: a FIN has passed.
    pub const FIN: Self = Self(0x08);
    /// TCP: an RST that belongs to the connection has passed.
    pub const RST: Self = Self(0x10);
    /// A packet has passed, and the next one is only counted: it can prove nothing that isn't known (see [`Tracking`]).
    pub const SEEN: Self = Self(0x20);
    /// The session has ended; its port rests.
    pub const QUARANTINED: Self = Self(0x40);
    /// This is the direction of the first packet.
    pub const ORIGIN: Self = Self(0x80);

    /// Whether all flags of `other` are set.
    #[inline]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The side that its packets come from, as a bit: see [`Role::sides`]. 0: they come around by way of a VIP of this gateway, and
    /// never from a wire.
    #[inline]
    pub fn side(self) -> u8 {
        self.0 & (Self::INSIDE.0 | Self::OUTSIDE.0)
    }

    /// Whether its packets may come from these sides.
    #[inline]
    pub fn may_come_from(self, sides: u8) -> bool {
        (if self.side() == 0 { AROUND } else { self.side() }) & sides != 0
    }

    /// The same flags, for packets that come from another side.
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

/// How far one direction is to be believed, as bits above the number of its [`Direction`](crate::counters::Direction).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tracking(pub u8);

impl Tracking {
    /// Of the first packet's direction: its sender has shown that it receives what it is answered.
    pub const CONFIRMED: Self = Self(0x08);
    /// TCP: sequence and acknowledgement are the sender's. Without it they are only what the last segment said.
    pub const SYNCHRONIZED: Self = Self(0x10);
    /// TCP: the last segment was out of the window.
    pub const LOST: Self = Self(0x20);
    /// TCP: not synchronized, and the last segment says FIN.
    pub const CLAIMS_FIN: Self = Self(0x40);
    /// All of them.
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
