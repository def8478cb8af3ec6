//! Neighbor queue: packets whose next hop has no MAC address yet, queued while the kernel resolves it.
//!
//! Bounded in all and per neighbor, so that neither an unresponsive neighbor nor a scan of a subnet takes the space of
//! others for longer than the timeout below.

use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use vipgate_mem::Frame;

use crate::flow::direction::Direction;
use crate::flow::time::Tick;
use crate::io::batch::NeighborKey;
use crate::io::handoff::Wake;
use crate::policy::network::Network;
use crate::stage::encap::FragmentEncap;
use crate::wire::ethernet::MacPair;

/// Queued packets at most.
const MAX_QUEUED: usize = 1024;
/// Queued packets per neighbor at most.
const MAX_PER_NEIGHBOR: usize = 64;
/// How long a packet is queued: the kernel sends three solicitations, one second apart.
const QUEUE_TIMEOUT_MS: u32 = 3_000;
/// Interval at which a resolution request is repeated.
const REQUEST_INTERVAL_MS: u32 = 500;

/// Requests to the control thread to resolve neighbors, and how to wake it.
#[derive(Clone, Debug)]
pub struct ResolutionRequests {
    /// The requests; a full queue drops some, which are repeated later.
    pub queue: Arc<ArrayQueue<NeighborKey>>,
    /// Wakes the control thread.
    pub waker: Arc<dyn Wake>,
}

impl ResolutionRequests {
    fn request(&self, neighbor: NeighborKey) {
        // A full queue means that control is busy; the request is repeated soon.
        let _ = self.queue.push(neighbor);
        self.waker.wake();
    }
}

/// A queued packet: complete except for the MAC addresses, not fragmented yet.
#[derive(Debug)]
pub struct QueuedPacket {
    /// The packet.
    pub frame: Frame,
    /// The neighbor that it waits for.
    pub neighbor: NeighborKey,
    /// How it is sent.
    pub mode: SendMode,
    since: Tick,
}

/// How a queued packet is sent once its neighbor is resolved.
#[derive(Clone, Copy, Debug)]
pub enum SendMode {
    /// Unfragmented.
    Whole(Direction),
    /// In fragments.
    Fragment(Direction, Fragmentation),
    /// Our own reply.
    Reply,
}

/// How a packet is fragmented.
#[derive(Clone, Copy, Debug)]
pub struct Fragmentation {
    /// The MTU of each fragment, bytes.
    pub mtu: u16,
    /// The tunnel header of each fragment, if they go into a tunnel.
    pub tunnel_header: Option<FragmentEncap>,
}

/// What happens to a queued packet.
#[derive(Debug)]
pub enum ResolutionOutcome {
    /// Its neighbor is resolved: it can be sent with these MAC addresses.
    Resolved(QueuedPacket, MacPair),
    /// Its neighbor was not resolved in time.
    Expired(QueuedPacket),
}

/// The neighbor queue of one worker.
#[derive(Debug)]
pub struct NeighborQueue {
    packets: VecDeque<QueuedPacket>,
    requests: ResolutionRequests,
    last_request: Tick,
}

impl NeighborQueue {
    /// An empty queue that sends resolution requests to `requests`.
    pub fn new(requests: ResolutionRequests) -> Self {
        Self { packets: VecDeque::with_capacity(MAX_QUEUED), requests, last_request: Tick::default() }
    }

    /// Queued packets.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Queues a packet, and requests the resolution of its neighbor unless that is pending.
    ///
    /// # Errors
    /// Returns the frame when there is no space.
    pub fn enqueue(
        &mut self,
        frame: Frame,
        neighbor: NeighborKey,
        departure: SendMode,
        now: Tick,
    ) -> Result<(), Frame> {
        if self.packets.len() == MAX_QUEUED {
            return Err(frame);
        }
        let queued = self.packets.iter().filter(|packet| packet.neighbor == neighbor).count();
        if queued >= MAX_PER_NEIGHBOR {
            return Err(frame);
        }
        if queued == 0 {
            self.requests.request(neighbor);
        }
        self.packets.push_back(QueuedPacket { frame, neighbor, mode: departure, since: now });
        Ok(())
    }

    /// Checks each packet once and passes those that can be sent or have expired to `resolved`.
    pub fn retry(&mut self, network: &Network, now: Tick, mut resolved: impl FnMut(ResolutionOutcome)) {
        let repeat = now.since(self.last_request) >= REQUEST_INTERVAL_MS;
        if repeat {
            self.last_request = now;
        }
        for _ in 0..self.packets.len() {
            let Some(packet) = self.packets.pop_front() else { break };
            let NeighborKey { interface, address } = packet.neighbor;
            if let Some(link) = network.neighbor_macs(interface, address) {
                resolved(ResolutionOutcome::Resolved(packet, link));
            } else if now.since(packet.since) >= QUEUE_TIMEOUT_MS {
                resolved(ResolutionOutcome::Expired(packet));
            } else {
                if repeat {
                    self.requests.request(packet.neighbor);
                }
                self.packets.push_back(packet);
            }
        }
    }
}
