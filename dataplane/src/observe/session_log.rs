//! Session log: opened and ended sessions, for the NAT log. Disabled unless a queue is set.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;

use crate::flow::address::{Address, PerFamily, V6};
use crate::flow::direction::Direction;
use crate::flow::time::Tick;
use crate::flow::tuple::Tuple;

/// A session was opened or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionEvent {
    /// True if it was opened, false if it has ended.
    pub opened: bool,
    /// Time of the event.
    pub at: Tick,
    /// IP protocol number.
    pub protocol: u8,
    /// Direction of its first packet.
    pub direction: Direction,
    /// Source and destination of its first packet before translation.
    pub before: [SocketAddr; 2],
    /// Source and destination of its first packet after translation.
    pub after: [SocketAddr; 2],
}

/// The queue of events from all workers to the NAT log.
#[derive(Debug)]
pub struct SessionEventQueue {
    v4: ArrayQueue<PackedEvent<u32>>,
    v6: ArrayQueue<PackedEvent<V6>>,
    lost: AtomicU64,
}

/// An event as workers write it: for IPv4 less than a cache line.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct PackedEvent<A> {
    origin: Tuple<A>,
    translated: Tuple<A>,
    at: Tick,
    opened: bool,
    direction: Direction,
}

impl PerFamily for SessionEventQueue {
    type Of<A: Address> = ArrayQueue<PackedEvent<A>>;

    fn v4(&self) -> &ArrayQueue<PackedEvent<u32>> {
        &self.v4
    }

    fn v6(&self) -> &ArrayQueue<PackedEvent<V6>> {
        &self.v6
    }
}

impl SessionEventQueue {
    /// A queue for this many events of each family.
    pub fn new(capacity: usize) -> Self {
        Self { v4: ArrayQueue::new(capacity), v6: ArrayQueue::new(capacity), lost: AtomicU64::new(0) }
    }

    /// Removes an event of either family; those of one family are in order.
    pub fn pop(&self) -> Option<SessionEvent> {
        self.v4.pop().map(SessionEvent::from).or_else(|| self.v6.pop().map(SessionEvent::from))
    }

    /// Events lost because the queue was full.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

impl<A: Address> From<PackedEvent<A>> for SessionEvent {
    fn from(event: PackedEvent<A>) -> Self {
        let ends = |tuple: &Tuple<A>| -> [SocketAddr; 2] {
            let Tuple { source, source_port, destination, destination_port, .. } = *tuple;
            [(source.to_ip(), source_port).into(), (destination.to_ip(), destination_port).into()]
        };
        Self {
            opened: event.opened,
            at: event.at,
            protocol: event.origin.protocol,
            direction: event.direction,
            before: ends(&event.origin),
            after: ends(&event.translated),
        }
    }
}

/// A worker's side of the session log.
#[derive(Debug, Default)]
pub struct SessionLog {
    queue: Option<Arc<SessionEventQueue>>,
    now: Tick,
}

impl SessionLog {
    /// Sets the queue for events; `None` disables the log.
    pub fn set_queue(&mut self, queue: Option<Arc<SessionEventQueue>>) {
        self.queue = queue;
    }

    /// Whether the log is enabled.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.queue.is_some()
    }

    /// Sets the time of the events of this turn.
    #[inline]
    pub fn set_time(&mut self, now: Tick) {
        self.now = now;
    }

    /// Logs an opened session, by its first packet before and after translation.
    #[inline]
    pub fn opened<A: Address>(&self, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        self.put(true, origin, translated, direction);
    }

    /// Logs an ended session.
    #[inline]
    pub fn ended<A: Address>(&self, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        self.put(false, origin, translated, direction);
    }

    #[inline]
    fn put<A: Address>(&self, began: bool, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        let Some(queue) = &self.queue else { return };
        let event = PackedEvent { origin: *origin, translated: *translated, at: self.now, opened: began, direction };
        if A::pick(&**queue).push(event).is_err() {
            queue.lost.fetch_add(1, Relaxed);
        }
    }
}
