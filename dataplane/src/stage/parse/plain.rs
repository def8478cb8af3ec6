//! Fast parser: unfragmented TCP or UDP to our MAC address, with DF set, without options or extension headers. It leaves
//! all other packets to the full parser, with nothing decided. It doesn't check for martians: a packet with a session has
//! valid addresses, and `classify` checks the others.
//!
//! A key is hashed while it is in registers, and its group in the session table is prefetched.

use crate::flow::address::V6;
use crate::flow::key::Key;
use crate::io::Received;
use crate::io::batch::{BATCH_SIZE, Batch, FastPathArrays, PacketKind, PacketSet, ParsedHeader};
use crate::policy::network::Network;
use crate::session::Sessions;
use crate::stage::context::PacketFamily;
use crate::wire::fast_parse::FastParse;
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, protocol, udp};

const ETHERNET_HEADER: u16 = ethernet::HEADER as u16;

/// Parses the plain ones of `packets`; returns those of IPv4 and of IPv6. Each eight packets go through all loops before
/// the next eight: frames are 2 KiB apart, so that the headers of a whole batch evict each other from the first cache
/// between one loop and the next.
pub(super) fn run(batch: &mut Batch, packets: PacketSet, network: &Network, sessions: &Sessions) -> [PacketSet; 2] {
    let [mut v4, mut v6] = [PacketSet::default(); 2];
    for first in (0..BATCH_SIZE).step_by(8) {
        let mut candidates = PacketSet::default();
        for i in packets.and(PacketSet::eight(first)) {
            let Some(received) = batch.frames.get(i) else { break };
            if is_candidate(received, network, &mut batch.headers[i]) {
                candidates.insert(i);
            }
        }
        let plain = parse_each::<u32>(batch, candidates, sessions);
        v4 = v4.or(plain);
        v6 = v6.or(parse_each::<V6>(batch, candidates.without(plain), sessions));
    }
    [v4, v6]
}

/// Whether a packet may be plain: it is addressed to us, and not hairpinned. Sets its sides.
#[inline]
fn is_candidate(received: &Received, network: &Network, head: &mut ParsedHeader) -> bool {
    let port = network.interface_entry(received.interface);
    head.sides = port.sides;
    if received.has_metadata() {
        head.sides = received.sides(port.sides);
        if received.is_hairpin() {
            return false;
        }
    }
    port.is_destination(received.frame.bytes())
}

/// Parses packets one by one.
fn parse_each<A: PacketFamily + FastParse>(batch: &mut Batch, packets: PacketSet, sessions: &Sessions) -> PacketSet {
    let FastPathArrays { frames, headers, segments, keys, hashes, homes, .. } = A::fast_path_arrays(batch);
    let (mut plain, table) = (PacketSet::default(), A::table(sessions));
    for i in packets {
        let Some(received) = frames.get_mut(i) else { break };
        if parse_one(received, &mut headers[i], &mut segments[i], &mut keys[i]).is_some() {
            hashes[i] = sessions.hash_key(&keys[i]);
            homes[i] = table.prefetch(hashes[i]);
            plain.insert(i);
        }
    }
    plain
}

#[inline]
fn parse_one<A: PacketFamily + FastParse>(
    received: &mut Received,
    head: &mut ParsedHeader,
    segment: &mut Segment,
    key: &mut Key<A>,
) -> Option<()> {
    let frame = received.frame.bytes();
    let plain = A::parse_frame(frame.first_chunk()?, frame)?;
    // Each field is stored as soon as it is read, used or not: the CPU has few registers.
    key.set(plain.source, plain.destination, plain.ports, plain.protocol);
    head.ttl = plain.ttl;
    head.l4_offset = A::L4_OFFSET as u16;
    head.ip_length = plain.total;
    let length = u32::from(ETHERNET_HEADER) + u32::from(plain.total);
    if frame.len() < length as usize {
        return None;
    }
    if plain.protocol == protocol::UDP {
        let is_exact_length = u32::from(plain.udp_length) + A::L4_OFFSET as u32 == length;
        if !is_exact_length || usize::from(plain.udp_length) < udp::HEADER {
            return None;
        }
        head.kind = PacketKind::Udp;
    } else {
        let payload = frame.get(A::L4_OFFSET..length as usize).filter(|_| plain.protocol == protocol::TCP)?;
        Segment::parse(payload, segment)?;
        head.kind = PacketKind::Tcp;
    }
    // Removes Ethernet padding.
    if frame.len() != length as usize {
        received.frame.set_len(length as u16);
    }
    Some(())
}
