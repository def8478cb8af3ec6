//! Fast parser: unfragmented TCP or UDP to our MAC address, with DF set, without options or extension headers. It leaves
//! all other packets to the full parser, with nothing decided. It doesn't check for martians: a packet with a session has
//! valid addresses, and `classify` checks the others.
//!
//! A key is hashed while it is in registers, and its group in the session table is prefetched.

use vipgate_mem::simd::{Kernel, LANES, ROW, Simd};

use crate::flow::address::V6;
use crate::flow::key::Key;
use crate::io::Received;
use crate::io::batch::{BATCH_SIZE, Batch, BatchFamily, FastPathArrays, PacketKind, PacketSet, ParsedHeader};
use crate::policy::network::Network;
use crate::session::{SessionFamily, Sessions};
use crate::stage::context::PacketFamily;
use crate::wire::fast_parse::{FastParse, lanes};
use crate::wire::tcp::Segment;
use crate::wire::{ethernet, protocol, udp};

const ETHERNET_HEADER: u16 = ethernet::HEADER as u16;

/// Parses the plain ones of `packets`; returns those of IPv4 and of IPv6.
pub(super) fn run(batch: &mut Batch, packets: PacketSet, network: &Network, sessions: &Sessions) -> [PacketSet; 2] {
    if let Some(simd) = Simd::detect() {
        let (v4, v6) = simd.run(PlainV4 { arrays: u32::fast_path_arrays(batch), packets, network, sessions });
        return [v4, parse_each::<V6>(batch, v6, sessions)];
    }
    let mut candidates = PacketSet::default();
    for i in packets {
        if batch.frames.get(i).and_then(|received| start(received, network, &mut batch.headers[i])).is_some() {
            candidates.insert(i);
        }
    }
    let v4 = parse_each::<u32>(batch, candidates, sessions);
    [v4, parse_each::<V6>(batch, candidates.without(v4), sessions)]
}

/// The start of a frame that may be plain: it is addressed to us, not hairpinned, and not shorter than
/// [`lanes::MIN_LENGTH`]. Sets the packet's sides.
#[inline(always)]
fn start<'a>(
    received: &'a Received,
    network: &Network,
    head: &mut ParsedHeader,
) -> Option<&'a [u8; lanes::MIN_LENGTH]> {
    let port = network.interface_entry(received.interface);
    head.sides = port.sides;
    if received.has_metadata() {
        head.sides = received.sides(port.sides);
        if received.is_hairpin() {
            return None;
        }
    }
    received.frame.bytes().first_chunk().filter(|start: &&[u8; lanes::MIN_LENGTH]| port.is_destination(*start))
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

/// As [`parse_each`], eight IPv4 packets at a time; returns those that it has accepted, and the IPv6 packets that may be
/// plain.
struct PlainV4<'a> {
    arrays: FastPathArrays<'a, u32>,
    packets: PacketSet,
    network: &'a Network,
    sessions: &'a Sessions,
}

impl Kernel for PlainV4<'_> {
    type Output = (PacketSet, PacketSet);

    /// Loops of few steps each, so that each stays in registers.
    #[inline(always)]
    fn run(self, simd: Simd) -> (PacketSet, PacketSet) {
        let Self { arrays, packets, network, sessions } = self;
        let FastPathArrays { frames, headers, segments, keys, hashes, homes, .. } = arrays;
        let (mut rows, mut lengths) = ([&lanes::NO_ROW; BATCH_SIZE], [0; BATCH_SIZE]);
        let [mut v4, mut v6] = [PacketSet::default(); 2];
        for i in packets {
            let Some(received) = frames.get(i) else { break };
            let Some(start) = start(received, network, &mut headers[i]) else { continue };
            match lanes::ethertype(start) {
                ethernet::IPV4 => v4.insert(i),
                ethernet::IPV6 => v6.insert(i),
                _ => continue,
            }
            (rows[i], lengths[i]) = (lanes::row(start), received.frame.len().into());
        }
        if v4.is_empty() {
            return (v4, v6);
        }
        let parsed = ParsedLanes::parse(simd, &rows, &lengths, frames.len());
        let (table, accepted) = (u32::table(sessions), parsed.udp.or(parsed.tcp));
        for i in accepted {
            let (head, protocol) = (&mut headers[i], parsed.protocols[i] as u8);
            head.kind = if protocol == protocol::UDP { PacketKind::Udp } else { PacketKind::Tcp };
            head.ttl = parsed.ttls_and_totals[i] as u8;
            head.l4_offset = <u32 as FastParse>::L4_OFFSET as u16;
            head.ip_length = (parsed.ttls_and_totals[i] >> 16) as u16;
            let (source, destination, ports) = lanes::addresses_and_ports(rows[i]);
            keys[i].set(source, destination, ports, protocol);
            hashes[i] = sessions.hash_key(&keys[i]);
            homes[i] = table.prefetch(hashes[i]);
        }
        let mut plain = accepted;
        for i in accepted.and(parsed.tcp) {
            if parse_segment(&frames[i], headers[i].ip_length, &mut segments[i]).is_none() {
                plain.remove(i);
            }
        }
        // Removes Ethernet padding.
        for i in plain.and(parsed.padded) {
            frames[i].frame.set_len(ETHERNET_HEADER + headers[i].ip_length);
        }
        (plain, v6)
    }
}

/// The headers of a batch: see [`lanes::PlainLanes`].
struct ParsedLanes {
    udp: PacketSet,
    tcp: PacketSet,
    padded: PacketSet,
    ttls_and_totals: [u32; BATCH_SIZE],
    protocols: [u32; BATCH_SIZE],
}

impl ParsedLanes {
    /// Parses the first `count` rows.
    #[inline(always)]
    fn parse(simd: Simd, rows: &[&[u8; ROW]; BATCH_SIZE], lengths: &[u32; BATCH_SIZE], count: usize) -> Self {
        let [mut udp, mut tcp, mut padded] = [PacketSet::default(); 3];
        let (mut ttls_and_totals, mut protocols) = ([0; BATCH_SIZE], [0; BATCH_SIZE]);
        let results = ttls_and_totals.as_chunks_mut().0.iter_mut().zip(protocols.as_chunks_mut().0);
        let vectors = rows.as_chunks().0.iter().zip(lengths.as_chunks().0).zip(results);
        for (first, ((rows, lengths), (ttls_and_totals, protocols))) in (0..count).step_by(LANES).zip(vectors) {
            let parsed = lanes::parse(simd, rows, lengths);
            (*ttls_and_totals, *protocols) = (parsed.ttls_and_totals, parsed.protocols);
            udp = udp.or(PacketSet::eight(first, parsed.udp));
            tcp = tcp.or(PacketSet::eight(first, parsed.tcp));
            padded = padded.or(PacketSet::eight(first, parsed.padded));
        }
        Self { udp, tcp, padded, ttls_and_totals, protocols }
    }
}

/// Parses the TCP segment in a plain IPv4 packet of `total` bytes.
#[inline(always)]
fn parse_segment(received: &Received, total: u16, to: &mut Segment) -> Option<()> {
    let end = usize::from(ETHERNET_HEADER + total);
    Segment::parse(received.frame.bytes().get(<u32 as FastParse>::L4_OFFSET..end)?, to)
}
