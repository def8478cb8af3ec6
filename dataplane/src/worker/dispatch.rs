//! Dispatch: carries out the verdicts of a batch, and sends queued packets whose neighbors are resolved.

use std::collections::VecDeque;
use std::sync::Arc;

use vipgate_mem::Frame;

use super::{HOUSEKEEPING_MS, WorkerState};
use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::InterfaceId;
use crate::flow::time::Tick;
use crate::flow::verdict::{AfterResolution, Verdict};
use crate::io::batch::{BATCH_SIZE, Batch, MAX_REINJECTED, NeighborKey, ParsedHeader, Requeued, TunnelDestination};
use crate::io::handoff::WorkerLinks;
use crate::io::{PacketIo, Received};
use crate::observe::Observer;
use crate::observe::counters::Counters;
use crate::observe::drops::Attribution;
use crate::policy::Snapshot;
use crate::reassembly::BufferSlot;
use crate::stage::context::Tables;
use crate::stage::encap::FragmentEncap;
use crate::wire::ethernet::{self, MacPair};
use crate::wire::fragmentation;
use crate::worker::handover::{HandoverQueue, OwnershipState};
use crate::worker::neighbor_queue::{Fragmentation, NeighborQueue, QueuedPacket, ResolutionOutcome, SendMode};
use crate::worker::static_nat::StaticNatIo;

impl<Io: PacketIo> WorkerState<Io> {
    /// Carries out the verdict of each packet. Afterwards the batch holds no frame.
    pub(super) fn dispatch(&mut self, snapshot: &Snapshot, lease_expired: bool, now: Tick) {
        let ownership = OwnershipState::of(snapshot.policy.members(), lease_expired);
        let Self { io, links, neighbor_queue, counters, tables, handover, batch, .. } = self;
        let Batch {
            frames,
            reinjected,
            requeued,
            verdicts,
            directions,
            neighbors,
            mtus,
            tunnel_destinations,
            headers,
            queue_positions,
            ..
        } = batch;
        let results = Results { verdicts, directions, neighbors, mtus, tunnel_destinations, headers, queue_positions };
        let mut slow_path = SlowPath {
            snapshot,
            now,
            links,
            neighbor_queue,
            counters,
            tables,
            reinjected,
            requeued,
            handover,
            ownership,
            results,
        };
        let io = &mut StaticNatIo::new(io, snapshot);
        let mut sums = [TrafficSum::default(); Direction::ALL.len()];
        for (i, Received { frame, interface }) in frames.drain(..).take(BATCH_SIZE).enumerate() {
            // The common case. Everything else is out of line and takes the parts of `Received`, so that this loop
            // stays in registers.
            let Verdict::Forward(out) = verdicts[i] else {
                slow_path.finish(io, frame, interface, i);
                continue;
            };
            let bytes = u64::from(frame.len());
            if let Err(frame) = io.tx(out, frame) {
                slow_path.tx_failed(io, frame, out);
                continue;
            }
            sums[directions[i] as usize].add(bytes);
        }
        for (direction, sum) in Direction::ALL.into_iter().zip(sums) {
            slow_path.counters.forwarded(direction, sum.packets(), sum.bytes());
        }
        requeued.flush(reinjected);
    }

    /// Reinjects deferred packets after a change of ownership, and drops those that have expired.
    pub(super) fn retry_deferred(&mut self, snapshot: &Snapshot, lease_expired: bool, now: Tick) {
        self.handover.retry(OwnershipState::of(snapshot.policy.members(), lease_expired), &mut self.batch.reinjected);
        let Self { io, counters, tables, .. } = self;
        while let Some((Received { frame, interface }, reason)) = self.handover.expired(now) {
            let attribution = Attribution::of(snapshot.network.interface(interface).role);
            discard(io, counters, &mut tables.observer, frame, reason, interface, attribution, now);
        }
    }

