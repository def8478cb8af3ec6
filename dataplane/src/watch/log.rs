//! Sessions as they begin and end, for a log of translations: only while somebody has asked for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::queue::ArrayQueue;

use crate::address::{Address, V6};
use crate::counters::Direction;
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
    v4: ArrayQueue<Note<u32>>,
    v6: ArrayQueue<Note<V6>>,
    lost: AtomicU64,
}

/// An event as workers write it: with IPv4 less than a cache line.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Note<A> {
    origin: Tuple<A>,
    translated: Tuple<A>,
    at: Tick,
    began: bool,
    direction: Direction,
}

/// An address family whose sessions are logged.
pub trait Logged: Address {
    /// Where its events wait.
    #[doc(hidden)]
    fn notes(queue: &SessionQueue) -> &ArrayQueue<Note<Self>>;
}

impl Logged for u32 {
    fn notes(queue: &SessionQueue) -> &ArrayQueue<Note<Self>> {
        &queue.v4
    }
}

impl Logged for V6 {
    fn notes(queue: &SessionQueue) -> &ArrayQueue<Note<Self>> {
        &queue.v6
    }
}

impl SessionQueue {
    /// Room for so many of each family.
    pub fn new(room: usize) -> Self {
        Self { v4: ArrayQueue::new(room), v6: ArrayQueue::new(room), lost: AtomicU64::new(0) }
    }

    /// The next one of either family; those of one come in the order in which they were put there.
    pub fn take(&self) -> Option<SessionEvent> {
        self.v4.pop().map(SessionEvent::from).or_else(|| self.v6.pop().map(SessionEvent::from))
    }

    /// Events that found no room.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

impl<A: Address> From<Note<A>> for SessionEvent {
    fn from(note: Note<A>) -> Self {
        let ends = |tuple: &Tuple<A>| -> [SocketAddr; 2] {
            let Tuple { source, source_port, destination, destination_port, .. } = *tuple;
            [(source.to_ip(), source_port).into(), (destination.to_ip(), destination_port).into()]
        };
        Self {
            began: note.began,
            at: note.at,
            protocol: note.origin.protocol,
            direction: note.direction,
            before: ends(&note.origin),
            after: ends(&note.translated),
        }
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
    pub fn began<A: Logged>(&self, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        self.put(true, origin, translated, direction);
    }

    /// Notes that it has ended.
    #[inline]
    pub fn ended<A: Logged>(&self, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        self.put(false, origin, translated, direction);
    }

    #[inline]
    fn put<A: Logged>(&self, began: bool, origin: &Tuple<A>, translated: &Tuple<A>, direction: Direction) {
        let Some(queue) = &self.queue else { return };
        let note = Note { origin: *origin, translated: *translated, at: self.now, began, direction };
        if A::notes(queue).push(note).is_err() {
            queue.lost.fetch_add(1, Relaxed);
        }
    }
}
