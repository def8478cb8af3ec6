//! Fast parser: unfragmented TCP or UDP to our MAC address, with DF set, without options or extension headers. It leaves
//! all other packets to the full parser, with nothing decided. It doesn't check for martians: a packet with a session has
//! valid addresses, and `classify` checks the others.
//!
//! A key is hashed while it is in registers, and its group in the session table is prefetched.

use vipgate_mem::simd::{Kernel, LANES, Simd};

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

    /// Eight packets after eight: frames are 2 KiB apart, so that the headers of a whole batch evict each other from the
    /// first cache between one loop and the next.
    #[inline(always)]
    fn run(mut self, simd: Simd) -> (PacketSet, PacketSet) {
        let [mut v4, mut v6] = [PacketSet::default(); 2];
        for first in (0..BATCH_SIZE).step_by(LANES) {
            let packets = self.packets.and(PacketSet::eight(first, u8::MAX));
            if !packets.is_empty() {
                let (plain, other) = self.parse_eight(simd, first, packets);
                (v4, v6) = (v4.or(plain), v6.or(other));
            }
        }
        (v4, v6)
    }
}

impl PlainV4<'_> {
    /// Parses `packets`, which are among the eight from `first` on. Loops of few steps each, so that each stays in
    /// registers.
    #[inline(always)]
    fn parse_eight(&mut self, simd: Simd, first: usize, packets: PacketSet) -> (PacketSet, PacketSet) {
        let FastPathArrays { frames, headers, segments, keys, hashes, homes, .. } = &mut self.arrays;
        let (mut rows, mut lengths) = ([&lanes::NO_ROW; LANES], [0; LANES]);
        let [mut v4, mut v6] = [PacketSet::default(); 2];
        for i in packets {
            let Some(received) = frames.get(i) else { break };
            let Some(start) = start(received, self.network, &mut headers[i]) else { continue };
            match lanes::ethertype(start) {
                ethernet::IPV4 => v4.insert(i),
                ethernet::IPV6 => v6.insert(i),
                _ => continue,
            }
            (rows[i % LANES], lengths[i % LANES]) = (lanes::row(start), received.frame.len().into());
        }
        if v4.is_empty() {
            return (v4, v6);
        }
        let parsed = lanes::parse(simd, &rows, &lengths);
        let [accepted, tcp, padded] =
            [parsed.udp | parsed.tcp, parsed.tcp, parsed.padded].map(|lanes| PacketSet::eight(first, lanes));
        let table = u32::table(self.sessions);
        for i in accepted {
            let (head, lane) = (&mut headers[i], i % LANES);
            let (protocol, ttl_and_total) = (parsed.protocols[lane] as u8, parsed.ttls_and_totals[lane]);
            head.kind = if protocol == protocol::UDP { PacketKind::Udp } else { PacketKind::Tcp };
            head.ttl = ttl_and_total as u8;
            head.l4_offset = <u32 as FastParse>::L4_OFFSET as u16;
            head.ip_length = (ttl_and_total >> 16) as u16;
            let (source, destination, ports) = lanes::addresses_and_ports(rows[lane]);
            keys[i].set(source, destination, ports, protocol);
            hashes[i] = self.sessions.hash_key(&keys[i]);
            homes[i] = table.prefetch(hashes[i]);
        }
        let mut plain = accepted;
        for i in tcp {
            if parse_segment(&frames[i], headers[i].ip_length, &mut segments[i]).is_none() {
                plain.remove(i);
            }
        }
        // Removes Ethernet padding.
        for i in plain.and(padded) {
            frames[i].frame.set_len(ETHERNET_HEADER + headers[i].ip_length);
        }
        (plain, v6)
    }
}

/// Parses the TCP segment in a plain IPv4 packet of `total` bytes.
#[inline(always)]
fn parse_segment(received: &Received, total: u16, to: &mut Segment) -> Option<()> {
    let end = usize::from(ETHERNET_HEADER + total);
    Segment::parse(received.frame.bytes().get(<u32 as FastParse>::L4_OFFSET..end)?, to)
}
