//! Connection limiter of a listener: admission and eviction, in total and per source address.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use tokio::sync::oneshot;
use vipgate_common::MinInterval;

/// Minimum time between two logged rejections of a listener.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Connection limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In total.
    pub connections: usize,
    /// Per source: an IPv4 address or an IPv6 /64, within which hosts choose addresses freely.
    pub per_address: usize,
}

/// Why a connection was closed or not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// The limit of its source address is reached, with no idle connection to evict.
    Address,
    /// The total limit is reached, with no idle connection to evict.
    Full,
    /// It was idle and evicted for a newer one.
    Superseded,
    /// It was too slow, or idle for too long.
    Slow,
    /// accept(2) failed, usually for lack of file descriptors.
    Descriptors,
}

impl RejectReason {
    /// All reasons.
    pub const ALL: [Self; 5] = [Self::Address, Self::Full, Self::Superseded, Self::Slow, Self::Descriptors];

    /// Its name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Full => "full",
            Self::Superseded => "superseded",
            Self::Slow => "slow",
            Self::Descriptors => "descriptors",
        }
    }
}

/// The connection limiter of a listener.
#[derive(Debug)]
pub struct ConnectionLimiter {
    name: &'static str,
    limits: Limits,
    table: Mutex<Table>,
    rejected: [AtomicU64; RejectReason::ALL.len()],
}

#[derive(Debug, Default)]
struct Table {
    /// The last sequence number, used for connection ids and idle order.
    last: u64,
    connections: HashMap<u64, Connection>,
    /// Idle connections, longest idle first: the sequence number at which they became idle, and their id.
    idle: BTreeSet<(u64, u64)>,
    by_address: HashMap<IpAddr, SourceConnections>,
    log: MinInterval,
}

#[derive(Debug)]
struct Connection {
    address: IpAddr,
    /// The sequence number at which it became idle; `None`: in use.
    idle_since: Option<u64>,
    /// Dropped on eviction.
    _eviction: oneshot::Sender<()>,
}

/// The connections of one source address.
#[derive(Debug, Default)]
struct SourceConnections {
    count: usize,
    idle: BTreeSet<(u64, u64)>,
}

/// An admitted connection, until dropped.
#[derive(Debug)]
pub struct Slot {
    limiter: Arc<ConnectionLimiter>,
    id: u64,
    eviction: oneshot::Receiver<()>,
    is_evicted: bool,
}

/// The current request/response exchange of an HTTP/1 connection.
#[derive(Debug)]
pub struct Exchange {
    limiter: Arc<ConnectionLimiter>,
    id: u64,
    is_open: AtomicBool,
}

impl ConnectionLimiter {
    /// Creates the limiter of the listener with this name.
    pub fn new(name: &'static str, limits: Limits) -> Arc<Self> {
        Arc::new(Self { name, limits, table: Mutex::default(), rejected: Default::default() })
    }

    /// The listener's name in metrics and logs.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The number of open connections.
    pub fn len(&self) -> usize {
        self.table().connections.len()
    }

