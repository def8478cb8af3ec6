//! How a packet's way ends: exactly one of these.

use crate::counters::DropReason;
use crate::io::InterfaceId;
use crate::ports::pool::WorkerId;

/// How a packet's way ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It hasn't ended yet.
    Undecided,
    /// Sent on, out of this interface.
    Forward(InterfaceId),
    /// Sent on in pieces, out of this interface.
    Cut(InterfaceId),
    /// Sent in pieces into a tunnel.
    CutIntoTunnel,
    /// Given to the worker that owns its session.
    HandOff(WorkerId),
    /// Turned into our answer to it, sent out of this interface.
    Answer(InterfaceId),
    /// For the gateway itself, which has nothing to say to it.
    Heard,
    /// Kept whole until the kernel has found its next hop's link address; then it leaves so.
    Wait(Then),
    /// Kept until the first fragment of its datagram comes.
    Park,
    /// Kept whole until gateways agree on the owner of its share, and the former one has released it; dropped so if that takes too long.
    Defer(DropReason),
    /// Taken in again by the next batch: what it must not overtake, a fragment of its datagram or of its flow, is taken in again, too; or
    /// it begins a connection anew whose old one still has packets in this batch.
    Requeue,
    /// Taken in again as if it came from outside: it goes to a VIP of this gateway.
    Around,
    /// Dropped.
    Drop(DropReason),
}

/// How a packet leaves that has waited for its neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// As [`Verdict::Forward`].
    Forward,
    /// As [`Verdict::Cut`].
    Cut,
    /// As [`Verdict::CutIntoTunnel`].
    CutIntoTunnel,
    /// As [`Verdict::Answer`].
    Answer,
}

const _: () = assert!(size_of::<Verdict>() <= 4, "64 of them are written in each batch");
