//! The end of a packet's way: where its verdict says, or, once its neighbour is known, out after all.

use std::sync::Arc;

use vipgate_mem::Frame;

use super::{HOUSEKEEPING_MS, Parts, Worker};
use crate::batch::{self, Batch, MOST_RELEASED, Travel};
use crate::counters::{Direction, DropReason};
use crate::io::{InterfaceId, PacketIo, Received};
use crate::snapshot::Snapshot;
use crate::stage::{gather, wrap};
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::waiting::{Outcome, Parked};
use crate::watch::drops::Whose;
use crate::wire::cut;

impl<Io: PacketIo> Worker<Io> {
    /// Sends every packet of the batch where its verdict says. Afterwards the batch owns no frame.
    pub(super) fn dispatch(&mut self, view: &Snapshot, now: Tick) {
        let Parts { io, links, waiting, counters, tables, .. } = &mut self.parts;
        let Batch { frames, released, verdicts, directions, wanted, mtus, travels, heads, .. } = &mut self.batch;
        let (mut packets, mut sums) = ([0; Direction::ALL.len()], [0; Direction::ALL.len()]);
        for (i, received) in frames.drain(..).take(batch::MOST).enumerate() {
            let Received { frame, interface } = received;
            let bytes = u64::from(frame.len());
            let direction = directions[i];
            let verdict = verdicts[i];
            // By far the most, and so asked for first.
            if let Verdict::Forward(out) = verdict {
                if let Err(frame) = io.tx(out, frame) {
                    counters.dropped(DropReason::TxFull);
                    // It is translated already: who was to receive it is known by his own address.
                    tables.watch.drops.note(DropReason::TxFull, frame.bytes(), out, Whose::Receiver, now);
                    io.give(frame);
                } else {
                    packets[direction as usize] += 1;
                    sums[direction as usize] += bytes;
                }
                continue;
            }
            let dropped = match verdict {
                Verdict::Forward(_) | Verdict::Undecided => unreachable!("sent above; the pipeline decides about all"),
                Verdict::Cut(out) => {
                    if send_pieces(io, out, &frame, mtus[i]) {
                        counters.forwarded(direction, 1, bytes);
                        io.give(frame);
                        continue;
                    }
                    (frame, DropReason::TxFull)
                }
                Verdict::CutIntoTunnel => {
                    if send_pieces_to(io, view, travels[i], heads[i].sides, &frame, mtus[i]) {
                        counters.forwarded(direction, 1, bytes);
                        io.give(frame);
                        continue;
                    }
                    (frame, DropReason::NoNeighbor)
                }
                Verdict::Answer(out) => match io.tx(out, frame) {
                    Ok(()) => {
                        counters.answered.add(1);
                        continue;
                    }
                    Err(frame) => (frame, DropReason::TxFull),
                },
                Verdict::Heard => {
                    counters.heard.add(1);
                    io.give(frame);
                    continue;
                }
                Verdict::HandOff(worker) => match links.send(worker, Received { frame, interface }) {
                    Ok(()) => {
                        counters.handoffs.add(1);
                        continue;
                    }
                    Err(Received { frame, .. }) => (frame, DropReason::LinkFull),
                },
                Verdict::Wait => match waiting.park(frame, wanted[i], direction, now) {
                    Ok(()) => continue,
                    Err(frame) => (frame, DropReason::NoNeighbor),
                },
                Verdict::Park => match gather::park(&mut tables.fragments, Received { frame, interface }) {
                    Ok(()) => continue,
                    Err(Received { frame, .. }) => (frame, DropReason::Fragment),
                },
                Verdict::Around if released.len() < MOST_RELEASED => {
                    counters.forwarded(direction, 1, bytes);
                    let mut received = Received { frame, interface };
                    received.turn_around();
                    released.push_back(received);
                    continue;
                }
                Verdict::Around => (frame, DropReason::LinkFull),
                Verdict::Drop(reason) => (frame, reason),
            };
            let (frame, reason) = dropped;
            counters.dropped(reason);
            let whose = Whose::of(view.network.interface(interface).role);
            tables.watch.drops.note(reason, frame.bytes(), interface, whose, now);
            io.give(frame);
        }
        for (direction, (packets, bytes)) in Direction::ALL.into_iter().zip(packets.into_iter().zip(sums)) {
            counters.forwarded(direction, packets, bytes);
        }
    }

    /// Sends what waited for a neighbour that is known by now.
    pub(super) fn retry_waiting(&mut self, view: &Arc<Snapshot>, now: Tick) {
        let Parts { io, waiting, counters, tables, .. } = &mut self.parts;
        if waiting.is_empty() {
            return;
        }
        let view_changed = self.waited_under != Arc::as_ptr(view) as usize;
        if !view_changed && now.since(self.housekeeping) < HOUSEKEEPING_MS {
            return;
        }
        self.waited_under = Arc::as_ptr(view) as usize;
        waiting.retry(&view.network, now, |outcome| {
            let (Outcome::Ready(Parked { wanted, .. }) | Outcome::Expired(Parked { wanted, .. })) = outcome;
            let (frame, reason) = match outcome {
                Outcome::Ready(parked) => {
                    let bytes = u64::from(parked.frame.len());
                    match io.tx(parked.wanted.interface, parked.frame) {
                        Ok(()) => return counters.forwarded(parked.direction, 1, bytes),
                        Err(frame) => (frame, DropReason::TxFull),
                    }
                }
                Outcome::Expired(parked) => (parked.frame, DropReason::NoNeighbor),
            };
            counters.dropped(reason);
            tables.watch.drops.note(reason, frame.bytes(), wanted.interface, Whose::Receiver, now);
            io.give(frame);
        });
    }
}

/// Sends a packet in pieces; false if there wasn't room for all of them.
fn send_pieces(io: &mut impl PacketIo, interface: InterfaceId, frame: &Frame, mtu: u16) -> bool {
    let mut all = true;
    cut::cut(frame.bytes(), mtu, |headers, payload| {
        all &= send(io, interface, &[headers, payload]);
        all
    });
    all
}

/// Sends a packet in pieces into a tunnel; false if there wasn't room for all of them, or its way isn't known yet.
fn send_pieces_to(io: &mut impl PacketIo, view: &Snapshot, travel: Travel, sides: u8, frame: &Frame, mtu: u16) -> bool {
    let mut all = true;
    cut::cut(frame.bytes(), mtu, |headers, payload| {
        let before = wrap::before_piece(view, travel, sides, &[headers, payload]);
        all &= before.is_some_and(|(out, outer, length)| send(io, out, &[&outer[..length], headers, payload]));
        all
    });
    all
}

/// Sends a packet of our own that stands in several places; false if there was no room for it.
pub(super) fn send(io: &mut impl PacketIo, interface: InterfaceId, bytes: &[&[u8]]) -> bool {
    let Some(mut frame) = io.take() else { return false };
    let unsent = if frame.replace_with(bytes) { io.tx(interface, frame).err() } else { Some(frame) };
    match unsent {
        None => true,
        Some(frame) => {
            io.give(frame);
            false
        }
    }
}