    /// Whether there are no open connections.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of connections closed or not accepted for a reason.
    pub fn rejected(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize].load(Relaxed)
    }

    /// Admits a connection from this address. At a limit, the longest idle connection is evicted: of the same source
    /// address if its limit is reached.
    ///
    /// # Errors
    /// A limit is reached and no connection is idle.
    pub fn admit(self: &Arc<Self>, from: IpAddr) -> Result<Slot, RejectReason> {
        let address = source_prefix(from);
        let mut table = self.table();
        let source = table.by_address.get(&address);
        let is_source_full = source.is_some_and(|it| it.count >= self.limits.per_address);
        let candidate = if is_source_full {
            Some((source.and_then(|it| it.idle.first().copied()), RejectReason::Address))
        } else if table.connections.len() >= self.limits.connections {
            Some((table.idle.first().copied(), RejectReason::Full))
        } else {
            None
        };
        match candidate {
            None => {}
            Some((Some((_, id)), _)) => {
                table.remove(id);
                self.reject(&mut table, RejectReason::Superseded, Some(from));
            }
            Some((None, reason)) => {
                self.reject(&mut table, reason, Some(from));
                return Err(reason);
            }
        }
        table.last += 1;
        let id = table.last;
        let (sender, eviction) = oneshot::channel();
        table.connections.insert(id, Connection { address, idle_since: Some(id), _eviction: sender });
        table.idle.insert((id, id));
        let source = table.by_address.entry(address).or_default();
        source.count += 1;
        source.idle.insert((id, id));
        drop(table);
        Ok(Slot { limiter: self.clone(), id, eviction, is_evicted: false })
    }

    /// Counts and logs a failed accept(2).
    pub fn accept_failed(&self, error: &io::Error) {
        tracing::debug!(listener = self.name, %error, "a connection can't be accepted");
        self.reject(&mut self.table(), RejectReason::Descriptors, None);
    }

    /// Counts a rejection; logs at most once per [`LOG_INTERVAL`].
    fn reject(&self, table: &mut Table, reason: RejectReason, from: Option<IpAddr>) {
        self.rejected[reason as usize].fetch_add(1, Relaxed);
        let Some(omitted) = table.log.due(LOG_INTERVAL, Instant::now()) else { return };
        let count = omitted + 1;
        let (listener, reason, open) = (self.name, reason.name(), table.connections.len());
        let address = from.map(|from| from.to_string()).unwrap_or_default();
        tracing::warn!(
            event = "connections_refused",
            listener,
            reason,
            address,
            count,
            open,
            "{count} connections to {listener} rejected or closed since the last log line"
        );
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Removes a connection; if its slot still exists, this evicts it.
    fn remove(&mut self, id: u64) {
        self.set_idle(id, None);
        let Some(connection) = self.connections.remove(&id) else { return };
        if let Some(source) = self.by_address.get_mut(&connection.address) {
            source.count -= 1;
            if source.count == 0 {
                self.by_address.remove(&connection.address);
            }
        }
    }

    fn set_idle(&mut self, id: u64, since: Option<u64>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let before = std::mem::replace(&mut connection.idle_since, since);
        let Some(source) = self.by_address.get_mut(&connection.address) else { return };
        for set in [&mut self.idle, &mut source.idle] {
            if let Some(before) = before {
                set.remove(&(before, id));
            }
            if let Some(since) = since {
                set.insert((since, id));
            }
        }
    }

    /// Marks it as idle from now on, so it is the last to be evicted.
    fn mark_idle(&mut self, id: u64) {
        self.last += 1;
        self.set_idle(id, Some(self.last));
    }

    /// Marks it as in use, unless half of the limit is in use, in total or of its source: clients that never read their
    /// responses can't lock out others.
    fn mark_in_use_within_half(&mut self, id: u64, limits: Limits) {
        let Some(connection) = self.connections.get(&id) else { return };
        let total = self.connections.len() - self.idle.len();
        let of_source = self.by_address.get(&connection.address).map_or(0, |it| it.count - it.idle.len());
        if total < limits.connections / 2 && of_source < limits.per_address / 2 {
            self.set_idle(id, None);
        } else {
            self.mark_idle(id);
        }
    }
}

impl Exchange {
    /// A request was received: until its response is sent, the connection isn't evicted.
    pub fn begin(&self) {
        self.limiter.table().mark_in_use_within_half(self.id, self.limiter.limits);
        self.is_open.store(true, Relaxed);
    }

    /// Whether a response is due.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Relaxed)
    }

    /// The response was sent.
    pub fn end(&self) {
        self.is_open.store(false, Relaxed);
        self.limiter.table().mark_idle(self.id);
    }
}

impl Slot {
    /// Marks it as in use: it isn't evicted.
    pub fn mark_in_use(&self) {
        self.limiter.table().set_idle(self.id, None);
    }

    /// Marks it as idle from now on, so it is the last to be evicted.
    pub fn mark_idle(&self) {
        self.limiter.table().mark_idle(self.id);
    }

    /// The HTTP/1 exchange of its connection.
    pub fn exchange(&self) -> Arc<Exchange> {
        Arc::new(Exchange { limiter: self.limiter.clone(), id: self.id, is_open: AtomicBool::new(false) })
    }

