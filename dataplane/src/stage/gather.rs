//! Third stage: fragments. Only the first one of a datagram has ports, so all of them come together at one worker, which
//! tells each the ports of the first; those that overtook it wait there. With its ports a fragment goes on like any packet.
//! Fragments that nobody has to translate need no ports, and pass.
//!
//! The memory changes packet by packet, frames move when the batch is over: so an early fragment has its place, and counts, before
//! its frame is there, and the first one finds it wherever it is. Those that waited come around, right behind the first one; what follows
//! of their flow in the batch follows them. So nothing depends on where batches begin.

use crate::address::V6;
use crate::batch::{Batch, Kind, Lane, Packets, Turn};
use crate::counters::DropReason;
use crate::fragments::piece::{Piece, Refusal};
use crate::fragments::{Fragments, Key, Known, Later, Ports, Waiting};
use crate::ids::Ids;
use crate::link::flows::Flows;
use crate::pipeline::Context;
use crate::session::tuple::Tuple;
use crate::snapshot::members::GatewayId;
use crate::snapshot::policy::Policy;
use crate::snapshot::shares::Owner;
use crate::stage::wrap;
use crate::verdict::Verdict;
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, icmp, ipv4, ipv6, protocol, u16_at};

/// Gives the batch's fragments their ports, or sends them where they get them.
pub fn run<A: Fragmented>(batch: &mut Batch, fragments: &mut Fragments, ids: &mut Ids, context: &Context<'_>) {
    let (mut left, mut firsts) = (batch.open_of::<A>().and(batch.fragments), Packets::default());
    while let Some(i) = left.into_iter().next() {
        left.remove(i);
        if !batch.fragments.contains(i) {
            let tuple = if batch.plain.contains(i) { A::keys(batch)[i].tuple() } else { A::tuples(batch)[i] };
            if follows::<A>(batch, &tuple, firsts) {
                batch.requeue(i);
            }
            continue;
        }
        let tuple = A::tuples(batch)[i];
        let (before, gathered) = (batch.frames[i].known(), batch.frames[i].is_gathered());
        if before.is_none() && !needs_ports(&tuple, &context.view.policy) {
            continue;
        }
        if before.is_none()
            && let Some(to) = elsewhere::<A>(batch, i, context)
        {
            wrap::send_to_owner::<A>(batch, i, to);
            continue;
        }
        let frame = batch.frames[i].frame.bytes();
        let Some((key, piece, number)) = A::read(frame.get(ethernet::HEADER..).unwrap_or_default()) else { continue };
        let outcome = match (before, piece) {
            (Some(known), Ok(piece)) => Ok((known, piece.is_first())),
            (_, Err(refusal)) => Err(refused(refusal)),
            (None, Ok(piece)) => match context.flows.gatherer(&key).filter(|_| !gathered) {
                Some(worker) => {
                    batch.frames[i].gather();
                    Err(Verdict::HandOff(worker))
                }
                None => gather(batch, i, &key, piece, number, fragments, ids, context),
            },
        };
        match outcome {
            Ok((known, first)) => {
                let Ports { protocol, source: source_port, destination: destination_port } = known.ports;
                let tuple = Tuple { source_port, destination_port, protocol, ..tuple };
                if follows::<A>(batch, &tuple, firsts) {
                    batch.frames[i].set_known(known);
                    A::tuples_mut(batch)[i] = tuple;
                    batch.requeue(i);
                } else {
                    resolve::<A>(batch, i, known, first);
                }
                if before.is_none() && first && release(batch, i, fragments, &key, known) {
                    firsts.insert(i);
                    left = left.or(batch.open_of::<A>().and(Packets::behind(i)));
                }
            }
            Err(verdict) => batch.decide(i, verdict),
        }
    }
}

/// Where a fragment goes whose ports nobody has to know yet: to the gateway that its endpoint or its VIP is, or, where the ports of a VIP
/// are those of several, to the one that gathers this datagram. There the first one comes, too, whichever way the network chose.
fn elsewhere<A: Fragmented>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<GatewayId> {
    let (tuple, received) = (&A::tuples(batch)[i], &batch.frames[i]);
    let policy = &context.view.policy;
    let pod = policy.endpoint(tuple.source).filter(|(_, _, egress)| policy.translates(egress, tuple.destination));
    let owner = match (pod, policy.vip(tuple.destination)) {
        (Some((_, endpoint, _)), _) if !received.is_hairpin() => policy.owner_of(endpoint),
        (_, Some(vip)) if vip.shares.is_shared() => {
            if received.is_from_peer() {
                return None;
            }
            let (key, ..) = A::read(received.frame.bytes().get(ethernet::HEADER..)?)?;
            return match vip.shares.gatherer(Flows::spread(&key)) {
                Owner::Other(to) => Some(to),
                Owner::This | Owner::Nobody => None,
            };
        }
        (_, Some(vip)) => vip.shares.owner(),
        _ => return None,
    };
    match owner {
        Owner::Other(to) if !received.is_at_last() => Some(to),
        Owner::Other(_) | Owner::This | Owner::Nobody => None,
    }
}

