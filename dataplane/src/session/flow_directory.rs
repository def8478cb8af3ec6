//! Flow directory: the worker that owns each flow, for packets that arrive on another queue than the flow's first
//! packet.
//!
//! For egress, the receive queue of a pod's packet selects the worker. A NIC hashes headers, so all packets of a flow
//! arrive on one queue; but a sender's kernel moves a TCP flow to another transmit queue when it retransmits, and
//! behind a veth that is another receive queue. A worker without a session for a packet therefore looks here before
//! it opens one: one word of shared memory, read only on misses.
//!
//! An entry is only a hint: a worker that receives a packet by a stale entry opens the session itself, and an evicted
//! entry costs what there was without the directory. Of two workers that see a new flow at once, exactly one claims
//! it.

use std::sync::atomic::Ordering::Relaxed;

use crate::flow::address::Address;
use crate::flow::ids::WorkerId;
use crate::flow::sync::AtomicU32;
use crate::flow::tuple::{HashKey, Tuple};

/// Entries per bucket: the table is set-associative.
const WAYS: usize = 4;

/// The flows of all workers. An entry is a tag of 24 bits and the worker's number; 0 is an empty entry.
#[derive(Debug)]
pub struct FlowDirectory {
    buckets: Box<[[AtomicU32; WAYS]]>,
    key: HashKey,
}

impl FlowDirectory {
    /// A directory for about this many flows. All workers use the same `key`; no session table uses it.
    pub fn new(flows: usize, key: HashKey) -> Self {
        let count = (flows / 2).max(1).next_power_of_two();
        Self { buckets: (0..count).map(|_| Default::default()).collect(), key }
    }

    /// The worker that owns the flow, if the directory has an entry for it.
    pub fn find<A: Address>(&self, flow: &Tuple<A>) -> Option<WorkerId> {
        let (bucket, tag) = self.bucket(flow);
        bucket.iter().map(|entry| entry.load(Relaxed)).find(|word| word >> 8 == tag).map(worker)
    }

    /// The worker that owns the flow; claims it for `this` worker if there is no entry.
    pub fn find_or_claim<A: Address>(&self, flow: &Tuple<A>, this: WorkerId) -> WorkerId {
        let (bucket, tag) = self.bucket(flow);
        let own = tag << 8 | u32::from(this.0);
        // Every worker tries the same entry of the bucket first, so only one of two concurrent claims succeeds.
        let victim = &bucket[tag as usize % WAYS];
        loop {
            let words = bucket.each_ref().map(|entry| entry.load(Relaxed));
            if let Some(word) = words.into_iter().find(|word| word >> 8 == tag) {
                return worker(word);
            }
            let empty = words.iter().position(|word| *word == 0);
            let entry = empty.map_or(victim, |at| &bucket[at]);
            let expected = empty.map_or(words[tag as usize % WAYS], |_| 0);
            if entry.compare_exchange(expected, own, Relaxed, Relaxed).is_ok() {
                return this;
            }
        }
    }

    /// Records `this` worker as the owner of the flow, whatever the entry says.
    pub fn claim<A: Address>(&self, flow: &Tuple<A>, this: WorkerId) {
        let (bucket, tag) = self.bucket(flow);
        let own = tag << 8 | u32::from(this.0);
        match bucket.iter().find(|entry| entry.load(Relaxed) >> 8 == tag) {
            Some(entry) => entry.store(own, Relaxed),
            None => drop(self.find_or_claim(flow, this)),
        }
    }

    fn bucket<A: Address>(&self, flow: &Tuple<A>) -> (&[AtomicU32; WAYS], u32) {
        let hash = self.key.hash(flow);
        // A tag is never 0: that is an empty entry.
        let tag = (hash >> 40) as u32 | 1;
        (&self.buckets[hash as usize & (self.buckets.len() - 1)], tag)
    }
}

fn worker(word: u32) -> WorkerId {
    WorkerId(word as u8)
}

#[cfg(all(test, feature = "loom"))]
mod interleavings {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn concurrent_claims_of_a_new_flow_agree() {
        loom::model(|| {
            let directory = Arc::new(FlowDirectory::new(1, HashKey::fixed()));
            let flow = Tuple { source: 7_u32, destination: 9, source_port: 1, destination_port: 2, protocol: 6 };
            let other = {
                let directory = directory.clone();
                thread::spawn(move || directory.find_or_claim(&flow, WorkerId(1)))
            };
            let own = directory.find_or_claim(&flow, WorkerId(0));
            assert_eq!(own, other.join().unwrap());
            assert_eq!(directory.find(&flow), Some(own));
        });
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::thread;

    use super::*;

    const KEY: HashKey = HashKey::fixed();

    fn flow(port: u16) -> Tuple<u32> {
        Tuple { source: 0x0a00_0001, destination: 9, source_port: port, destination_port: 443, protocol: 6 }
    }

    #[test]
    fn the_first_claim_of_a_flow_wins() {
        let directory = FlowDirectory::new(1000, KEY);
        assert_eq!(directory.find(&flow(7)), None);
        assert_eq!(directory.find_or_claim(&flow(7), WorkerId(1)), WorkerId(1));
        assert_eq!(directory.find_or_claim(&flow(7), WorkerId(0)), WorkerId(1));
        assert_eq!(directory.find(&flow(7)), Some(WorkerId(1)));
    }

    #[test]
    fn eviction_never_blocks_a_claim() {
        let directory = FlowDirectory::new(1, KEY);
        for port in 0..1000 {
            assert_eq!(directory.find_or_claim(&flow(port), WorkerId(1)), WorkerId(1));
        }
    }

    #[test]
    fn two_threads_agree_on_the_owner_of_every_flow() {
        let directory = FlowDirectory::new(4096, KEY);
        let claims = |this| (0..1000).map(|port| directory.find_or_claim(&flow(port), this)).collect::<Vec<_>>();
        thread::scope(|scope| {
            let other = scope.spawn(|| claims(WorkerId(1)));
            let own = claims(WorkerId(0));
            // Not the lists: a count of differences is readable, a thousand numbers are not.
            let other = other.join().unwrap();
            assert_eq!(own.iter().zip(&other).filter(|(own, other)| own != other).count(), 0);
        });
    }
}
