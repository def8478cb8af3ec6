//! Sessions as they begin and end, for a log of translations: only while somebody has asked for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;

use crate::counters::Direction;
use crate::session::SessionFamily;
use crate::session::tuple::Tuple;
use crate::time::Tick;

/// A session has begun, or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionEvent {
    /// Whether it has begun.
    pub began: bool,
    /// When.
    pub at: Tick,
    /// IP protocol number.
    pub protocol: u8,
    /// Which way its first packet went.
    pub direction: Direction,
    /// Source and destination of its first packet as it came.
    pub before: [SocketAddr; 2],
    /// The same as it went on.
    pub after: [SocketAddr; 2],
}

/// Where workers put them, and somebody takes them from.
#[derive(Debug)]
pub struct SessionQueue {
    queue: ArrayQueue<SessionEvent>,
    lost: AtomicU64,
}

impl SessionQueue {
    /// Room for so many.
    pub fn new(room: usize) -> Self {
        Self { queue: ArrayQueue::new(room), lost: AtomicU64::new(0) }
    }

    /// The next one.
    pub fn take(&self) -> Option<SessionEvent> {
        self.queue.pop()
    }

    /// Events that found no room.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

/// A worker's end of it.
#[derive(Debug, Default)]
pub struct SessionLog {
    queue: Option<Arc<SessionQueue>>,
    now: Tick,
}

impl SessionLog {
    /// Puts events there; `None`: nowhere.
    pub fn write_to(&mut self, queue: Option<Arc<SessionQueue>>) {
        self.queue = queue;
    }

    /// Whether somebody logs.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.queue.is_some()
    }

    /// A turn of the worker begins.
    #[inline]
    pub fn turn(&mut self, now: Tick) {
        self.now = now;
    }

    /// Notes that a session has begun, by its first packet as it came and as it went on.
    #[inline]
    pub fn began<A: SessionFamily>(&self, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        if let Some(queue) = &self.queue {
            self.put(queue, true, origin, translated, direction);
        }
    }

    /// Notes that it has ended.
    #[inline]
    pub fn ended<A: SessionFamily>(&self, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        if let Some(queue) = &self.queue {
            self.put(queue, false, origin, translated, direction);
        }
    }

    fn put<A: SessionFamily>(
        &self,
        queue: &SessionQueue,
        began: bool,
        origin: &Tuple<A>,
        translated: &Tuple<A>,
        direction: Direction,
    ) {
        let ends = |tuple: &Tuple<A>| -> [SocketAddr; 2] {
            let Tuple { source, source_port, destination, destination_port, .. } = *tuple;
            [(source.to_ip(), source_port).into(), (destination.to_ip(), destination_port).into()]
        };
        let (before, after) = (ends(origin), ends(translated));
        let event = SessionEvent { began, at: self.now, protocol: origin.protocol, direction, before, after };
        if queue.queue.push(event).is_err() {
            queue.lost.fetch_add(1, Relaxed);
        }
    }
}
