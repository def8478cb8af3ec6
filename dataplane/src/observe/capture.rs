//! Packet capture of one worker: copies matching packets before and after the pipeline, with their verdicts.
//!
//! The stages modify packets in place, so the headers of candidates are copied beforehand. The fast path has addresses,
//! ports and protocol at hand, in the key and the session: a cheap prefilter there sends candidates to the slow path.
//! All slow-path packets are copied, and the filter is applied after the pipeline. Captured packets are rate-limited,
//! and while the limit is reached or no buffer is free, nothing is copied. The capture client allocates the buffers,
//! which are recycled.

mod filter;
mod prefilter;
mod ring;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vipgate_mem::prefetch_read;

use self::filter::ProcessedPacket;
pub use self::filter::{CaptureFilter, OutcomeFilter};
use self::prefilter::Prefilters;
pub use self::prefilter::{Pattern, Prefilter};
pub use self::ring::{CaptureRing, CapturedPacket};
use crate::flow::direction::Direction;
use crate::flow::ids::WorkerId;
use crate::flow::time::Tick;
use crate::flow::verdict::Verdict;
use crate::io::batch::{BATCH_SIZE, Batch, BatchFamily, PacketKind, PacketSet};
use crate::session::table::Table;
use crate::session::{SessionFamily, Sessions};
use crate::wire::ethernet;

/// Bytes of a packet that the stages may modify: Ethernet, IPv6, and TCP with all options.
const HEADER_BYTES: usize = 128;

const V4: usize = <u32 as BatchFamily>::INDEX;

/// A running capture of one worker.
#[derive(Debug)]
pub struct Capture {
    filter: CaptureFilter,
    prefilters: Prefilters,
    is_paused: bool,
    ring: Arc<CaptureRing>,
    /// The buffer for the next packet; prefetched while the packet is processed, since buffers are not in the cache.
    next_buffer: Option<Box<CapturedPacket>>,
    worker: WorkerId,
    /// Snap length: bytes copied of a packet.
    length: usize,
    /// Packets per second, and how many are left of them in the current second.
    rate: u32,
    tokens: u32,
    second: u32,
    /// The candidates of the batch, and their headers and lengths on arrival.
    candidates: PacketSet,
    /// The candidates that match only if the gateway replies to them, or by the outer header of a tunnel.
    indirect: PacketSet,
    headers: Box<[[u8; HEADER_BYTES]; BATCH_SIZE]>,
    lengths: Box<[u16; BATCH_SIZE]>,
}

impl Capture {
    /// A capture of matching packets into the ring: at most `rate` packets per second and `length` bytes of each.
    pub fn new(filter: CaptureFilter, ring: Arc<CaptureRing>, worker: WorkerId, length: usize, rate: u32) -> Self {
        let prefilters = Prefilters::new(&filter);
        let (headers, lengths) = (Box::new([[0; HEADER_BYTES]; BATCH_SIZE]), Box::new([0; BATCH_SIZE]));
        let (candidates, indirect) = Default::default();
        Self {
            filter,
            prefilters,
            is_paused: false,
            ring,
            next_buffer: None,
            worker,
            length,
            rate,
            tokens: rate,
            second: 0,
            candidates,
            indirect,
            headers,
            lengths,
        }
    }

    /// Starts a batch after parsing: copies the headers of all packets that are not plain.
    #[inline]
    pub fn begin_batch(&mut self, batch: &Batch, now: Tick) {
        let second = now.0 / 1000;
        if second != self.second {
            (self.second, self.tokens) = (second, self.rate);
        }
        (self.candidates, self.indirect) = Default::default();
        self.is_paused = self.tokens == 0 || !self.has_buffer();
        if self.is_paused {
            self.ring.missed.fetch_add(batch.len() as u64, Relaxed);
            return;
        }
        for i in PacketSet::first(batch.len()).without(batch.plain) {
            self.copy_headers(i, batch.frames[i].frame.bytes());
        }
    }

    /// Copies the headers of plain packets that were forwarded into a tunnel untranslated: the original packet is at
    /// the end of the frame.
    #[inline]
    pub fn tunneled<A: BatchFamily>(&mut self, batch: &Batch) {
        let packets = batch.plain.and(batch.families[A::INDEX]).without(batch.undecided);
        if !self.is_paused && !packets.is_empty() {
            self.copy_tunneled::<A>(batch, packets);
        }
    }

