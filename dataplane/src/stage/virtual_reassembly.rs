//! Virtual reassembly: gives later fragments the ports of the first one (RFC 4787 REQ-14). All fragments of a datagram
//! go to one worker; those that overtake the first one wait there. With its ports a fragment continues like any packet.
//! Fragments that nothing translates need no ports and pass.
//!
//! The fragment table changes packet by packet, but frames are moved only at the end of the batch: an early fragment is
//! reserved and counted before its frame is stored, and the first one finds it in either state. Released fragments are
//! requeued directly behind the first one, and later packets of their flow in the batch behind them. So batch
//! boundaries don't change the result.

use crate::flow::address::V6;
use crate::flow::datagram::{Known, TransportPorts};
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{GatewayId, Owner};
use crate::flow::time::Tick;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind, PacketSet, QueuePosition};
use crate::policy::compiled::Policy;
use crate::reassembly::fragment::{Fragment, FragmentError};
use crate::reassembly::{BufferedFragment, DatagramKey, LaterFragment, VirtualReassembly};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::encap;
use crate::stage::flow_owner::FlowOwners;
use crate::wire::ip_id::IpIdAllocator;
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, icmp, ipv4, ipv6, protocol, u16_at};

/// Resolves the ports of the batch's fragments, or forwards those that are reassembled elsewhere.
pub fn run<A: FragmentFamily>(
    batch: &mut Batch,
    fragments: &mut VirtualReassembly,
    ids: &mut IpIdAllocator,
    context: &Context<'_>,
) {
    let (mut pending, mut firsts) = (batch.undecided_of::<A>().and(batch.fragments), PacketSet::default());
    while let Some(i) = pending.into_iter().next() {
        pending.remove(i);
        if !batch.fragments.contains(i) {
            let tuple = if batch.plain.contains(i) { A::keys(batch)[i].tuple() } else { A::tuples(batch)[i] };
            if is_same_flow::<A>(batch, &tuple, firsts) {
                batch.requeue(i);
            }
            continue;
        }
        let tuple = A::tuples(batch)[i];
        let (before, is_handed_off) = (batch.frames[i].datagram(), batch.frames[i].is_fragment_handed_off());
        if before.is_none() && !needs_ports(&tuple, &context.snapshot.policy) {
            continue;
        }
        if before.is_none()
            && let Some(to) = other_owner::<A>(batch, i, context)
        {
            encap::forward_to_owner::<A>(batch, i, to);
            continue;
        }
        let frame = batch.frames[i].frame.bytes();
        let Some((key, piece, protocol_number)) = A::parse_fragment(frame.get(ethernet::HEADER..).unwrap_or_default())
        else {
            continue;
        };
        let outcome = match (before, piece) {
            (Some(known), Ok(piece)) => Ok((known, piece.is_first())),
            (_, Err(refusal)) => Err(drop_fragment(refusal)),
            (None, Ok(piece)) => {
                if let Some(worker) = context.flows.reassembly_worker(&key).filter(|_| !is_handed_off) {
                    batch.frames[i].mark_fragment_handed_off();
                    Err(Verdict::HandOff(worker))
                } else {
                    let fragment = UnresolvedFragment { key: &key, piece, protocol_number };
                    look_up(batch, i, &fragment, fragments, ids, context.now)
                }
            }
        };
        match outcome {
            Ok((known, first)) => {
                let TransportPorts { protocol, source: source_port, destination: destination_port } = known.ports;
                let tuple = Tuple { source_port, destination_port, protocol, ..tuple };
                if is_same_flow::<A>(batch, &tuple, firsts) {
                    batch.frames[i].set_datagram(known);
                    A::tuples_mut(batch)[i] = tuple;
                    batch.requeue(i);
                } else {
                    resolve::<A>(batch, i, known, first);
                }
                if before.is_none() && first && release(batch, i, fragments, &key, known) {
                    firsts.insert(i);
                    pending = pending.or(batch.undecided_of::<A>().and(PacketSet::after(i)));
                }
            }
            Err(verdict) => batch.decide(i, verdict),
        }
    }
}

