//! Which worker has a flow, for packets that come in on another queue than their flow's first one.
//!
//! The way out, the queue that a pod's packet comes in on decides the worker. A NIC hashes headers, so all packets of a
//! flow come in on one queue; but a sender's kernel moves a TCP flow to another transmit queue when it retransmits, and
//! behind a veth that is another receive queue. A worker that doesn't know a flow therefore looks here before it opens
//! a session: one word of memory shared by the workers, read only on misses.
//!
//! It is a hint, never the truth: a worker that is sent a packet for nothing opens the session itself, and a hint that was
//! crowded out costs what there was without it. Of two workers that see a new flow at once, one claims it first.

use std::sync::atomic::Ordering::Relaxed;

use crate::address::Address;
use crate::ports::pool::WorkerId;
use crate::session::tuple::{HashKey, Tuple};
use crate::sync::AtomicU32;

/// Places that one flow may have.
const WAYS: usize = 4;

/// The flows of all workers: a tag of 24 bits and the worker in each word; 0 is an empty place.
#[derive(Debug)]
pub struct Directory {
    places: Box<[[AtomicU32; WAYS]]>,
    key: HashKey,
}

impl Directory {
    /// A directory for about this many flows. `key` is not any table's key, but the same for all workers.
    pub fn new(flows: usize, key: HashKey) -> Self {
        let buckets = (flows / 2).max(1).next_power_of_two();
        Self { places: (0..buckets).map(|_| Default::default()).collect(), key }
    }

    /// The worker that has the flow, as far as anybody knows.
    pub fn find<A: Address>(&self, flow: &Tuple<A>) -> Option<WorkerId> {
        let (bucket, tag) = self.bucket(flow);
        bucket.iter().map(|place| place.load(Relaxed)).find(|word| word >> 8 == tag).map(worker)
    }

    /// The worker that has the flow: `this` one from now on, if nobody has it yet.
    pub fn find_or_claim<A: Address>(&self, flow: &Tuple<A>, this: WorkerId) -> WorkerId {
        let (bucket, tag) = self.bucket(flow);
        let own = tag << 8 | u32::from(this.0);
        // All of one flow try the same place first, so of two workers at once only one gets it.
        let victim = &bucket[tag as usize % WAYS];
        loop {
            let words = bucket.each_ref().map(|place| place.load(Relaxed));
            if let Some(word) = words.into_iter().find(|word| word >> 8 == tag) {
                return worker(word);
            }
            let empty = words.iter().position(|word| *word == 0);
            let place = empty.map_or(victim, |at| &bucket[at]);
            let expected = empty.map_or(words[tag as usize % WAYS], |_| 0);
            if place.compare_exchange(expected, own, Relaxed, Relaxed).is_ok() {
                return this;
            }
        }
    }

    /// Notes that `this` worker has the flow, whoever had it before.
    pub fn claim<A: Address>(&self, flow: &Tuple<A>, this: WorkerId) {
        let (bucket, tag) = self.bucket(flow);
        let own = tag << 8 | u32::from(this.0);
        match bucket.iter().find(|place| place.load(Relaxed) >> 8 == tag) {
            Some(place) => place.store(own, Relaxed),
            None => drop(self.find_or_claim(flow, this)),
        }
    }

    fn bucket<A: Address>(&self, flow: &Tuple<A>) -> (&[AtomicU32; WAYS], u32) {
        let hash = self.key.hash(flow);
        // A tag is never 0, which is an empty place.
        let tag = (hash >> 40) as u32 | 1;
        (&self.places[hash as usize & (self.places.len() - 1)], tag)
    }
}

fn worker(word: u32) -> WorkerId {
    WorkerId(word as u8)
}

#[cfg(all(test, feature = "loom"))]
mod every_order {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn two_workers_that_see_a_new_flow_at_once_agree() {
        loom::model(|| {
            let directory = Arc::new(Directory::new(1, HashKey::fixed()));
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
    fn the_first_worker_keeps_a_flow() {
        let directory = Directory::new(1000, KEY);
        assert_eq!(directory.find(&flow(7)), None);
        assert_eq!(directory.find_or_claim(&flow(7), WorkerId(1)), WorkerId(1));
        assert_eq!(directory.find_or_claim(&flow(7), WorkerId(0)), WorkerId(1));
        assert_eq!(directory.find(&flow(7)), Some(WorkerId(1)));
    }

    #[test]
    fn crowding_out_never_blocks() {
        let directory = Directory::new(1, KEY);
        for port in 0..1000 {
            assert_eq!(directory.find_or_claim(&flow(port), WorkerId(1)), WorkerId(1));
        }
    }

    #[test]
    fn workers_at_once_agree_on_every_flow() {
        let directory = Directory::new(4096, KEY);
        let claims = |this| (0..1000).map(|port| directory.find_or_claim(&flow(port), this)).collect::<Vec<_>>();
        thread::scope(|scope| {
            let other = scope.spawn(|| claims(WorkerId(1)));
            let own = claims(WorkerId(0));
            // No list in the message: a thousand numbers tell less than how many differ.
            let other = other.join().unwrap();
            assert_eq!(own.iter().zip(&other).filter(|(own, other)| own != other).count(), 0);
        });
    }
}
