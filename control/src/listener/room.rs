//! The places of a listener.

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

/// How often a listener's refusals are logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In all.
    pub connections: usize,
    /// Of one address; of IPv6, of one network of 64 bits, of which hosts choose the rest as they like.
    pub per_address: usize,
}

/// Why a connection was closed or never taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its address has too many, and uses all of them.
    Address,
    /// There are too many, and all are used.
    Full,
    /// It was unused when a newer one came.
    Superseded,
    /// It was too slow, or unused for too long.
    Slow,
    /// The kernel had no descriptor for it.
    Descriptors,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Address, Self::Full, Self::Superseded, Self::Slow, Self::Descriptors];

    /// As metrics and logs say it.
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

/// The places of a listener, by source address.
#[derive(Debug)]
pub struct Room {
    name: &'static str,
    limits: Limits,
    places: Mutex<Places>,
    refused: [AtomicU64; Reason::ALL.len()],
}

#[derive(Debug, Default)]
struct Places {
    last: u64,
    taken: HashMap<u64, Place>,
    /// Unused ones by age: the sequence number of when they were last used, and which.
    unused: BTreeSet<(u64, u64)>,
    by_address: HashMap<IpAddr, OfAddress>,
    logged: Option<Instant>,
    unlogged: u64,
}

#[derive(Debug)]
struct Place {
    address: IpAddr,
    /// When it was last used; `None`: it is used now.
    unused_since: Option<u64>,
    /// Dropped when it has to give way.
    _stays: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct OfAddress {
    count: usize,
    unused: BTreeSet<(u64, u64)>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Slot {
    room: Arc<Room>,
    id: u64,
    stays: oneshot::Receiver<()>,
    is_gone: bool,
}

/// The requests of a connection, one after the other, as what answers them sees it.
#[derive(Debug)]
pub struct Exchange {
    room: Arc<Room>,
    id: u64,
    is_open: AtomicBool,
}

impl Room {
    /// An empty one of the listener with this name.
    pub fn new(name: &'static str, limits: Limits) -> Arc<Self> {
        Arc::new(Self { name, limits, places: Mutex::default(), refused: Default::default() })
    }

    /// The listener's name, as metrics and logs say it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How many connections it has.
    pub fn len(&self) -> usize {
        self.places().taken.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many connections were refused for a reason.
    pub fn refused(&self, reason: Reason) -> u64 {
        self.refused[reason as usize].load(Relaxed)
    }

    /// A place for a connection from this address. Where there is none, the oldest unused one gives way: of the same address, if that
    /// has too many.
    ///
    /// # Errors
    /// When all that there are are used.
    pub fn admit(self: &Arc<Self>, from: IpAddr) -> Result<Slot, Reason> {
        let address = network(from);
        let mut places = self.places();
        let of_address = places.by_address.get(&address);
        let is_crowded = of_address.is_some_and(|it| it.count >= self.limits.per_address);
        let oldest = if is_crowded {
            Some((of_address.and_then(|it| it.unused.first().copied()), Reason::Address))
        } else if places.taken.len() >= self.limits.connections {
            Some((places.unused.first().copied(), Reason::Full))
        } else {
            None
        };
        match oldest {
            None => {}
            Some((Some((_, id)), _)) => {
                places.remove(id);
                self.refuse(&mut places, Reason::Superseded, Some(from));
            }
            Some((None, why)) => {
                self.refuse(&mut places, why, Some(from));
                return Err(why);
            }
        }
        places.last += 1;
        let id = places.last;
        let (sender, stays) = oneshot::channel();
        places.taken.insert(id, Place { address, unused_since: Some(id), _stays: sender });
        places.unused.insert((id, id));
        let of_address = places.by_address.entry(address).or_default();
        of_address.count += 1;
        of_address.unused.insert((id, id));
        drop(places);
        Ok(Slot { room: self.clone(), id, stays, is_gone: false })
    }

    /// The kernel refuses to accept.
    pub fn failed(&self, error: &io::Error) {
        tracing::debug!(listener = self.name, %error, "a connection can't be accepted");
        self.refuse(&mut self.places(), Reason::Descriptors, None);
    }

    /// Counts, and logs once in a while.
    fn refuse(&self, places: &mut Places, reason: Reason, from: Option<IpAddr>) {
        self.refused[reason as usize].fetch_add(1, Relaxed);
        let now = Instant::now();
        places.unlogged += 1;
        if places.logged.is_some_and(|last| now.saturating_duration_since(last) < LOG_INTERVAL) {
            return;
        }
        places.logged = Some(now);
        let count = std::mem::take(&mut places.unlogged);
        let (listener, reason, open) = (self.name, reason.name(), places.taken.len());
        let address = from.map(|from| from.to_string()).unwrap_or_default();
        tracing::warn!(
            event = "connections_refused",
            listener,
            reason,
            address,
            count,
            open,
            "connections to {listener} refused or closed, {count} since this was last logged"
        );
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Places {
    /// Takes a place away; whoever has it sees that its slot is gone.
    fn remove(&mut self, id: u64) {
        self.set_unused(id, None);
        let Some(place) = self.taken.remove(&id) else { return };
        if let Some(of_address) = self.by_address.get_mut(&place.address) {
            of_address.count -= 1;
            if of_address.count == 0 {
                self.by_address.remove(&place.address);
            }
        }
    }

    fn set_unused(&mut self, id: u64, since: Option<u64>) {
        let Some(place) = self.taken.get_mut(&id) else { return };
        let before = std::mem::replace(&mut place.unused_since, since);
        let Some(of_address) = self.by_address.get_mut(&place.address) else { return };
        for set in [&mut self.unused, &mut of_address.unused] {
            if let Some(before) = before {
                set.remove(&(before, id));
            }
            if let Some(since) = since {
                set.insert((since, id));
            }
        }
    }

    /// It is unused, and of all of these the last to give way.
    fn release(&mut self, id: u64) {
        self.last += 1;
        self.set_unused(id, Some(self.last));
    }

    /// It is used, unless half of the places are, in all or of its address: those who ask and never take the answer keep nobody out.
    fn hold_some(&mut self, id: u64, limits: Limits) {
        let Some(place) = self.taken.get(&id) else { return };
        let in_all = self.taken.len() - self.unused.len();
        let of_address = self.by_address.get(&place.address).map_or(0, |it| it.count - it.unused.len());
        if in_all < limits.connections / 2 && of_address < limits.per_address / 2 {
            self.set_unused(id, None);
        } else {
            self.release(id);
        }
    }
}

impl Exchange {
    /// A request has come whole: while it is answered, the connection gives way to nobody.
    pub fn begin(&self) {
        self.room.places().hold_some(self.id, self.room.limits);
        self.is_open.store(true, Relaxed);
    }

    /// Whether a request is being answered.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Relaxed)
    }

    /// The answer has gone.
    pub fn end(&self) {
        self.is_open.store(false, Relaxed);
        self.room.places().release(self.id);
    }
}

impl Slot {
    /// It is used: it gives way to nobody.
    pub fn hold(&self) {
        self.room.places().set_unused(self.id, None);
    }

    /// It isn't used any more: of all of these it is the last to give way.
    pub fn release(&self) {
        self.room.places().release(self.id);
    }

    /// The requests of its connection.
    pub fn exchange(&self) -> Arc<Exchange> {
        Arc::new(Exchange { room: self.room.clone(), id: self.id, is_open: AtomicBool::new(false) })
    }

    /// Waits until it has to give way.
    pub async fn superseded(&mut self) {
        std::future::poll_fn(|context| if self.poll_superseded(context) { Poll::Ready(()) } else { Poll::Pending })
            .await;
    }

    /// Whether it has to give way; if it doesn't, the task is woken when it does.
    pub fn poll_superseded(&mut self, context: &mut Context<'_>) -> bool {
        // Once it has said so, the receiver isn't asked again.
        self.is_gone = self.is_gone || self.stays.poll_unpin(context).is_ready();
        self.is_gone
    }

    /// It ends by the listener's will: it was too slow.
    pub fn expire(&self, from: Option<IpAddr>) {
        self.room.refuse(&mut self.room.places(), Reason::Slow, from);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.room.places().remove(self.id);
    }
}

/// What counts as one address.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(connections: usize, per_address: usize) -> Arc<Room> {
        Room::new("test", Limits { connections, per_address })
    }

    fn at(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn gives_way(slot: &mut Slot) -> bool {
        slot.stays.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn an_address_that_has_too_many_loses_its_own_oldest_one_and_nobody_elses() {
        let room = room(10, 2);
        let mut other = room.admit(at(9)).unwrap();
        let (mut first, mut second) = (room.admit(at(1)).unwrap(), room.admit(at(1)).unwrap());
        let mut third = room.admit(at(1)).unwrap();
        assert!(gives_way(&mut first) && !gives_way(&mut second) && !gives_way(&mut other));
        second.release();
        let _fourth = room.admit(at(1)).unwrap();
        assert!(gives_way(&mut third) && !gives_way(&mut second), "it was used after the third one came");
        assert_eq!((room.len(), room.refused(Reason::Superseded)), (3, 2));
        // What gave way is dropped later, and takes nothing with it.
        drop((first, third));
        assert_eq!(room.len(), 3);
        let of_network = |last: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, last, 2, 3, last]);
        let mut oldest = room.admit(of_network(1)).unwrap();
        let _others = [room.admit(of_network(2)).unwrap(), room.admit(of_network(3)).unwrap()];
        assert!(gives_way(&mut oldest), "one network");
        assert_eq!(network("::ffff:192.0.2.1".parse().unwrap()), at(1));
    }

    #[test]
    fn what_is_used_stays_and_a_room_full_of_it_refuses() {
        let room = room(3, 2);
        let mut used: Vec<Slot> = (1..=3).map(|last| room.admit(at(last)).unwrap()).collect();
        used.iter().for_each(Slot::hold);
        assert_eq!(room.admit(at(4)).unwrap_err(), Reason::Full);
        used[1].release();
        let fourth = room.admit(at(4)).unwrap();
        assert!(gives_way(&mut used[1]) && !gives_way(&mut used[0]) && !gives_way(&mut used[2]));
        fourth.hold();
        drop(used);
        let more = room.admit(at(4)).unwrap();
        more.hold();
        assert_eq!(room.admit(at(4)).unwrap_err(), Reason::Address);
        assert_eq!((room.refused(Reason::Full), room.refused(Reason::Address), room.len()), (1, 1, 2));
        drop((fourth, more));
        let places = room.places();
        assert!(places.taken.is_empty() && places.by_address.is_empty() && places.unused.is_empty());
    }

    #[test]
    fn who_is_answered_stays_but_half_of_the_places_give_way_whatever_is_asked() {
        let room = room(8, 4);
        let mut asked: Vec<Slot> = (0..4).map(|_| room.admit(at(1)).unwrap()).collect();
        let exchanges: Vec<_> = asked.iter().map(Slot::exchange).collect();
        for exchange in &exchanges {
            exchange.begin();
        }
        let newer = room.admit(at(1)).unwrap();
        assert!(gives_way(&mut asked[2]), "the oldest beyond half");
        assert!(!gives_way(&mut asked[0]) && !gives_way(&mut asked[1]) && !gives_way(&mut asked[3]));
        exchanges[0].end();
        assert!(!exchanges[0].is_open() && exchanges[1].is_open());
        newer.exchange().begin();
        let _others = [room.admit(at(1)).unwrap(), room.admit(at(1)).unwrap()];
        assert!(gives_way(&mut asked[3]) && gives_way(&mut asked[0]) && !gives_way(&mut asked[1]));
        // What has given way is held no more, whatever is said of it.
        exchanges[0].begin();
        exchanges[0].end();
        assert_eq!(room.len(), 4);
        // In all it is half as well.
        for address in 2..=5 {
            let slot = room.admit(at(address)).unwrap();
            slot.exchange().begin();
            asked.push(slot);
        }
        let places = room.places();
        assert_eq!((places.taken.len(), places.unused.len()), (8, 4));
    }
}
