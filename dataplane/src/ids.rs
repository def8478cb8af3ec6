//! Identifications of datagrams that may be fragmented on their way (RFC 6864 section 5.3.1, RFC 7857 section 10).
//!
//! Behind one VIP all pods share one space of identifications toward each far side, so those of pods can't stay. Each
//! worker gives out its own part of the space, counting for each of many groups of far sides, from a random start.

use crate::address::Address;
use crate::session::tuple::{HashKey, Tuple};

/// Groups of far sides with a counter each: the more there are, the longer an identification stays unused.
const GROUPS: usize = 2048;

/// The identifications that one worker gives out.
#[derive(Debug)]
pub struct Ids {
    next: Box<[u32; GROUPS]>,
    worker: u32,
    workers: u32,
    key: HashKey,
}

impl Ids {
    /// Those of worker `worker` of `workers`; `key` decides where they begin.
    pub fn new(worker: u8, workers: u8, key: HashKey) -> Self {
        let mut next = Box::new([0; GROUPS]);
        for (group, start) in next.iter_mut().enumerate() {
            *start = key.draw(group as u64) as u32;
        }
        Self { next, worker: worker.into(), workers: workers.max(1).into(), key }
    }

    /// The next one toward a far side. IPv4 takes the lower half.
    #[inline]
    pub fn next<A: Address>(&mut self, far: A, protocol: u8) -> u32 {
        let group = self.key.hash(&Tuple { source: far, protocol, ..Tuple::default() });
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
    fn two_workers_never_give_out_the_same_before_the_space_is_used_up() {
        let key = HashKey::fixed();
        let (mut one, mut two) = (Ids::new(0, 2, key), Ids::new(1, 2, key));
        let ids = |ids: &mut Ids| (0..32_000).map(|_| ids.next(7_u32, 17) as u16).collect::<HashSet<_>>();
        let (one, two) = (ids(&mut one), ids(&mut two));
        assert_eq!((one.len(), two.len()), (32_000, 32_000));
        assert!(one.is_disjoint(&two));
    }
}