    #[inline(never)]
    fn copy_tunneled<A: BatchFamily>(&mut self, batch: &Batch, packets: PacketSet) {
        let prefilter = *self.prefilter_of::<A>();
        for i in packets {
            let bytes = batch.frames[i].frame.bytes();
            if prefilter.matches_untranslated(&A::keys(batch)[i]) || self.filter.may_match(bytes) {
                let length = ethernet::HEADER + usize::from(batch.headers[i].ip_length);
                self.copy_headers(i, &bytes[bytes.len().saturating_sub(length)..]);
            }
        }
    }

    fn prefilter_of<A: BatchFamily>(&self) -> &Prefilter {
        if A::INDEX == V4 { &self.prefilters.v4 } else { &self.prefilters.v6 }
    }

    /// The packets that must not take the fast path. The fast path drops nothing.
    #[inline]
    pub fn prefilter<A: BatchFamily>(&self) -> &Prefilter {
        if self.is_paused || self.filter.outcome.is_drop() { &Prefilter::NoPackets } else { self.prefilter_of::<A>() }
    }

    /// Copies the headers of the plain packets that the fast path has left to the slow path, with their sessions found
    /// but otherwise unprocessed.
    #[inline]
    pub fn slow_path<A: BatchFamily + SessionFamily>(&mut self, batch: &Batch, rest: PacketSet, sessions: &Sessions) {
        let packets = rest.and(batch.families[A::INDEX]);
        if !self.is_paused && !packets.is_empty() {
            self.copy_slow_path::<A>(batch, packets, A::table(sessions));
        }
    }

    #[inline(never)]
    fn copy_slow_path<A: BatchFamily>(&mut self, batch: &Batch, packets: PacketSet, table: &Table<A>) {
        let prefilter = *self.prefilter_of::<A>();
        for i in packets {
            let reopens = batch.headers[i].kind == PacketKind::Tcp && batch.segments[i].flags.has_syn_fin_rst();
            // The session determines the translation, unless the packet reopens it.
            let is_indirect = if batch.validated.contains(i) && !reopens {
                !prefilter.matches_session(&A::keys(batch)[i], table.entry(batch.slots[i]))
            } else {
                matches!(prefilter, Prefilter::NoPackets)
            };
            if is_indirect {
                self.indirect.insert(i);
            }
            self.copy_headers(i, batch.frames[i].frame.bytes());
        }
    }

    #[inline(never)]
    fn copy_headers(&mut self, i: usize, bytes: &[u8]) {
        let length = bytes.len().min(HEADER_BYTES);
        self.headers[i][..length].copy_from_slice(&bytes[..length]);
        self.lengths[i] = bytes.len() as u16;
        self.candidates.insert(i);
        if let Some(buffer) = &self.next_buffer {
            buffer.prefetch();
        }
    }

    /// The copied headers of a packet.
    fn head(&self, i: usize) -> &[u8] {
        &self.headers[i][..usize::from(self.lengths[i]).min(HEADER_BYTES)]
    }

    /// Whether a buffer for the next packet is available.
    #[inline]
    fn has_buffer(&mut self) -> bool {
        if self.next_buffer.is_none() {
            self.next_buffer = self.ring.free.pop();
        }
        self.next_buffer.is_some()
    }

    /// Skips a batch that does not pass the pipeline.
    #[inline]
    pub fn skip_batch(&mut self) {
        self.candidates = PacketSet::default();
    }

    /// Filters and captures the candidates, after all packets have a verdict.
    #[inline]
    pub fn end_batch(&mut self, batch: &Batch, now: Tick) {
        if !self.candidates.is_empty() {
            self.capture_matching(batch, now);
        }
    }

