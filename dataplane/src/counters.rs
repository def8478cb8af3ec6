//! What a worker counts: packets and bytes by direction, drops by reason, sessions made and ended.
//!
//! One block a worker, written by that worker alone (relaxed load and store, no locked instruction), read by anyone.
//! The names here are the words of metrics, `drops`, `trace`, logs and tests: one definition each.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crossbeam::utils::CachePadded;

use crate::conflicts::Conflicts;

/// Which way a forwarded packet went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Direction {
    /// A pod's packet, leaving as its VIP.
    Egress,
    /// An answer to a pod's packet.
    Reply,
    /// A client's packet to a Service.
    Inbound,
    /// A backend's answer to a client.
    ServiceReply,
    /// Routed as it came: policy excludes it.
    Unchanged,
    /// Sent to the gateway that owns it.
    PeerOut,
    /// Taken from another gateway.
    PeerIn,
}

impl Direction {
    /// Every direction, in the order of their numbers.
    pub const ALL: [Self; 7] =
        [Self::Egress, Self::Reply, Self::Inbound, Self::ServiceReply, Self::Unchanged, Self::PeerOut, Self::PeerIn];

    /// The direction with this number; any number is one, if need be that of [`Self::Unchanged`].
    #[inline]
    pub fn from_number(number: u8) -> Self {
        const TABLE: [Direction; 8] = {
            let mut table = [Direction::Unchanged; 8];
            let mut at = 0;
            while at < Direction::ALL.len() {
                table[at] = Direction::ALL[at];
                at += 1;
            }
            table
        };
        TABLE[usize::from(number % 8)]
    }

    /// Its word in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Reply => "reply",
            Self::Inbound => "inbound",
            Self::ServiceReply => "service_reply",
            Self::Unchanged => "unchanged",
            Self::PeerOut => "peer_out",
            Self::PeerIn => "peer_in",
        }
    }
}

macro_rules! drop_reasons {
    ($($variant:ident = $name:literal: $help:literal,)+) => {
        /// Why a packet was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason {
            $(#[doc = $help] $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of their numbers.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Its word in metrics, logs, `drops` and `trace`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// What it means, in one sentence.
            pub fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)+ }
            }
        }
    };
}

