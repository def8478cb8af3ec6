//! Memory that clients make the server hold, by address and in all: requests that are on their way, and what a stream remembers of a
//! client. Who would have more is refused; so one client can't take what others need.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::Status;

use super::figures::Count;
use crate::listener::network;

/// Bytes for one address (of IPv6, one network of 64 bits), and for all.
const PER_ADDRESS: usize = 192 << 20;
const IN_ALL: usize = 1 << 30;

/// What is held for whom.
#[derive(Debug)]
pub struct Budget {
    per_address: usize,
    in_all: usize,
    held: Mutex<Held>,
    /// Requests and streams that were refused.
    pub refused: Count,
}

#[derive(Debug, Default)]
struct Held {
    in_all: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(PER_ADDRESS, IN_ALL)
    }
}

impl Budget {
    /// One of so many bytes.
    pub fn new(per_address: usize, in_all: usize) -> Self {
        Self { per_address, in_all, held: Mutex::default(), refused: Count::default() }
    }

    /// What is held for a client, nothing yet.
    pub fn charge(self: &Arc<Self>, from: Option<SocketAddr>) -> Charge {
        let address = from.map_or(Ipv6Addr::UNSPECIFIED.into(), |from| network(from.ip()));
        Charge { budget: self.clone(), address, bytes: 0 }
    }

    /// Bytes that are held in all.
    pub fn held(&self) -> usize {
        self.lock().in_all
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is held for one request or stream, until it is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    address: IpAddr,
    bytes: usize,
}

impl Charge {
    /// It is so many bytes now.
    ///
    /// # Errors
    /// When that would be too many: nothing changes.
    pub fn set(&mut self, bytes: usize) -> Result<(), Status> {
        let mut held = self.budget.lock();
        let of_address = held.by_address.get(&self.address).copied().unwrap_or_default() - self.bytes + bytes;
        let in_all = held.in_all - self.bytes + bytes;
        let is_more = bytes > self.bytes;
        let (who, limit) = if is_more && of_address > self.budget.per_address {
            ("your address", self.budget.per_address)
        } else if is_more && in_all > self.budget.in_all {
            ("all clients", self.budget.in_all)
        } else {
            held.in_all = in_all;
            if of_address == 0 {
                held.by_address.remove(&self.address);
            } else {
                held.by_address.insert(self.address, of_address);
            }
            self.bytes = bytes;
            return Ok(());
        };
        drop(held);
        self.budget.refused.add();
        let mib = limit >> 20;
        Err(Status::resource_exhausted(format!(
            "the server holds no more than {mib} MiB for {who}, and this would be more"
        )))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // Less is never refused.
        let _ = self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_takes_its_own_part_and_all_of_them_take_no_more_than_there_is() {
        let budget = Arc::new(Budget::new(100, 150));
        let of = |last: u8| budget.charge(Some(SocketAddr::from(([192, 0, 2, last], 1))));
        let (mut a, mut again, mut b, mut c) = (of(1), of(1), of(2), of(3));
        a.set(60).unwrap();
        assert!(again.set(41).is_err(), "60 are held for it");
        again.set(40).unwrap();
        assert!(b.set(51).is_err());
        b.set(50).unwrap();
        assert!(c.set(1).is_err());
        b.set(30).unwrap();
        c.set(20).unwrap();
        drop((a, again));
        assert_eq!((budget.held(), budget.refused.get()), (50, 3));
        drop((b, c));
        assert!(budget.held() == 0 && budget.lock().by_address.is_empty());
    }
}
