//! Sessions as `vipgate sessions` and `trace` show them, and the filter that selects them.

use std::net::{IpAddr, SocketAddr};

use super::{SessionFamily, Sessions};
use crate::flow::direction::Direction;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;

/// Filter of sessions: every field that is given must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionFilter {
    /// The pod's address.
    pub endpoint: Option<IpAddr>,
    pub vip: Option<IpAddr>,
    pub remote: Option<IpAddr>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Connection state.
    pub state: Option<SessionState>,
}

/// Connection state of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SessionState {
    /// Packets have passed in one direction only.
    Opening = 1,
    /// Packets have passed in both directions.
    Established = 2,
    /// TCP: one side has sent FIN.
    HalfClosed = 3,
    /// TCP: both sides have sent FIN, or one has sent RST.
    Closing = 4,
    /// Ended; its port is not reused while packets for it may still arrive.
    Quarantined = 5,
}

impl SessionState {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Opening, Self::Established, Self::HalfClosed, Self::Closing, Self::Quarantined];

    /// Its name in the CLI.
    pub fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Established => "established",
            Self::HalfClosed => "half_closed",
            Self::Closing => "closing",
            Self::Quarantined => "quarantined",
        }
    }
}

/// One session, for output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// IP protocol number.
    pub protocol: u8,
    /// Direction of its first packet: from a pod, or from a client to a Service.
    pub direction: Direction,
    /// The pod's address and port (ICMP echo: its identifier).
    pub endpoint: SocketAddr,
    /// The VIP and the port that the endpoint is translated to.
    pub vip: SocketAddr,
    /// The remote address and port.
    pub remote: SocketAddr,
    /// State of the connection.
    pub state: SessionState,
    /// Milliseconds since the last packet of either direction.
    pub idle_ms: u32,
    /// Milliseconds until it expires without further packets.
    pub expires_ms: u32,
    /// Packets from the pod.
    pub packets_out: u64,
    /// Bytes from the pod (whole frames).
    pub bytes_out: u64,
    /// Packets to the pod.
    pub packets_in: u64,
    /// Bytes to the pod (whole frames).
    pub bytes_in: u64,
}

/// Slots that one command reads.
const SLICE: u32 = 4096;

pub(crate) fn slice<A: SessionFamily>(sessions: &Sessions, cursor: u64) -> impl Iterator<Item = Slot> + use<A> {
    let from = u32::try_from(cursor).unwrap_or(u32::MAX);
    (from..from.saturating_add(SLICE).min(A::table(sessions).slots())).map(Slot)
}

pub(crate) fn end_of_slice<A: SessionFamily>(sessions: &Sessions, cursor: u64) -> u64 {
    (cursor + u64::from(SLICE)).min(A::table(sessions).slots().into())
}

/// The session whose original direction is in a slot, standby sessions included.
pub(crate) fn describe<A: SessionFamily>(sessions: &Sessions, slot: Slot, now: Tick) -> SessionInfo {
    let table = A::table(sessions);
    let origin = table.entry(slot);
    let reply = table.entry(origin.twin());
    let (state, timeout) = sessions.state::<A>(slot);
    let idle_ms = now.since(origin.last_seen().later(reply.last_seen()));
    let [endpoint, remote, vip] = origin.transport_addresses();
    let [from_pod, to_pod] = match origin.direction() {
        Direction::Inbound => [reply, origin],
        _ => [origin, reply],
    };
    SessionInfo {
        protocol: origin.key().protocol,
        direction: origin.direction(),
        endpoint: (endpoint.0.to_ip(), endpoint.1).into(),
        vip: (vip.0.to_ip(), vip.1).into(),
        remote: (remote.0.to_ip(), remote.1).into(),
        state,
        idle_ms,
        expires_ms: timeout.saturating_sub(idle_ms),
        packets_out: from_pod.packets(),
        bytes_out: from_pod.bytes(),
        packets_in: to_pod.packets(),
        bytes_in: to_pod.bytes(),
    }
}