drop_reasons! {
    NoService = "no_service": "To a VIP, but no session knows it and no Service listens there.",
    NoBackend = "no_backend": "The Service has no backend that takes new sessions.",
    NoPolicy = "no_policy": "From a pod that no policy covers (`uncovered: drop`), or covers no more: its address stays inside.",
    NoVip = "no_vip": "The endpoint's policy gives it no VIP of this address family.",
    NoSession = "no_session": "A TCP segment that isn't a SYN, and no session knows it.",
    PortsExhausted = "ports_exhausted": "Every SNAT port toward this destination is in use: of the VIP, or of this gateway's shard of it.",
    Quota = "quota": "The endpoint has as many sessions, or opens them as fast, as its policy allows.",
    SessionTableFull = "session_table_full": "The session table has no room for one more session of a holder that has its fair share already.",
    SpoofedSource = "spoofed_source": "Its source address can't be on the side that it came from, or no peer sends such packets on.",
    Martian = "martian": "Its source or destination can never be routed.",
    Malformed = "malformed": "Its headers contradict each other or are cut short.",
    BadChecksum = "bad_checksum": "A header checksum is wrong.",
    UnknownProtocol = "unknown_protocol": "A protocol that vipgate doesn't translate.",
    Fragment = "fragment": "A fragment that can't be told apart from others or overlaps them.",
    Ttl = "ttl": "Its time to live, or hop limit, ran out here.",
    TooBig = "too_big": "Longer than the next link carries.",
    NoRoute = "no_route": "The kernel's routes lead nowhere the gateway can send.",
    NoNeighbor = "no_neighbor": "The next hop didn't answer ARP or NDP in time, or too many packets wait for it.",
    NotLocal = "not_local": "The Service takes only backends on this node, and there is none.",
    SourceRange = "source_range": "The Service doesn't admit this client address.",
    TupleInUse = "tuple_in_use": "The client has a session with the same ends by way of another frontend, and no port is free.",
    NoOwner = "no_owner": "No gateway that serves has its part of the VIP, or another gateway sent it here in vain.",
    NoLease = "no_lease": "This gateway can't be sure that its ports are still its own: no new sessions, and none that nobody else knows.",
    PeerUnknown = "peer_unknown": "A tunnel packet from an address that is no known peer or node, or by an interface that doesn't lead there.",
    PeerUnauthenticated = "peer_unauthenticated": "A tunnel packet from a peer's address without that peer's authentication tag.",
    LinkFull = "link_full": "The ring to the worker that owns the session is full.",
    TxFull = "tx_full": "The interface's transmit ring is full.",
    RxNoBuffer = "rx_no_buffer": "Lost before a worker saw it: the fill ring had no frame left to receive into.",
    RxRingFull = "rx_ring_full": "Lost before a worker saw it: the receive ring was full.",
    RxTooLong = "rx_too_long": "Lost before a worker saw it: longer than a packet buffer receives.",
    NotOurs = "not_ours": "A neighbour question or message that isn't for the gateway.",
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum EndReason {
    /// Nothing came for as long as its timeout.
    Idle,
    /// TCP closed in both directions.
    Closed,
    /// TCP was reset.
    Reset,
    /// TCP never got past the handshake.
    Unanswered,
    /// Policy doesn't allow it any more.
    Policy,
    /// Someone asked for it.
    Flushed,
    /// Nobody had confirmed it, or it was closing, and others needed its place.
    Evicted,
    /// Its holder had more than its fair share of a full table, and others had less than theirs.
    OverShare,
}

impl EndReason {
    /// Every reason, in the order of their numbers.
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

    /// Its word in metrics.
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

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning worker calls it, so a plain load and store suffice.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Overwrites a level.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Its value now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Everything that one worker counts. Cache-padded: no other core's writes share its lines.
pub type WorkerCounters = CachePadded<Counters>;

/// The counters of one worker.
#[derive(Debug, Default)]
pub struct Counters {
    /// Packets received from the device.
    pub received: Counter,
    /// Packets by direction: see [`Direction`].
    pub packets: [Counter; Direction::ALL.len()],
    /// Bytes by direction, whole frames.
    pub bytes: [Counter; Direction::ALL.len()],
    /// Drops by reason: see [`DropReason`].
    pub drops: [Counter; DropReason::ALL.len()],
    /// ARP and NDP questions answered, ICMP errors and resets sent, announcements made.
    pub answered: Counter,
    /// Packets for the gateway itself that it had nothing to say to: acknowledgements of health checks, claims to VIPs.
    pub heard: Counter,
    /// ARP packets and neighbour advertisements by which another host claims a VIP of this gateway.
    pub vip_conflicts: Counter,
    /// Those claims themselves, for the control thread.
    pub conflicts: Conflicts,
    /// ICMP errors and resets that were not sent, because there were too many.
    pub answers_limited: Counter,
    /// Sessions open now.
    pub sessions: Counter,
    /// Sessions of the table that only holders below their fair share may have.
    pub session_reserve: Counter,
    /// Sessions that each VIP may have, whatever others want.
    pub session_fair_share: Counter,
    /// Copies of other gateways' sessions now.
    pub copies: Counter,
    /// Copies that found no place, or gave it to a session of this gateway.
    pub copies_refused: Counter,
    /// Copies that became sessions of this gateway.
    pub sessions_taken_over: Counter,
    /// Sessions opened since start.
    pub sessions_created: Counter,
    /// Sessions ended since start, by reason: see [`EndReason`].
    pub sessions_ended: [Counter; EndReason::ALL.len()],
    /// Packets of TCP and SCTP sessions that stand where only somebody does who doesn't see the connection: passed on without effect.
    pub out_of_window: Counter,
    /// Packets handed to the worker that owns their session.
    pub handoffs: Counter,
    /// Packets that wait for a neighbour now.
    pub waiting: Counter,
    /// Frames that the engine and its rings hold now; with the device's audit it accounts for every frame.
    pub frames_held: Counter,
    /// Frames that the worker's device answers for now.
    pub frames_device: Counter,
}

impl Counters {
    /// Counts forwarded packets and their bytes.
    #[inline]
    pub fn forwarded(&self, direction: Direction, packets: u64, bytes: u64) {
        if packets == 0 {
            return;
        }
        self.packets[direction as usize].add(packets);
        self.bytes[direction as usize].add(bytes);
    }

    /// Counts a drop.
    #[inline]
    pub fn dropped(&self, reason: DropReason) {
        self.drops[reason as usize].add(1);
    }
}
