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
//!
//! Nobody removes the entry of a flow that has ended, and a flood of new flows claims one for each. So a full bucket
//! evicts entries that no lookup has found first (CLOCK): most flows stay on their queue and are never looked up again,
//! those of lent ports and slots with each packet.

use std::sync::atomic::Ordering::Relaxed;

use crate::flow::address::Address;
use crate::flow::ids::WorkerId;
use crate::flow::sync::AtomicU32;
use crate::flow::tuple::{HashKey, Tuple};

/// Entries per bucket: the table is set-associative. Half full, as after a restart with all sessions, it has no place
/// for 0.8 % of the flows; with four entries a bucket, for 3.7 %.
const WAYS: usize = 8;
/// A word: the worker in the lowest bits, then whether a lookup has found the entry, then the flow's tag. 0 is an empty
/// entry.
const TAG_SHIFT: u32 = 9;
const FOUND: u32 = 1 << 8;

/// Entries in one cache line.
#[derive(Debug, Default)]
#[repr(align(32))]
struct Bucket([AtomicU32; WAYS]);

/// The flows of all workers.
#[derive(Debug)]
pub struct FlowDirectory {
    buckets: Box<[Bucket]>,
    key: HashKey,
}

impl FlowDirectory {
    /// A directory for about this many flows. All workers use the same `key`; no session table uses it.
    pub fn new(flows: usize, key: HashKey) -> Self {
        let count = (flows / (WAYS / 2)).max(1).next_power_of_two();
        Self { buckets: (0..count).map(|_| Bucket::default()).collect(), key }
    }

    /// The worker that owns the flow, if the directory has an entry for it.
    pub fn find<A: Address>(&self, flow: &Tuple<A>) -> Option<WorkerId> {
        let (bucket, tag) = self.bucket(flow);
        let mut entries = bucket.iter().map(|entry| (entry, entry.load(Relaxed)));
        let (entry, word) = entries.find(|(_, word)| has_tag(*word, tag))?;
        mark_found(entry, word);
        Some(worker(word))
    }

    /// The worker that owns the flow; claims it for `this` worker if there is no entry.
    pub fn find_or_claim<A: Address>(&self, flow: &Tuple<A>, this: WorkerId) -> WorkerId {
        let (bucket, tag) = self.bucket(flow);
        let own = tag << TAG_SHIFT | u32::from(this.0);
        loop {
            let words = bucket.each_ref().map(|entry| entry.load(Relaxed));
            if let Some(way) = words.iter().position(|word| has_tag(*word, tag)) {
                let owner = worker(words[way]);
                if owner != this {
                    mark_found(&bucket[way], words[way]);
                }
                return owner;
            }
            // Every worker tries the same entry of the bucket first, so only one of two concurrent claims succeeds.
            let way = victim(words, tag);
            if bucket[way].compare_exchange(words[way], own, Relaxed, Relaxed).is_ok() {
                if words[way] & FOUND != 0 {
                    // All were found: from now on those count that are found again.
                    for entry in bucket {
                        entry.fetch_and(!FOUND, Relaxed);
                    }
                }
                return this;
            }
        }
    }

    /// Records `this` worker as the owner of the flow, whatever the entry says.
    pub fn claim<A: Address>(&self, flow: &Tuple<A>, this: WorkerId) {
        let (bucket, tag) = self.bucket(flow);
        let own = tag << TAG_SHIFT | u32::from(this.0);
        match bucket.iter().find(|entry| has_tag(entry.load(Relaxed), tag)) {
            Some(entry) => entry.store(own, Relaxed),
            None => drop(self.find_or_claim(flow, this)),
        }
    }

    fn bucket<A: Address>(&self, flow: &Tuple<A>) -> (&[AtomicU32; WAYS], u32) {
        let hash = self.key.hash(flow);
        // A tag is never 0: that is an empty entry.
        let tag = (hash >> (32 + TAG_SHIFT)) as u32 | 1;
        (&self.buckets[hash as usize & (self.buckets.len() - 1)].0, tag)
    }
}

fn worker(word: u32) -> WorkerId {
    WorkerId(word as u8)
}

fn has_tag(word: u32, tag: u32) -> bool {
    word >> TAG_SHIFT == tag
}

/// Marks an entry as found by a lookup. If that fails, it is another flow's by now.
fn mark_found(entry: &AtomicU32, word: u32) {
    if word & FOUND == 0 {
        let _ = entry.compare_exchange(word, word | FOUND, Relaxed, Relaxed);
    }
}

/// The way of a bucket that a flow with this tag takes: an empty one, else one that no lookup has found, else any.
fn victim(words: [u32; WAYS], tag: u32) -> usize {
    // Not by the lowest bit of a tag: it is always set.
    let first = (tag >> 1) as usize;
    let empty = words.iter().position(|word| *word == 0);
    let not_found = || (first..first + WAYS).map(|way| way % WAYS).find(|way| words[*way] & FOUND == 0);
    empty.or_else(not_found).unwrap_or(first % WAYS)
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
            // All entries of the bucket are found, now and then.
            if port % 100 < 50 {
                assert_eq!(directory.find(&flow(port)), Some(WorkerId(1)));
            }
        }
    }

    const FLOWS: u16 = WAYS as u16;

    /// Flows fill the only bucket, then come a thousand others; returns which of the first ones are left. Another
    /// worker looks those in `found` up again and again.
    fn left_after_flood(found: &[u16]) -> Vec<u16> {
        let directory = FlowDirectory::new(1, KEY);
        let owner = |port: u16| directory.find_or_claim(&flow(port), WorkerId(0));
        for port in 0..FLOWS {
            assert_eq!(directory.find_or_claim(&flow(port), WorkerId(1)), WorkerId(1));
        }
        for port in 100..1100 {
            for port in found.iter().filter(|_| port % 10 == 0) {
                assert_eq!(owner(*port), WorkerId(1), "{port} of {found:?}");
            }
            owner(port);
        }
        (0..FLOWS).filter(|port| directory.find(&flow(*port)).is_some()).collect()
    }

    #[test]
    fn a_flood_evicts_no_flow_whose_packets_are_handed_off() {
        for port in 0..FLOWS {
            assert_eq!(left_after_flood(&[port]), [port]);
            let others: Vec<u16> = (0..FLOWS).filter(|other| *other != port).collect();
            assert_eq!(left_after_flood(&others), others);
        }
        assert_eq!(left_after_flood(&[]), [0; 0], "no entry stays for good");
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