    /// Sends queued packets whose neighbors are resolved, and drops those that have expired. After a suspension it sends
    /// none: they were translated under a lease that has expired.
    pub(super) fn retry_neighbor_queue(&mut self, snapshot: &Arc<Snapshot>, now: Tick) {
        let is_suspended = self.is_suspended;
        let Self { io, neighbor_queue, counters, tables, .. } = self;
        if neighbor_queue.is_empty() {
            return;
        }
        let view_changed = self.neighbor_snapshot != Arc::as_ptr(snapshot) as usize;
        if !view_changed && now.since(self.housekeeping) < HOUSEKEEPING_MS {
            return;
        }
        self.neighbor_snapshot = Arc::as_ptr(snapshot) as usize;
        let io = &mut StaticNatIo::new(io, snapshot);
        neighbor_queue.retry(&snapshot.network, now, |outcome| {
            let (ResolutionOutcome::Resolved(QueuedPacket { neighbor, .. }, _)
            | ResolutionOutcome::Expired(QueuedPacket { neighbor, .. })) = outcome;
            let (frame, reason) = match outcome {
                ResolutionOutcome::Resolved(packet, _) if is_suspended => (packet.frame, DropReason::NoLease),
                ResolutionOutcome::Resolved(packet, link) => match send_resolved(io, packet, &link, counters) {
                    Ok(()) => return,
                    Err(frame) => (frame, DropReason::TxFull),
                },
                ResolutionOutcome::Expired(packet) => (packet.frame, DropReason::NoNeighbor),
            };
            discard(
                io,
                counters,
                &mut tables.observer,
                frame,
                reason,
                neighbor.interface,
                Attribution::Destination,
                now,
            );
        });
    }
}

/// Packets and bytes of a batch in one direction, in one word, so that a packet adds to one: packets from bit 32 on.
#[derive(Clone, Copy, Default)]
struct TrafficSum(u64);

impl TrafficSum {
    #[inline]
    fn add(&mut self, bytes: u64) {
        self.0 += 1 << 32 | bytes;
    }

    fn packets(self) -> u64 {
        self.0 >> 32
    }

    fn bytes(self) -> u64 {
        self.0 & 0xffff_ffff
    }
}

/// The results of the pipeline per packet: see [`Batch`].
#[derive(Clone, Copy)]
struct Results<'a> {
    verdicts: &'a [Verdict; BATCH_SIZE],
    directions: &'a [Direction; BATCH_SIZE],
    neighbors: &'a [NeighborKey; BATCH_SIZE],
    mtus: &'a [u16; BATCH_SIZE],
    tunnel_destinations: &'a [TunnelDestination; BATCH_SIZE],
    headers: &'a [ParsedHeader; BATCH_SIZE],
    queue_positions: &'a [u32; BATCH_SIZE],
}

/// Carries out all verdicts but the common one.
struct SlowPath<'a> {
    snapshot: &'a Snapshot,
    now: Tick,
    links: &'a mut WorkerLinks,
    neighbor_queue: &'a mut NeighborQueue,
    counters: &'a Counters,
    tables: &'a mut Tables,
    reinjected: &'a mut VecDeque<Received>,
    requeued: &'a mut Requeued,
    handover: &'a mut HandoverQueue,
    ownership: OwnershipState,
    results: Results<'a>,
}

