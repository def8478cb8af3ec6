//! The end of a packet's way: where its verdict says, or, once its neighbour is known, out after all.

use std::collections::VecDeque;
use std::sync::Arc;

use vipgate_mem::Frame;

use super::{HOUSEKEEPING_MS, Parts, Worker};
use crate::batch::{self, Batch, Head, MOST_RELEASED, Requeued, Travel, Wanted};
use crate::counters::{Counters, Direction, DropReason};
use crate::fragments::Place;
use crate::handover::{HandoverQueue, Standing};
use crate::io::{InterfaceId, PacketIo, Received};
use crate::link::handoff::Links;
use crate::pipeline::Tables;
use crate::snapshot::Snapshot;
use crate::stage::wrap::Lining;
use crate::time::Tick;
use crate::verdict::{Then, Verdict};
use crate::waiting::{Departure, Outcome, Parked, Pieces, Waiting};
use crate::watch::Watch;
use crate::watch::drops::Whose;
use crate::wire::cut;
use crate::wire::ethernet::{self, Link};

impl<Io: PacketIo> Worker<Io> {
    /// Sends every packet of the batch where its verdict says. Afterwards the batch owns no frame.
    pub(super) fn dispatch(&mut self, view: &Snapshot, is_lapsed: bool, now: Tick) {
        let Parts { io, links, waiting, counters, tables, .. } = &mut self.parts;
        let (handover, standing) = (&mut self.handover, Standing::of(view.policy.members(), is_lapsed));
        let Batch { frames, released, requeued, verdicts, directions, wanted, mtus, travels, heads, places, .. } =
            &mut self.batch;
        let known = Known { verdicts, directions, wanted, mtus, travels, heads, places };
        let mut rare =
            Rare { view, now, links, waiting, counters, tables, released, requeued, handover, standing, known };
        let (mut packets, mut sums) = ([0; Direction::ALL.len()], [0; Direction::ALL.len()]);
        for (i, Received { frame, interface }) in frames.drain(..).take(batch::MOST).enumerate() {
            // By far the most; all else is kept out of the way, and handed over in pieces, so that this loop stays in registers.
            let Verdict::Forward(out) = verdicts[i] else {
                rare.end(io, frame, interface, i);
                continue;
            };
            let bytes = u64::from(frame.len());
            if let Err(frame) = io.tx(out, frame) {
                rare.unsent(io, frame, out);
                continue;
            }
            packets[directions[i] as usize] += 1;
            sums[directions[i] as usize] += bytes;
        }
        for (direction, (packets, bytes)) in Direction::ALL.into_iter().zip(packets.into_iter().zip(sums)) {
            rare.counters.forwarded(direction, packets, bytes);
        }
        requeued.flush(released);
    }

    /// Takes in what waited for a share once that may have come, and drops what has waited for too long.
    pub(super) fn retry_deferred(&mut self, view: &Snapshot, is_lapsed: bool, now: Tick) {
        if self.handover.is_empty() {
            return;
        }
        self.handover.retry(Standing::of(view.policy.members(), is_lapsed), &mut self.batch.released);
        let Parts { io, counters, tables, .. } = &mut self.parts;
        while let Some((Received { frame, interface }, reason)) = self.handover.expired(now) {
            let whose = Whose::of(view.network.interface(interface).role);
            discard(io, counters, &mut tables.watch, frame, (reason, interface, whose), now);
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
            let (Outcome::Ready(Parked { wanted, .. }, _) | Outcome::Expired(Parked { wanted, .. })) = outcome;
            let (frame, reason) = match outcome {
                Outcome::Ready(parked, link) => match depart(io, parked, &link, counters) {
                    Ok(()) => return,
                    Err(frame) => (frame, DropReason::TxFull),
                },
                Outcome::Expired(parked) => (parked.frame, DropReason::NoNeighbor),
            };
            discard(io, counters, &mut tables.watch, frame, (reason, wanted.interface, Whose::Receiver), now);
        });
    }
}

/// What is known of the packets of a batch: see [`Batch`].
#[derive(Clone, Copy)]
struct Known<'a> {
    verdicts: &'a [Verdict; batch::MOST],
    directions: &'a [Direction; batch::MOST],
    wanted: &'a [Wanted; batch::MOST],
    mtus: &'a [u16; batch::MOST],
    travels: &'a [Travel; batch::MOST],
    heads: &'a [Head; batch::MOST],
    places: &'a [u32; batch::MOST],
}

/// Where packets go that aren't simply sent on.
struct Rare<'a> {
    view: &'a Snapshot,
    now: Tick,
    links: &'a mut Links,
    waiting: &'a mut Waiting,
    counters: &'a Counters,
    tables: &'a mut Tables,
    released: &'a mut VecDeque<Received>,
    requeued: &'a mut Requeued,
    handover: &'a mut HandoverQueue,
    standing: Standing,
    known: Known<'a>,
}