/// Asks the memory about a fragment: its datagram's ports, and whether it is the first.
fn gather<A: Fragmented>(
    batch: &mut Batch,
    i: usize,
    key: &Key<A>,
    piece: Piece,
    number: u8,
    fragments: &mut Fragments,
    ids: &mut Ids,
    context: &Context<'_>,
) -> Result<(Known, bool), Verdict> {
    // New ports change its CRC32c by a factor that depends on the length of the whole packet, which the first fragment doesn't tell
    // (RFC 9260 appendix A); its senders cut messages into chunks, and seldom packets into fragments (section 6.9).
    if number == protocol::SCTP {
        return Err(Verdict::Drop(DropReason::Fragment));
    }
    if !piece.is_first() {
        return match fragments.later(key, piece, context.now) {
            Ok(Later::Known(known)) => Ok((known, false)),
            Ok(Later::Early) => {
                let place = fragments.reserve(key, i as u8).ok_or(Verdict::Drop(DropReason::Fragment))?;
                batch.places[i] = place.0;
                Err(Verdict::Park)
            }
            Err(refusal) => Err(refused(refusal)),
        };
    }
    let (_, source, destination) = read_first(batch, i, number).ok_or(Verdict::Drop(DropReason::Malformed))?;
    let id = ids.next(key.destination, number);
    let ports = Ports { protocol: number, source, destination };
    fragments.first(key, piece, ports, id, context.now).map(|known| (known, true)).map_err(refused)
}

/// Lets those come around that have waited for the first one, packet `first`; false if there were none.
fn release<A: Fragmented>(
    batch: &mut Batch,
    first: usize,
    fragments: &mut Fragments,
    key: &Key<A>,
    known: Known,
) -> bool {
    let mut any = false;
    while let Some(waiting) = fragments.release(key) {
        any = true;
        match waiting {
            Waiting::Frame(mut received) => {
                received.set_known(known);
                batch.requeued.push(Turn::behind(first), Some(received));
            }
            Waiting::InBatch(packet) => {
                let packet = usize::from(packet);
                batch.frames[packet].set_known(known);
                batch.requeue_behind(packet, first);
            }
        }
    }
    any
}

/// Whether a packet is of the same flow as one of these before it.
fn follows<A: Lane>(batch: &Batch, tuple: &Tuple<A>, firsts: Packets) -> bool {
    firsts.into_iter().any(|first| A::tuples(batch)[first] == *tuple)
}

/// Lets a fragment go on with its datagram's ports.
fn resolve<A: Lane>(batch: &mut Batch, i: usize, known: Known, first: bool) {
    let kind =
        if first { read_first(batch, i, known.ports.protocol).map(|(kind, ..)| kind) } else { Some(Kind::Piece) };
    let Some(kind) = kind else {
        return batch.decide(i, Verdict::Drop(DropReason::Malformed));
    };
    let tuple = &mut A::tuples_mut(batch)[i];
    tuple.source_port = known.ports.source;
    tuple.destination_port = known.ports.destination;
    tuple.protocol = known.ports.protocol;
    batch.heads[i].kind = kind;
    batch.frames[i].set_known(known);
    batch.renumber.insert(i);
    if kind.has_session() {
        batch.sessionless.remove(i);
    }
}

/// What a first fragment is, and its ports.
fn read_first(batch: &mut Batch, i: usize, number: u8) -> Option<(Kind, u16, u16)> {
    let payload = batch.frames[i].frame.bytes().get(batch.heads[i].l4.into()..)?;
    let ports = (u16_at(payload, 0), u16_at(payload, 2));
    Some(match number {
        protocol::TCP => {
            Segment::parse(payload, &mut batch.segments[i])?;
            (Kind::Tcp, ports.0, ports.1)
        }
        // Its length is that of the whole datagram.
        protocol::UDP => (Kind::Udp, ports.0, ports.1),
        protocol::ICMP | protocol::ICMPV6 => {
            let parse = if number == protocol::ICMP { icmp::parse_v4 } else { icmp::parse_v6 };
            match parse(payload)? {
                icmp::Message::EchoRequest(id) => (Kind::EchoRequest, id, 0),
                icmp::Message::EchoReply(id) => (Kind::EchoReply, 0, id),
                icmp::Message::Other => (Kind::Other, 0, 0),
            }
        }
        _ => (Kind::Other, 0, 0),
    })
}

/// Whether somebody has to translate the packet.
fn needs_ports<A: Lane>(tuple: &Tuple<A>, policy: &Policy) -> bool {
    policy.vip(tuple.destination).is_some()
        || policy.is_backend(tuple.source)
        || policy.endpoint(tuple.source).is_some_and(|(_, _, egress)| policy.translates(egress, tuple.destination))
}

fn refused(_: Refusal) -> Verdict {
    Verdict::Drop(DropReason::Fragment)
}

/// An address family whose packets come in fragments.
pub trait Fragmented: Lane {
    /// What a fragment has in common with others, its place, and the protocol; `None` if the packet is none.
    fn read(packet: &[u8]) -> Option<(Key<Self>, Result<Piece, Refusal>, u8)>;
}

impl Fragmented for u32 {
    fn read(packet: &[u8]) -> Option<(Key<Self>, Result<Piece, Refusal>, u8)> {
        let header = ipv4::Header::parse(packet).ok().filter(|header| header.fragment)?;
        Some((Key::of_v4(&header), Piece::of_v4(&header), header.protocol))
    }
}

impl Fragmented for V6 {
    fn read(packet: &[u8]) -> Option<(Key<Self>, Result<Piece, Refusal>, u8)> {
        let header = ipv6::Header::parse(packet).ok()?;
        Some((Key::of_v6(&header)?, Piece::of_v6(&header), header.protocol))
    }
}
