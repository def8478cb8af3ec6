//! Drop reasons: one enum, the same names in metrics, logs, `drops`, `capture` and `trace`.

macro_rules! drop_reasons {
    ($($variant:ident = $name:literal: $help:literal,)+) => {
        /// Why a packet was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason {
            $(#[doc = $help] $variant,)+
        }

        impl DropReason {
            /// Every reason, by number.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Its name in metrics, logs, `drops` and `trace`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Its description, one sentence.
            pub fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)+ }
            }
        }
    };
}

drop_reasons! {
    NoService = "no_service": "To a VIP, but there is no matching session and no Service listens on that port.",
    NoBackend = "no_backend": "The Service has no backend that accepts new sessions.",
    NoPolicy = "no_policy":
        "From a pod that is not, or no longer, covered by a policy (`uncovered: drop`): its address must not leak.",
    NoVip = "no_vip": "The endpoint's policy assigns no VIP of this address family.",
    NoSession = "no_session": "A TCP segment that isn't a SYN, and there is no matching session.",
    PortsExhausted = "ports_exhausted":
        "Every SNAT port for this destination is in use: of the VIP, or of this gateway's shard.",
    Quota = "quota": "The endpoint has reached its policy's limit of sessions or of new sessions per second.",
    SessionTableFull = "session_table_full":
        "The session table is full, and the session's holder has its fair share already.",
    SpoofedSource = "spoofed_source": "The source address is not valid on the ingress interface or from this peer.",
    Martian = "martian":
        "Never forwarded: a loopback, link-local, multicast or reserved address, a source that is the destination, or a source route.",
    Malformed = "malformed": "The headers are truncated or contradict each other.",
    BadChecksum = "bad_checksum": "A header checksum is wrong.",
    UnknownProtocol = "unknown_protocol": "A protocol that vipgate doesn't translate.",
    Fragment = "fragment": "A fragment that overlaps others, has no first fragment, or exceeds the reassembly limits.",
    Ttl = "ttl": "The TTL or hop limit expired at this gateway.",
    TooBig = "too_big": "Longer than the MTU of the next hop's link.",
    NoRoute = "no_route":
        "The kernel has no route to the destination over an interface of the gateway; for a pod: over an inside interface.",
    NoNeighbor = "no_neighbor": "The next hop didn't answer ARP or NDP in time, or too many packets wait for it.",
    NotLocal = "not_local": "The Service allows only backends on this node, and there is none.",
    SourceRange = "source_range": "The Service doesn't allow this client address.",
    TupleInUse = "tuple_in_use":
        "The client has a session with the same tuple through another frontend, and no port is free.",
    NoOwner = "no_owner":
        "The packet's shard of the VIP has no active owner, or the packet reached the hop limit between gateways.",
    NoLease = "no_lease": "The gateway's lease has expired: it opens no sessions and forwards only replicated ones.",
    PeerUnknown = "peer_unknown":
        "A tunnel packet whose source is not a known peer or node, or not on the interface toward it.",
    PeerUnauthenticated = "peer_unauthenticated":
        "A tunnel packet from a peer's address without a valid authentication tag, or from a node's without its secret MAC address.",
    LinkFull = "link_full": "The ring to the worker that owns the session is full.",
    TxFull = "tx_full": "The interface's transmit ring is full.",
    RxNoBuffer = "rx_no_buffer": "Lost before a worker received it: the fill ring was empty.",
    RxRingFull = "rx_ring_full": "Lost before a worker received it: the receive ring was full.",
    RxTooLong = "rx_too_long": "Lost before a worker received it: longer than a packet buffer.",
    NotOurs = "not_ours": "An ARP or neighbor discovery packet that is not for the gateway.",
}