impl SlowPath<'_> {
    /// Carries out the verdict of a packet.
    #[cold]
    #[inline(never)]
    fn finish(&mut self, io: &mut impl PacketIo, frame: Frame, interface: InterfaceId, i: usize) {
        if let Err((frame, reason)) = self.try_finish(io, Received { frame, interface }, i) {
            let attribution = Attribution::of(self.snapshot.network.interface(interface).role);
            self.drop(io, frame, reason, interface, attribution);
        }
    }

    /// Drops a packet that found no space in the transmit ring. It is translated already, so the drop is attributed to
    /// its destination.
    #[cold]
    #[inline(never)]
    fn tx_failed(&mut self, io: &mut impl PacketIo, frame: Frame, out: InterfaceId) {
        self.drop(io, frame, DropReason::TxFull, out, Attribution::Destination);
    }

    fn drop(
        &mut self,
        io: &mut impl PacketIo,
        frame: Frame,
        reason: DropReason,
        on: InterfaceId,
        attribution: Attribution,
    ) {
        discard(io, self.counters, &mut self.tables.observer, frame, reason, on, attribution, self.now);
    }

    /// Carries out the verdict of a packet; returns the frame and the reason if it must be dropped.
    fn try_finish(&mut self, io: &mut impl PacketIo, received: Received, i: usize) -> Result<(), (Frame, DropReason)> {
        let Results { verdicts, directions, neighbors, tunnel_destinations, headers, queue_positions, .. } =
            self.results;
        let Received { frame, interface } = received;
        let bytes = u64::from(frame.len());
        match verdicts[i] {
            Verdict::Forward(_) | Verdict::Undecided => {
                unreachable!("forwarded by the caller; the pipeline decides every packet")
            }
            Verdict::Fragment(out) => self.fragment(io, out, frame, i, None)?,
            Verdict::FragmentIntoTunnel => {
                let Some((tunnel_header, out, Some(link))) =
                    FragmentEncap::of(self.snapshot, tunnel_destinations[i], headers[i].sides)
                else {
                    return Err((frame, DropReason::NoNeighbor));
                };
                self.fragment(io, out, frame, i, Some((&tunnel_header, &link)))?;
            }
            Verdict::Reply(out) => {
                io.tx(out, frame).map_err(|frame| (frame, DropReason::TxFull))?;
                self.counters.replies_sent.add(1);
            }
            Verdict::Consume => {
                self.counters.consumed.add(1);
                io.release(frame);
            }
            Verdict::HandOff(worker) => {
                let sent = self.links.send(worker, Received { frame, interface });
                sent.map_err(|Received { frame, .. }| (frame, DropReason::LinkFull))?;
                self.counters.handoffs.add(1);
            }
            Verdict::AwaitNeighbor(then) => {
                let mode = self.send_mode(then, i);
                let queued = self.neighbor_queue.enqueue(frame, neighbors[i], mode, self.now);
                queued.map_err(|frame| (frame, DropReason::NoNeighbor))?;
            }
            Verdict::AwaitFirstFragment => {
                self.tables.reassembly.fill(BufferSlot(queue_positions[i]), Received { frame, interface });
            }
            Verdict::Defer(reason) => {
                let deferred = self.handover.defer(Received { frame, interface }, reason, self.ownership, self.now);
                deferred.map_err(|received| (received.frame, reason))?;
            }
            Verdict::Requeue => self.requeued.fill(queue_positions[i], Received { frame, interface }),
            Verdict::Hairpin if self.reinjected.len() < MAX_REINJECTED => {
                self.counters.forwarded(directions[i], 1, bytes);
                let mut received = Received { frame, interface };
                received.mark_hairpin();
                self.reinjected.push_back(received);
            }
            Verdict::Hairpin => return Err((frame, DropReason::LinkFull)),
            Verdict::Drop(reason) => return Err((frame, reason)),
        }
        Ok(())
    }

    /// Forwards a packet in fragments; returns it if there was no space for all of them.
    fn fragment(
        &self,
        io: &mut impl PacketIo,
        out: InterfaceId,
        frame: Frame,
        i: usize,
        tunnel: Option<(&FragmentEncap, &MacPair)>,
    ) -> Result<(), (Frame, DropReason)> {
        if !send_fragments(io, out, &frame, self.results.mtus[i], tunnel) {
            return Err((frame, DropReason::TxFull));
        }
        self.counters.forwarded(self.results.directions[i], 1, frame.len().into());
        io.release(frame);
        Ok(())
    }

    /// How a packet is sent once its neighbor is resolved.
    fn send_mode(&self, then: AfterResolution, i: usize) -> SendMode {
        let Results { directions, mtus, tunnel_destinations, headers, .. } = self.results;
        let (direction, mtu) = (directions[i], mtus[i]);
        match then {
            AfterResolution::Forward => SendMode::Whole(direction),
            AfterResolution::Reply => SendMode::Reply,
            AfterResolution::Fragment => SendMode::Fragment(direction, Fragmentation { mtu, tunnel_header: None }),
            AfterResolution::FragmentIntoTunnel => {
                let tunnel_header = FragmentEncap::of(self.snapshot, tunnel_destinations[i], headers[i].sides)
                    .map(|(tunnel_header, ..)| tunnel_header);
                SendMode::Fragment(direction, Fragmentation { mtu, tunnel_header })
            }
        }
    }
}