    #[inline(never)]
    fn capture_matching(&mut self, batch: &Batch, now: Tick) {
        for i in self.candidates {
            let (received, verdict) = (&batch.frames[i], batch.verdicts[i]);
            let after = is_sent(verdict).then_some(received.frame.bytes());
            // Replies, and the outer headers of tunnels, have addresses of their own.
            let is_reply = matches!(verdict, Verdict::Reply(_));
            let inside = after.filter(|_| !is_reply).and_then(|after| inner_packet(after, self.lengths[i].into()));
            if self.indirect.contains(i) && !is_reply && inside.is_none() {
                continue;
            }
            let (direction, interface) = (direction(batch, i), received.interface);
            let passed = ProcessedPacket { verdict, direction, interface, before: self.head(i), after, inner: inside };
            if self.filter.matches(&passed) {
                self.capture(batch, i, now);
            }
        }
    }

    #[cold]
    fn capture(&mut self, batch: &Batch, i: usize, now: Tick) {
        let has_buffer = self.tokens > 0 && self.has_buffer();
        let Some(mut buffer) = self.next_buffer.take_if(|_| has_buffer) else {
            self.ring.missed.fetch_add(1, Relaxed);
            return;
        };
        self.tokens -= 1;
        let received = &batch.frames[i];
        let (bytes, verdict) = (received.frame.bytes(), batch.verdicts[i]);
        let (length, head) = (usize::from(self.lengths[i]), self.head(i));
        buffer.before.clear();
        buffer.before.extend_from_slice(&head[..head.len().min(self.length)]);
        // The rest of the packet is unmodified at the end of the frame, unless a reply has replaced it.
        if !matches!(verdict, Verdict::Reply(_)) && bytes.len() >= length - head.len() {
            let tail = &bytes[bytes.len() - (length - head.len())..];
            buffer.before.extend_from_slice(&tail[..tail.len().min(self.length.saturating_sub(head.len()))]);
        }
        buffer.after.clear();
        if is_sent(verdict) {
            buffer.after.extend_from_slice(&bytes[..bytes.len().min(self.length)]);
        }
        (buffer.before_length, buffer.after_length) =
            (length as u16, if is_sent(verdict) { bytes.len() as u16 } else { 0 });
        (buffer.at, buffer.worker, buffer.interface) = (now, self.worker, received.interface);
        (buffer.verdict, buffer.direction) = (verdict, direction(batch, i));
        buffer.out = match verdict {
            Verdict::Forward(out) | Verdict::Fragment(out) | Verdict::Reply(out) => Some(out),
            Verdict::AwaitNeighbor(_) => Some(batch.neighbors[i].interface),
            Verdict::Undecided
            | Verdict::FragmentIntoTunnel
            | Verdict::HandOff(_)
            | Verdict::Consume
            | Verdict::AwaitFirstFragment
            | Verdict::Defer(_)
            | Verdict::Requeue
            | Verdict::Hairpin
            | Verdict::Drop(_) => None,
        };
        buffer.is_first = received.frame.mark() == 0;
        // The ring has space for all buffers.
        let _ = self.ring.full.push(buffer);
        if self.has_buffer()
            && let Some(buffer) = &self.next_buffer
        {
            prefetch_read(std::slice::from_ref(&**buffer), 0);
        }
    }
}

/// Whether a packet is sent, and so captured after the pipeline, too.
fn is_sent(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Forward(_)
        | Verdict::Fragment(_)
        | Verdict::FragmentIntoTunnel
        | Verdict::Reply(_)
        | Verdict::AwaitNeighbor(_)
        | Verdict::Hairpin => true,
        Verdict::Undecided
        | Verdict::HandOff(_)
        | Verdict::Consume
        | Verdict::AwaitFirstFragment
        | Verdict::Defer(_)
        | Verdict::Requeue
        | Verdict::Drop(_) => false,
    }
}

/// The direction of a packet; none for replies and for packets that are not forwarded.
fn direction(batch: &Batch, i: usize) -> Option<Direction> {
    let verdict = batch.verdicts[i];
    (is_sent(verdict) && !matches!(verdict, Verdict::Reply(_))).then_some(batch.directions[i])
}

/// The inner packet of a packet that was encapsulated: the last `original_length` bytes, if the packet has become
/// longer. Nothing else lengthens packets.
fn inner_packet(packet: &[u8], original_length: usize) -> Option<&[u8]> {
    packet
        .len()
        .checked_sub(original_length)
        .filter(|&outer_length| outer_length > 0)
        .map(|outer_length| &packet[outer_length..])
}
