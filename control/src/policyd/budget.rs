//! Memory budget of clients, per address and in total: requests being received, subscription state of streams, and
//! responses not yet written to the network. A client over its limit is rejected or waits, so it can't starve others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tonic::Status;

use crate::config::PolicydLimits;
use crate::listener::source_prefix;
use crate::policyd::stats::Counter;

/// Responses get one in so many bytes of each limit, requests and streams the rest. A response may wait for memory, a
/// request may not: if responses could use all of it, the acknowledgments that streams wait for would be rejected.
const RESPONSE_DIVISOR: usize = 4;
/// How long a stream may stall: its client takes no response, or there is no memory for its next update.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What memory is charged for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Requests being received, and subscription state of streams.
    Requests,
    /// Responses until they are written to the network.
    Responses,
}

/// Memory budget of all clients.
#[derive(Debug)]
pub struct Budget {
    per_address: usize,
    total: usize,
    stall_timeout: Duration,
    usage: Mutex<[Usage; 2]>,
    /// Requests and streams that were rejected or ended for want of memory.
    pub refused: Counter,
}

/// Bytes in use for one purpose.
#[derive(Debug, Default)]
struct Usage {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Default for Budget {
    fn default() -> Self {
        let PolicydLimits { bytes, bytes_per_address, .. } = PolicydLimits::default();
        Self::new(bytes_per_address, bytes)
    }
}

impl Budget {
    /// A budget with these limits, in bytes.
    pub fn new(per_address: usize, total: usize) -> Self {
        Self { per_address, total, stall_timeout: STALL_TIMEOUT, usage: Mutex::default(), refused: Counter::default() }
    }

    /// Replaces the stall timeout.
    #[cfg(test)]
    pub(super) fn with_stall_timeout(self, stall_timeout: Duration) -> Self {
        Self { stall_timeout, ..self }
    }

    /// How long a stream may stall.
    pub fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// An empty charge on a client's account.
    pub fn charge(self: &Arc<Self>, from: Option<SocketAddr>, purpose: Purpose) -> Charge {
        let address = from.map_or(Ipv6Addr::UNSPECIFIED.into(), |from| source_prefix(from.ip()));
        Charge { budget: self.clone(), address, purpose, bytes: 0 }
    }

    /// Bytes in use in total.
    pub fn held_bytes(&self) -> usize {
        self.lock().iter().map(|usage| usage.total).sum()
    }

    /// Limits for one address (IPv6: one /64) and in total, bytes.
    fn limits(&self, purpose: Purpose) -> [usize; 2] {
        [self.per_address, self.total].map(|limit| match purpose {
            Purpose::Requests => limit - limit / RESPONSE_DIVISOR,
            Purpose::Responses => limit / RESPONSE_DIVISOR,
        })
    }

    fn lock(&self) -> MutexGuard<'_, [Usage; 2]> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory charged for one request, stream or response; returned to the budget on drop.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    address: IpAddr,
    purpose: Purpose,
    bytes: usize,
}

/// The limit that would be exceeded: its scope, its name in the configuration, bytes.
type ExceededLimit = (&'static str, &'static str, usize);

impl Charge {
    /// Changes the charge to this number of bytes.
    ///
    /// # Errors
    /// When that would exceed a limit: the charge stays as it was, and the rejection is counted.
    pub fn set(&mut self, bytes: usize) -> Result<(), Status> {
        self.change(bytes).map_err(|(scope, field, limit)| {
            self.budget.refused.increment();
            let what = match self.purpose {
                Purpose::Requests => "requests and names",
                Purpose::Responses => "responses",
            };
            Status::resource_exhausted(format!(
                "memory limit exceeded: at most {} KiB of {what} for {scope} (`limits.{field}`)",
                limit >> 10
            ))
        })
    }

    /// Changes the charge if that exceeds no limit; else it stays as it was. Lowering it always succeeds.
    pub fn try_set(&mut self, bytes: usize) -> bool {
        self.change(bytes).is_ok()
    }

    /// Changes the charge regardless of limits: for memory that was admitted before its size was known.
    pub fn force(&mut self, bytes: usize) {
        let mut usage = self.budget.lock();
        usage[self.purpose as usize].replace(self.address, self.bytes, bytes);
        self.bytes = bytes;
    }

    fn change(&mut self, bytes: usize) -> Result<(), ExceededLimit> {
        let [per_address, total] = self.budget.limits(self.purpose);
        let mut usage = self.budget.lock();
        let usage = &mut usage[self.purpose as usize];
        if bytes > self.bytes {
            let others = usage.of(self.address) - self.bytes;
            // A response longer than the limit is sent when it is the address's only one.
            let is_only_response = others == 0 && self.purpose == Purpose::Responses;
            if others + bytes > per_address && !is_only_response {
                return Err(("your address", "bytes_per_address", per_address));
            }
            if usage.total - self.bytes + bytes > total {
                return Err(("all clients", "bytes", total));
            }
        }
        usage.replace(self.address, self.bytes, bytes);
        self.bytes = bytes;
        Ok(())
    }
}

impl Usage {
    fn of(&self, address: IpAddr) -> usize {
        self.by_address.get(&address).copied().unwrap_or_default()
    }

    fn replace(&mut self, address: IpAddr, old: usize, new: usize) {
        self.total = self.total - old + new;
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

    /// A charge on the account of 192.0.2.`last`.
    fn charge(budget: &Arc<Budget>, last: u8, purpose: Purpose) -> Charge {
        budget.charge(Some(SocketAddr::from(([192, 0, 2, last], 1))), purpose)
    }

    #[test]
    fn requests_are_limited_per_address_and_in_total() {
        // Three quarters of the limits are for requests.
        let budget = Arc::new(Budget::new(134, 200));
        let [mut a, mut second_of_a, mut b, mut c] = [1, 1, 2, 3].map(|last| charge(&budget, last, Purpose::Requests));
        a.set(60).unwrap();
        let error = second_of_a.set(42).unwrap_err();
        assert!(error.message().contains("for your address (`limits.bytes_per_address`)"), "{error}");
        second_of_a.set(40).unwrap();
        let error = b.set(51).unwrap_err();
        assert!(error.message().contains("for all clients (`limits.bytes`)"), "{error}");
        b.set(50).unwrap();
        assert!(c.set(1).is_err() && !c.try_set(1));
        b.set(30).unwrap();
        assert!(c.try_set(20));
        drop((a, second_of_a));
        assert_eq!((budget.held_bytes(), budget.refused.get()), (50, 3));
        drop((b, c));
        assert!(budget.held_bytes() == 0 && budget.lock().iter().all(|usage| usage.by_address.is_empty()));
    }

    #[test]
    fn responses_leave_memory_for_requests_and_an_oversized_one_is_sent_alone() {
        let budget = Arc::new(Budget::new(400, 4000));
        let [mut first, mut second] = [1, 1].map(|last| charge(&budget, last, Purpose::Responses));
        assert!(first.try_set(150), "over the limit of responses of one address, but the only one");
        assert!(!second.try_set(1));
        let mut request = charge(&budget, 1, Purpose::Requests);
        request.set(300).unwrap();
        assert!(request.set(301).is_err());
        assert!(first.try_set(40) && second.try_set(60) && !second.try_set(61));
        // A forced charge counts toward the limits of others.
        second.force(1000);
        assert_eq!(budget.held_bytes(), 1340);
        assert!(!first.try_set(41) && first.try_set(39), "lowering a charge always succeeds");
        drop((first, second, request));
        assert_eq!(budget.held_bytes(), 0);
    }
}