impl Rare<'_> {
    /// Ends a packet's way as its verdict says.
    #[cold]
    #[inline(never)]
    fn end(&mut self, io: &mut impl PacketIo, frame: Frame, interface: InterfaceId, i: usize) {
        if let Err((frame, reason)) = self.try_end(io, Received { frame, interface }, i) {
            let whose = Whose::of(self.view.network.interface(interface).role);
            self.drop(io, frame, reason, interface, whose);
        }
    }

    /// A packet found no room in the transmit ring. It is translated already: who was to receive it is known by his own address.
    #[cold]
    #[inline(never)]
    fn unsent(&mut self, io: &mut impl PacketIo, frame: Frame, out: InterfaceId) {
        self.drop(io, frame, DropReason::TxFull, out, Whose::Receiver);
    }

    fn drop(&mut self, io: &mut impl PacketIo, frame: Frame, reason: DropReason, on: InterfaceId, whose: Whose) {
        discard(io, self.counters, &mut self.tables.watch, frame, (reason, on, whose), self.now);
    }

    /// The same; gives back what is to be dropped, and why.
    fn try_end(&mut self, io: &mut impl PacketIo, received: Received, i: usize) -> Result<(), (Frame, DropReason)> {
        let Known { verdicts, directions, wanted, mtus, travels, heads, places } = self.known;
        let direction = directions[i];
        let Received { frame, interface } = received;
        let bytes = u64::from(frame.len());
        match verdicts[i] {
            Verdict::Forward(_) | Verdict::Undecided => unreachable!("sent already; the pipeline decides about all"),
            Verdict::Cut(out) => {
                if !send_pieces(io, out, &frame, mtus[i], None) {
                    return Err((frame, DropReason::TxFull));
                }
                self.counters.forwarded(direction, 1, bytes);
                io.give(frame);
            }
            Verdict::CutIntoTunnel => {
                let Some((lining, out, Some(link))) = Lining::of(self.view, travels[i], heads[i].sides) else {
                    return Err((frame, DropReason::NoNeighbor));
                };
                if !send_pieces(io, out, &frame, mtus[i], Some((&lining, &link))) {
                    return Err((frame, DropReason::TxFull));
                }
                self.counters.forwarded(direction, 1, bytes);
                io.give(frame);
            }
            Verdict::Answer(out) => {
                io.tx(out, frame).map_err(|frame| (frame, DropReason::TxFull))?;
                self.counters.answered.add(1);
            }
            Verdict::Heard => {
                self.counters.heard.add(1);
                io.give(frame);
            }
            Verdict::HandOff(worker) => {
                let sent = self.links.send(worker, Received { frame, interface });
                sent.map_err(|Received { frame, .. }| (frame, DropReason::LinkFull))?;
                self.counters.handoffs.add(1);
            }
            Verdict::Wait(then) => {
                let departure = match then {
                    Then::Forward => Departure::Whole(direction),
                    Then::Answer => Departure::Answer,
                    Then::Cut => Departure::Cut(direction, Pieces { mtu: mtus[i], lining: None }),
                    Then::CutIntoTunnel => {
                        let lining = Lining::of(self.view, travels[i], heads[i].sides).map(|(lining, ..)| lining);
                        Departure::Cut(direction, Pieces { mtu: mtus[i], lining })
                    }
                };
                let parked = self.waiting.park(frame, wanted[i], departure, self.now);
                parked.map_err(|frame| (frame, DropReason::NoNeighbor))?;
            }
            Verdict::Park => {
                self.tables.fragments.fill(Place(places[i]), Received { frame, interface });
            }
            Verdict::Defer(reason) => {
                let deferred = self.handover.defer(Received { frame, interface }, reason, self.standing, self.now);
                deferred.map_err(|received| (received.frame, reason))?;
            }
            Verdict::Requeue => self.requeued.fill(places[i], Received { frame, interface }),
            Verdict::Around if self.released.len() < MOST_RELEASED => {
                self.counters.forwarded(direction, 1, bytes);
                let mut received = Received { frame, interface };
                received.turn_around();
                self.released.push_back(received);
            }
            Verdict::Around => return Err((frame, DropReason::LinkFull)),
            Verdict::Drop(reason) => return Err((frame, reason)),
        }
        Ok(())
    }
}

/// Drops a packet: counts it, notes whose it was, and gives its frame back.
pub(super) fn discard(
    io: &mut impl PacketIo,
    counters: &Counters,
    watch: &mut Watch,
    frame: Frame,
    (reason, on, whose): (DropReason, InterfaceId, Whose),
    now: Tick,
) {
    counters.dropped(reason);
    watch.drops.note(reason, frame.bytes(), on, whose, now);
    io.give(frame);
}

/// Sends a packet whose neighbour is known by now; gives it back if there is no room for it.
fn depart(io: &mut impl PacketIo, parked: Parked, link: &Link, counters: &Counters) -> Result<(), Frame> {
    let Parked { mut frame, wanted, departure, .. } = parked;
    let bytes = u64::from(frame.len());
    match departure {
        Departure::Whole(direction) => {
            ethernet::set_link(frame.bytes_mut(), link);
            io.tx(wanted.interface, frame)?;
            counters.forwarded(direction, 1, bytes);
        }
        Departure::Answer => {
            ethernet::set_link(frame.bytes_mut(), link);
            io.tx(wanted.interface, frame)?;
            counters.answered.add(1);
        }
        Departure::Cut(direction, pieces) => {
            if pieces.lining.is_none() {
                ethernet::set_link(frame.bytes_mut(), link);
            }
            let into = pieces.lining.as_ref().map(|lining| (lining, link));
            if !send_pieces(io, wanted.interface, &frame, pieces.mtu, into) {
                return Err(frame);
            }
            counters.forwarded(direction, 1, bytes);
            io.give(frame);
        }
    }
    Ok(())
}

/// Sends a packet in pieces, perhaps into a tunnel; false if there wasn't room for all of them.
fn send_pieces(
    io: &mut impl PacketIo,
    out: InterfaceId,
    frame: &Frame,
    mtu: u16,
    tunnel: Option<(&Lining, &Link)>,
) -> bool {
    let mut all = true;
    cut::cut(frame.bytes(), mtu, |headers, payload| {
        all &= match tunnel {
            None => send(io, out, &[headers, payload]),
            Some((lining, link)) => {
                let lined = lining.before(headers, payload, link);
                lined.is_some_and(|(lined, length)| {
                    let packet = headers.get(ethernet::HEADER..).unwrap_or_default();
                    send(io, out, &[&lined[..length], packet, payload])
                })
            }
        };
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
