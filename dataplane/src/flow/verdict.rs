//! Verdicts: each packet gets exactly one, which says what happens to it after the pipeline.

use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{InterfaceId, WorkerId};

/// What happens to a packet after the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not decided yet.
    Undecided,
    /// Forwarded out of this interface.
    Forward(InterfaceId),
    /// Fragmented and forwarded out of this interface.
    Fragment(InterfaceId),
    /// Fragmented; each fragment is encapsulated and sent into a tunnel.
    FragmentIntoTunnel,
    /// Handed off to the worker that owns its session.
    HandOff(WorkerId),
    /// Rewritten into our reply to it, sent out of this interface.
    Reply(InterfaceId),
    /// For the gateway itself, without a reply.
    Consume,
    /// Queued until the kernel has resolved its neighbor, then sent in this way.
    AwaitNeighbor(AfterResolution),
    /// Buffered until the first fragment of its datagram arrives.
    AwaitFirstFragment,
    /// Deferred until gateways agree on the owner of its shard and the former owner has released it; dropped for this
    /// reason after a timeout.
    Defer(DropReason),
    /// Processed again in the next batch: it must not overtake a requeued fragment of its datagram or packet of its
    /// flow, or it reopens a connection whose old session still has packets in this batch.
    Requeue,
    /// Hairpin (RFC 4787 REQ-9): to a VIP of this gateway, and processed again as if it came from outside.
    Hairpin,
    /// Dropped.
    Drop(DropReason),
}

/// How a packet is sent once its neighbor is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterResolution {
    /// As [`Verdict::Forward`].
    Forward,
    /// As [`Verdict::Fragment`].
    Fragment,
    /// As [`Verdict::FragmentIntoTunnel`].
    FragmentIntoTunnel,
    /// As [`Verdict::Reply`].
    Reply,
}

const _: () = assert!(size_of::<Verdict>() <= 4, "each batch writes 64 of them");
