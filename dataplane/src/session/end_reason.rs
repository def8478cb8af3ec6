//! Why sessions end, as metrics and logs name it.

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum EndReason {
    /// No packet within its timeout.
    Idle,
    /// TCP closed in both directions.
    Closed,
    /// TCP was reset.
    Reset,
    /// TCP handshake not completed in time.
    Unanswered,
    /// Not allowed by policy any more.
    Policy,
    /// Ended by an operator.
    Flushed,
    /// Embryonic or closing, and evicted for a new session.
    Evicted,
    /// Evicted from a full table: its holder was above its fair share, others were below theirs.
    OverShare,
}

impl EndReason {
    /// Every reason, by number.
    pub const ALL: [Self; 8] = [
        Self::Idle,
        Self::Closed,
        Self::Reset,
        Self::Unanswered,
        Self::Policy,
        Self::Flushed,
        Self::Evicted,
        Self::OverShare,
    ];

    /// Its label in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Unanswered => "unanswered",
            Self::Policy => "policy",
            Self::Flushed => "flushed",
            Self::Evicted => "evicted",
            Self::OverShare => "over_share",
        }
    }
}