/// The other gateway that a fragment with unknown ports is sent to: the owner of its endpoint or its VIP; if the ports
/// of the VIP are sharded, the gateway that reassembles this datagram, where the first fragment arrives, too, whichever
/// path the network chose.
fn other_owner<A: FragmentFamily>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<GatewayId> {
    let (tuple, received) = (&A::tuples(batch)[i], &batch.frames[i]);
    let policy = &context.snapshot.policy;
    let pod = policy.endpoint(tuple.source).filter(|(_, _, egress)| policy.translates(egress, tuple.destination));
    let owner = match (pod, policy.vip(tuple.destination)) {
        (Some((_, endpoint, _)), _) if !received.is_hairpin() => policy.owner_of(endpoint),
        (_, Some(vip)) if vip.shards.is_distributed() => {
            if received.is_from_peer() {
                return None;
            }
            let (key, ..) = A::parse_fragment(received.frame.bytes().get(ethernet::HEADER..)?)?;
            return match vip.shards.owner_of_hash(FlowOwners::datagram_hash(&key)) {
                Owner::Other(to) => Some(to),
                Owner::This | Owner::Unowned => None,
            };
        }
        (_, Some(vip)) => vip.shards.owner(),
        _ => return None,
    };
    match owner {
        Owner::Other(to) if !received.is_at_hop_limit() => Some(to),
        Owner::Other(_) | Owner::This | Owner::Unowned => None,
    }
}

/// A fragment that has no ports yet.
struct UnresolvedFragment<'a, A: FragmentFamily> {
    key: &'a DatagramKey<A>,
    piece: Fragment,
    protocol_number: u8,
}

/// Looks a fragment up in the fragment table: the ports of its datagram, and whether it is the first fragment.
fn look_up<A: FragmentFamily>(
    batch: &mut Batch,
    i: usize,
    fragment: &UnresolvedFragment<'_, A>,
    fragments: &mut VirtualReassembly,
    ids: &mut IpIdAllocator,
    now: Tick,
) -> Result<(Known, bool), Verdict> {
    let &UnresolvedFragment { key, piece, protocol_number } = fragment;
    // New ports change the CRC32c of SCTP by a factor that depends on the length of the whole packet, which the first
    // fragment doesn't have (RFC 9260 appendix A). SCTP senders split messages into chunks and seldom fragment packets
    // (section 6.9).
    if protocol_number == protocol::SCTP {
        return Err(Verdict::Drop(DropReason::Fragment));
    }
    if !piece.is_first() {
        return match fragments.add_later(key, piece, now) {
            Ok(LaterFragment::Resolved(known)) => Ok((known, false)),
            Ok(LaterFragment::OutOfOrder) => {
                let place = fragments.reserve(key, i as u8).ok_or(Verdict::Drop(DropReason::Fragment))?;
                batch.queue_positions[i] = place.0;
                Err(Verdict::AwaitFirstFragment)
            }
            Err(refusal) => Err(drop_fragment(refusal)),
        };
    }
    let (_, source, destination) = read_first(batch, i, protocol_number).ok_or(Verdict::Drop(DropReason::Malformed))?;
    let id = ids.next(key.destination, protocol_number);
    let ports = TransportPorts { protocol: protocol_number, source, destination };
    fragments.add_first(key, piece, ports, id, now).map(|known| (known, true)).map_err(drop_fragment)
}

/// Requeues the fragments that waited for the first one, packet `first`; false if there were none.
fn release<A: FragmentFamily>(
    batch: &mut Batch,
    first: usize,
    fragments: &mut VirtualReassembly,
    key: &DatagramKey<A>,
    known: Known,
) -> bool {
    let mut has_released = false;
    while let Some(waiting) = fragments.release(key) {
        has_released = true;
        match waiting {
            BufferedFragment::Frame(mut received) => {
                received.set_datagram(known);
                batch.requeued.push(QueuePosition::after(first), Some(received));
            }
            BufferedFragment::InBatch(packet) => {
                let packet = usize::from(packet);
                batch.frames[packet].set_datagram(known);
                batch.requeue_after(packet, first);
            }
        }
    }
    has_released
}

