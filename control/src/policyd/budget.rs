//! Memory that clients make the server hold, by address and in all: requests that are on their way, what a stream remembers of a client,
//! and responses that the network hasn't taken. Who would have more is refused, or waits; so one client can't take what others need.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tonic::Status;

use super::figures::Count;
use crate::config::PolicydLimits;
use crate::listener::network;

/// Responses have a quarter of each limit, requests and streams the rest. A response may wait for its turn. A request may not: if
/// responses could take all, acknowledgements would be refused, which are what a stream waits for.
const RESPONSES: usize = 4;
/// How long a stream may make no progress: its client takes no response, or there is no memory for what it should be told.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Requests as they come, and what streams remember.
    Requests,
    /// Responses until the network has taken them.
    Responses,
}

/// What is held for whom.
#[derive(Debug)]
pub struct Budget {
    per_address: usize,
    in_all: usize,
    stall_timeout: Duration,
    held: Mutex<[Held; 2]>,
    /// Requests and streams that were refused or ended.
    pub refused: Count,
}

/// Bytes of one purpose.
#[derive(Debug, Default)]
struct Held {
    in_all: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Default for Budget {
    fn default() -> Self {
        let PolicydLimits { bytes, bytes_per_address, .. } = PolicydLimits::default();
        Self::new(bytes_per_address, bytes)
    }
}

impl Budget {
    /// One of so many bytes.
    pub fn new(per_address: usize, in_all: usize) -> Self {
        Self { per_address, in_all, stall_timeout: STALL_TIMEOUT, held: Mutex::default(), refused: Count::default() }
    }

    /// One with another time for streams that make no progress.
    #[cfg(test)]
    pub(super) fn with_stall_timeout(self, stall_timeout: Duration) -> Self {
        Self { stall_timeout, ..self }
    }

    /// How long a stream may make no progress.
    pub fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// What is held for a client, nothing yet.
    pub fn charge(self: &Arc<Self>, from: Option<SocketAddr>, purpose: Purpose) -> Charge {
        let address = from.map_or(Ipv6Addr::UNSPECIFIED.into(), |from| network(from.ip()));
        Charge { budget: self.clone(), address, purpose, bytes: 0 }
    }

    /// Bytes that are held in all.
    pub fn held(&self) -> usize {
        self.lock().iter().map(|held| held.in_all).sum()
    }

    /// Bytes for one address (of IPv6, one network of 64 bits), and for all.
    fn limits(&self, purpose: Purpose) -> [usize; 2] {
        [self.per_address, self.in_all].map(|limit| match purpose {
            Purpose::Requests => limit - limit / RESPONSES,
            Purpose::Responses => limit / RESPONSES,
        })
    }

    fn lock(&self) -> MutexGuard<'_, [Held; 2]> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is held for one request, stream or response, until it is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    address: IpAddr,
    purpose: Purpose,
    bytes: usize,
}

/// Which limit would be passed: whose it is, its name in the configuration, bytes.
type Excess = (&'static str, &'static str, usize);

impl Charge {
    /// It is so many bytes now.
    ///
    /// # Errors
    /// When that would be too many: nothing changes, and it is counted.
    pub fn set(&mut self, bytes: usize) -> Result<(), Status> {
        self.change(bytes).map_err(|(who, field, limit)| {
            self.budget.refused.add();
            let what = match self.purpose {
                Purpose::Requests => "requests and names",
                Purpose::Responses => "responses",
            };
            Status::resource_exhausted(format!(
                "the server holds no more than {} KiB of {what} for {who} (`limits.{field}`), and this would be more",
                limit >> 10
            ))
        })
    }

    /// It is so many bytes now, if that isn't too many; else nothing changes. Less is never too many.
    pub fn try_set(&mut self, bytes: usize) -> bool {
        self.change(bytes).is_ok()
    }

    /// It is so many bytes now, whatever the limits: for what is there already, and was allowed before it was measured.
    pub fn force(&mut self, bytes: usize) {
        let mut held = self.budget.lock();
        held[self.purpose as usize].replace(self.address, self.bytes, bytes);
        self.bytes = bytes;
    }

    fn change(&mut self, bytes: usize) -> Result<(), Excess> {
        let [per_address, in_all] = self.budget.limits(self.purpose);
        let mut held = self.budget.lock();
        let held = &mut held[self.purpose as usize];
        if bytes > self.bytes {
            let others = held.of(self.address) - self.bytes;
            // A response that is longer than the limit goes alone.
            let is_alone = others == 0 && self.purpose == Purpose::Responses;
            if others + bytes > per_address && !is_alone {
                return Err(("your address", "bytes_per_address", per_address));
            }
            if held.in_all - self.bytes + bytes > in_all {
                return Err(("all clients", "bytes", in_all));
            }
        }
        held.replace(self.address, self.bytes, bytes);
        self.bytes = bytes;
        Ok(())
    }
}

impl Held {
    fn of(&self, address: IpAddr) -> usize {
        self.by_address.get(&address).copied().unwrap_or_default()
    }

    fn replace(&mut self, address: IpAddr, old: usize, new: usize) {
        self.in_all = self.in_all - old + new;
        let of_address = self.of(address) - old + new;
        if of_address == 0 {
            self.by_address.remove(&address);
        } else {
            self.by_address.insert(address, of_address);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.force(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is held for one of some addresses.
    fn of(budget: &Arc<Budget>, last: u8, purpose: Purpose) -> Charge {
        budget.charge(Some(SocketAddr::from(([192, 0, 2, last], 1))), purpose)
    }

    #[test]
    fn an_address_takes_its_own_part_and_all_of_them_take_no_more_than_there_is() {
        // Three quarters of them for requests.
        let budget = Arc::new(Budget::new(134, 200));
        let [mut a, mut again, mut b, mut c] = [1, 1, 2, 3].map(|last| of(&budget, last, Purpose::Requests));
        a.set(60).unwrap();
        let refusal = again.set(42).unwrap_err();
        assert!(refusal.message().contains("for your address (`limits.bytes_per_address`)"), "{refusal}");
        again.set(40).unwrap();
        let refusal = b.set(51).unwrap_err();
        assert!(refusal.message().contains("for all clients (`limits.bytes`)"), "{refusal}");
        b.set(50).unwrap();
        assert!(c.set(1).is_err() && !c.try_set(1));
        b.set(30).unwrap();
        assert!(c.try_set(20));
        drop((a, again));
        assert_eq!((budget.held(), budget.refused.get()), (50, 3));
        drop((b, c));
        assert!(budget.held() == 0 && budget.lock().iter().all(|held| held.by_address.is_empty()));
    }

    #[test]
    fn responses_keep_no_request_out_and_a_long_one_goes_alone() {
        let budget = Arc::new(Budget::new(400, 4000));
        let [mut first, mut second] = [1, 1].map(|last| of(&budget, last, Purpose::Responses));
        assert!(first.try_set(150), "longer than what an address has for responses, and the only one");
        assert!(!second.try_set(1));
        let mut request = of(&budget, 1, Purpose::Requests);
        request.set(300).unwrap();
        assert!(request.set(301).is_err());
        assert!(first.try_set(40) && second.try_set(60) && !second.try_set(61));
        // What is there already is counted all the same.
        second.force(1000);
        assert_eq!(budget.held(), 1340);
        assert!(!first.try_set(41) && first.try_set(39), "less is never too many");
        drop((first, second, request));
        assert_eq!(budget.held(), 0);
    }
}