    /// Waits until it is evicted.
    pub async fn evicted(&mut self) {
        std::future::poll_fn(|context| if self.poll_evicted(context) { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// Whether it is evicted; if not, the task is woken on eviction.
    pub fn poll_evicted(&mut self, context: &mut Context<'_>) -> bool {
        // A completed receiver must not be polled again.
        self.is_evicted = self.is_evicted || self.eviction.poll_unpin(context).is_ready();
        self.is_evicted
    }

    /// Counts and logs its timeout.
    pub fn timed_out(&self, from: Option<IpAddr>) {
        self.limiter.reject(&mut self.limiter.table(), RejectReason::Slow, from);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.limiter.table().remove(self.id);
    }
}

/// The source that an address counts for: an IPv4 address or an IPv6 /64.
pub fn source_prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(connections: usize, per_address: usize) -> Arc<ConnectionLimiter> {
        ConnectionLimiter::new("test", Limits { connections, per_address })
    }

    fn at(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn is_evicted(slot: &mut Slot) -> bool {
        slot.eviction.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn at_the_limit_of_an_address_its_longest_idle_connection_is_evicted() {
        let limiter = limiter(10, 2);
        let mut other = limiter.admit(at(9)).unwrap();
        let (mut first, mut second) = (limiter.admit(at(1)).unwrap(), limiter.admit(at(1)).unwrap());
        let mut third = limiter.admit(at(1)).unwrap();
        assert!(is_evicted(&mut first) && !is_evicted(&mut second) && !is_evicted(&mut other));
        second.mark_idle();
        let _fourth = limiter.admit(at(1)).unwrap();
        assert!(is_evicted(&mut third) && !is_evicted(&mut second), "it was in use after the third was admitted");
        assert_eq!((limiter.len(), limiter.rejected(RejectReason::Superseded)), (3, 2));
        // Dropping an evicted slot has no further effect.
        drop((first, third));
        assert_eq!(limiter.len(), 3);
        let in_network = |last: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, last, 2, 3, last]);
        let mut oldest = limiter.admit(in_network(1)).unwrap();
        let _others = [limiter.admit(in_network(2)).unwrap(), limiter.admit(in_network(3)).unwrap()];
        assert!(is_evicted(&mut oldest), "one /64");
        assert_eq!(source_prefix("::ffff:192.0.2.1".parse().unwrap()), at(1));
    }

    #[test]
    fn connections_in_use_are_not_evicted_and_new_ones_are_rejected() {
        let limiter = limiter(3, 2);
        let mut in_use: Vec<Slot> = (1..=3).map(|last| limiter.admit(at(last)).unwrap()).collect();
        in_use.iter().for_each(Slot::mark_in_use);
        assert_eq!(limiter.admit(at(4)).unwrap_err(), RejectReason::Full);
        in_use[1].mark_idle();
        let fourth = limiter.admit(at(4)).unwrap();
        assert!(is_evicted(&mut in_use[1]) && !is_evicted(&mut in_use[0]) && !is_evicted(&mut in_use[2]));
        fourth.mark_in_use();
        drop(in_use);
        let more = limiter.admit(at(4)).unwrap();
        more.mark_in_use();
        assert_eq!(limiter.admit(at(4)).unwrap_err(), RejectReason::Address);
        assert_eq!(
            (limiter.rejected(RejectReason::Full), limiter.rejected(RejectReason::Address), limiter.len()),
            (1, 1, 2)
        );
        drop((fourth, more));
        let table = limiter.table();
        assert!(table.connections.is_empty() && table.by_address.is_empty() && table.idle.is_empty());
    }

    #[test]
    fn pending_responses_protect_at_most_half_of_the_connections() {
        let limiter = limiter(8, 4);
        let mut pending: Vec<Slot> = (0..4).map(|_| limiter.admit(at(1)).unwrap()).collect();
        let exchanges: Vec<_> = pending.iter().map(Slot::exchange).collect();
        for exchange in &exchanges {
            exchange.begin();
        }
        let newer = limiter.admit(at(1)).unwrap();
        assert!(is_evicted(&mut pending[2]), "the longest idle one beyond half");
        assert!(!is_evicted(&mut pending[0]) && !is_evicted(&mut pending[1]) && !is_evicted(&mut pending[3]));
        exchanges[0].end();
        assert!(!exchanges[0].is_open() && exchanges[1].is_open());
        newer.exchange().begin();
        let _others = [limiter.admit(at(1)).unwrap(), limiter.admit(at(1)).unwrap()];
        assert!(is_evicted(&mut pending[3]) && is_evicted(&mut pending[0]) && !is_evicted(&mut pending[1]));
        // An evicted connection can't be marked as in use again.
        exchanges[0].begin();
        exchanges[0].end();
        assert_eq!(limiter.len(), 4);
        // The same holds for the total limit.
        for address in 2..=5 {
            let slot = limiter.admit(at(address)).unwrap();
            slot.exchange().begin();
            pending.push(slot);
        }
        let table = limiter.table();
        assert_eq!((table.connections.len(), table.idle.len()), (8, 4));
    }
}