/// Whether a packet is of the same flow as one of the first fragments before it.
fn is_same_flow<A: PacketFamily>(batch: &Batch, tuple: &Tuple<A>, firsts: PacketSet) -> bool {
    firsts.into_iter().any(|first| A::tuples(batch)[first] == *tuple)
}

/// Gives a fragment the ports of its datagram, so that later stages treat it like any packet.
fn resolve<A: PacketFamily>(batch: &mut Batch, i: usize, known: Known, first: bool) {
    let kind = if first {
        read_first(batch, i, known.ports.protocol).map(|(kind, ..)| kind)
    } else {
        Some(PacketKind::ResolvedFragment)
    };
    let Some(kind) = kind else {
        return batch.decide(i, Verdict::Drop(DropReason::Malformed));
    };
    let tuple = &mut A::tuples_mut(batch)[i];
    tuple.source_port = known.ports.source;
    tuple.destination_port = known.ports.destination;
    tuple.protocol = known.ports.protocol;
    batch.headers[i].kind = kind;
    batch.frames[i].set_datagram(known);
    batch.new_ip_id.insert(i);
    if kind.has_session() {
        batch.sessionless.remove(i);
    }
}

/// The kind and the ports of a first fragment.
fn read_first(batch: &mut Batch, i: usize, protocol_number: u8) -> Option<(PacketKind, u16, u16)> {
    let payload = batch.frames[i].frame.bytes().get(batch.headers[i].l4_offset.into()..)?;
    let ports = (u16_at(payload, 0), u16_at(payload, 2));
    Some(match protocol_number {
        protocol::TCP => {
            Segment::parse(payload, &mut batch.segments[i])?;
            (PacketKind::Tcp, ports.0, ports.1)
        }
        // The UDP length is that of the whole datagram, so it isn't checked.
        protocol::UDP => (PacketKind::Udp, ports.0, ports.1),
        protocol::ICMP | protocol::ICMPV6 => {
            let parse = if protocol_number == protocol::ICMP { icmp::parse_v4 } else { icmp::parse_v6 };
            match parse(payload)? {
                icmp::Message::EchoRequest(id) => (PacketKind::EchoRequest, id, 0),
                icmp::Message::EchoReply(id) => (PacketKind::EchoReply, 0, id),
                icmp::Message::Other => (PacketKind::Other, 0, 0),
            }
        }
        _ => (PacketKind::Other, 0, 0),
    })
}

/// Whether policy translates the packet.
fn needs_ports<A: PacketFamily>(tuple: &Tuple<A>, policy: &Policy) -> bool {
    policy.vip(tuple.destination).is_some()
        || policy.is_backend(tuple.source)
        || policy.translates_from(tuple.source, tuple.destination)
}

fn drop_fragment(_: FragmentError) -> Verdict {
    Verdict::Drop(DropReason::Fragment)
}

/// Parsing of one address family's fragments.
pub trait FragmentFamily: PacketFamily {
    /// The key of a fragment's datagram, its byte range, and the protocol; `None` if the packet is not a fragment.
    fn parse_fragment(packet: &[u8]) -> Option<(DatagramKey<Self>, Result<Fragment, FragmentError>, u8)>;
}

impl FragmentFamily for u32 {
    fn parse_fragment(packet: &[u8]) -> Option<(DatagramKey<Self>, Result<Fragment, FragmentError>, u8)> {
        let header = ipv4::Header::parse(packet).ok().filter(|header| header.fragment)?;
        Some((DatagramKey::of_v4(&header), Fragment::of_v4(&header), header.protocol))
    }
}

impl FragmentFamily for V6 {
    fn parse_fragment(packet: &[u8]) -> Option<(DatagramKey<Self>, Result<Fragment, FragmentError>, u8)> {
        let header = ipv6::Header::parse(packet).ok()?;
        Some((DatagramKey::of_v6(&header)?, Fragment::of_v6(&header), header.protocol))
    }
}
