//! IP identifications: allocates them for datagrams that may be fragmented (RFC 6864 section 5.3.1, RFC 7857 section
//! 10).
//!
//! All pods behind a VIP share one identification space per remote address, so the pods' own identifications cannot be
//! kept. Each worker allocates from its own part of the space, with one counter per group of remote addresses, from a
//! random start.

use crate::flow::address::Address;
use crate::flow::tuple::{HashKey, Tuple};

/// Groups of remote addresses with a counter each: the more groups, the longer an identification is not reused.
const GROUPS: usize = 2048;

/// The identification allocator of one worker.
#[derive(Debug)]
pub struct IpIdAllocator {
    next: Box<[u32; GROUPS]>,
    worker: u32,
    workers: u32,
    key: HashKey,
}

impl IpIdAllocator {
    /// The allocator of worker `worker` of `workers`; `key` determines the start values.
    pub fn new(worker: u8, workers: u8, key: HashKey) -> Self {
        let mut next = Box::new([0; GROUPS]);
        for (group, start) in next.iter_mut().enumerate() {
            *start = key.draw(group as u64) as u32;
        }
        Self { next, worker: worker.into(), workers: workers.max(1).into(), key }
    }

    /// The next identification for packets to `remote`. IPv4 uses the lower half.
    #[inline]
    pub fn next<A: Address>(&mut self, remote: A, protocol: u8) -> u32 {
        let group = self.key.hash(&Tuple { source: remote, protocol, ..Tuple::default() });
        let next = &mut self.next[group as usize % GROUPS];
        *next = next.wrapping_add(1);
        next.wrapping_mul(self.workers).wrapping_add(self.worker)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn two_workers_never_allocate_the_same_identification_before_the_space_wraps() {
        let key = HashKey::fixed();
        let (mut one, mut two) = (IpIdAllocator::new(0, 2, key), IpIdAllocator::new(1, 2, key));
        let ids = |ids: &mut IpIdAllocator| (0..32_000).map(|_| ids.next(7_u32, 17) as u16).collect::<HashSet<_>>();
        let (one, two) = (ids(&mut one), ids(&mut two));
        assert_eq!((one.len(), two.len()), (32_000, 32_000));
        assert!(one.is_disjoint(&two));
    }
}