/// Drops a packet: counts it by reason and address, and releases its frame.
pub(super) fn discard(
    io: &mut impl PacketIo,
    counters: &Counters,
    observer: &mut Observer,
    frame: Frame,
    reason: DropReason,
    on: InterfaceId,
    attribution: Attribution,
    now: Tick,
) {
    counters.dropped(reason);
    observer.drops.count(reason, frame.bytes(), on, attribution, now);
    io.release(frame);
}

/// Sends a packet whose neighbor is resolved; returns the frame if the transmit ring is full.
fn send_resolved(
    io: &mut impl PacketIo,
    packet: QueuedPacket,
    link: &MacPair,
    counters: &Counters,
) -> Result<(), Frame> {
    let QueuedPacket { mut frame, neighbor, mode, .. } = packet;
    let bytes = u64::from(frame.len());
    match mode {
        SendMode::Whole(direction) => {
            ethernet::set_macs(frame.bytes_mut(), link);
            io.tx(neighbor.interface, frame)?;
            counters.forwarded(direction, 1, bytes);
        }
        SendMode::Reply => {
            ethernet::set_macs(frame.bytes_mut(), link);
            io.tx(neighbor.interface, frame)?;
            counters.replies_sent.add(1);
        }
        SendMode::Fragment(direction, fragmentation) => {
            if fragmentation.tunnel_header.is_none() {
                ethernet::set_macs(frame.bytes_mut(), link);
            }
            let into = fragmentation.tunnel_header.as_ref().map(|tunnel_header| (tunnel_header, link));
            if !send_fragments(io, neighbor.interface, &frame, fragmentation.mtu, into) {
                return Err(frame);
            }
            counters.forwarded(direction, 1, bytes);
            io.release(frame);
        }
    }
    Ok(())
}

/// Sends a packet in fragments, encapsulated if `tunnel` is given; false if there was no space for all of them.
fn send_fragments(
    io: &mut impl PacketIo,
    out: InterfaceId,
    frame: &Frame,
    mtu: u16,
    tunnel: Option<(&FragmentEncap, &MacPair)>,
) -> bool {
    let mut all_sent = true;
    fragmentation::split(frame.bytes(), mtu, |headers, payload| {
        all_sent &= match tunnel {
            None => send(io, out, &[headers, payload]),
            Some((tunnel_header, link)) => {
                let encapsulated = tunnel_header.headers(headers, payload, link);
                encapsulated.is_some_and(|(encapsulated, length)| {
                    let packet = headers.get(ethernet::HEADER..).unwrap_or_default();
                    send(io, out, &[&encapsulated[..length], packet, payload])
                })
            }
        };
        all_sent
    });
    all_sent
}

/// Sends a packet of our own, given as several slices; false if there was no space for it.
pub(super) fn send(io: &mut impl PacketIo, interface: InterfaceId, bytes: &[&[u8]]) -> bool {
    let length = bytes.iter().map(|part| part.len()).sum();
    let Some(mut frame) = io.allocate(length) else { return false };
    let unsent = if frame.replace_with(bytes) { io.tx(interface, frame).err() } else { Some(frame) };
    match unsent {
        None => true,
        Some(frame) => {
            io.release(frame);
            false
        }
    }
}
