//! The queue of held packets. Time is an argument.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long a packet is held: later ones of the same connection have been sent again by then.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Packets of one pod, and of all.
const MAX_PER_POD: usize = 32;
const MAX_TOTAL: usize = 1024;

/// Packets with the times of their arrival, oldest first.
type PodQueue = VecDeque<(Instant, Box<[u8]>)>;

/// Packets by pod.
#[derive(Debug, Default)]
pub struct HoldQueue {
    pods: BTreeMap<IpAddr, PodQueue>,
    total: usize,
    /// How many packets were dropped.
    dropped: u64,
    /// How many were released.
    released: u64,
}

impl HoldQueue {
    /// Holds a packet, from its IP header on. Packets without a source of unicast are dropped, and so is what exceeds a
    /// limit.
    pub fn push(&mut self, packet: &[u8], now: Instant) {
        self.expire(now);
        let source = source(packet).filter(|_| self.total < MAX_TOTAL);
        let queue = source.map(|source| self.pods.entry(source).or_default()).filter(|queue| queue.len() < MAX_PER_POD);
        match queue {
            Some(queue) => {
                queue.push_back((now, packet.into()));
                self.total += 1;
            }
            None => self.dropped += 1,
        }
    }

    /// The packets of pods that policy knows now, each pod's in their order.
    pub fn release(&mut self, is_known: impl Fn(&IpAddr) -> bool, now: Instant) -> Vec<Box<[u8]>> {
        self.expire(now);
        let known = self.pods.extract_if(.., |pod, _| is_known(pod));
        let packets: Vec<Box<[u8]>> = known.flat_map(|(_, queue)| queue).map(|(_, packet)| packet).collect();
        self.total -= packets.len();
        self.released += packets.len() as u64;
        packets
    }

    /// How many packets are held, were released, and were dropped.
    pub fn counts(&self) -> (usize, u64, u64) {
        (self.total, self.released, self.dropped)
    }

    /// The pods with held packets.
    pub fn pods(&self) -> impl Iterator<Item = &IpAddr> {
        self.pods.keys()
    }

    /// Drops packets that are too old.
    pub fn expire(&mut self, now: Instant) {
        let mut expired = 0;
        self.pods.retain(|_, queue| {
            while queue.pop_front_if(|(since, _)| now.saturating_duration_since(*since) > MAX_AGE).is_some() {
                expired += 1;
            }
            !queue.is_empty()
        });
        self.total -= expired;
        self.dropped += expired as u64;
    }
}

/// The source address of a packet.
fn source(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(IpAddr::from(*packet.get(12..16)?.first_chunk::<4>()?)),
        6 => Some(IpAddr::from(*packet.get(8..24)?.first_chunk::<16>()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(source: &str, number: u8) -> Vec<u8> {
        match source.parse().unwrap() {
            IpAddr::V4(v4) => [&[0x45; 12][..], &v4.octets(), &[0; 4], &[number]].concat(),
            IpAddr::V6(v6) => [&[0x60; 8][..], &v6.octets(), &[0; 16], &[number]].concat(),
        }
    }

    #[test]
    fn packets_of_known_pods_are_released_in_their_order() {
        let (mut queue, now) = (HoldQueue::default(), Instant::now());
        for n in 0..3 {
            queue.push(&packet("10.244.1.5", n), now);
            queue.push(&packet("fd00:244::5", n), now);
        }
        assert!(queue.release(|_| false, now).is_empty());
        let released = queue.release(IpAddr::is_ipv6, now);
        assert_eq!(released.iter().map(|packet| *packet.last().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(queue.counts(), (3, 3, 0));
        assert_eq!(queue.pods().collect::<Vec<_>>(), [&"10.244.1.5".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn what_is_held_is_bounded_per_pod_in_all_and_in_time() {
        let (mut queue, now) = (HoldQueue::default(), Instant::now());
        (0..100).for_each(|n| queue.push(&packet("10.244.1.5", n), now));
        assert_eq!(queue.counts(), (MAX_PER_POD, 0, 100 - MAX_PER_POD as u64));
        for pod in 0..=255 {
            (0..8).for_each(|n| queue.push(&packet(&format!("10.244.2.{pod}"), n), now));
        }
        assert_eq!(queue.counts().0, MAX_TOTAL);
        let (_, _, before) = queue.counts();
        queue.push(&packet("10.244.1.6", 0), now + MAX_AGE + Duration::from_millis(1));
        assert_eq!(queue.counts(), (1, 0, before + MAX_TOTAL as u64));
    }

    #[test]
    fn cut_packets_are_dropped() {
        let (mut queue, now) = (HoldQueue::default(), Instant::now());
        for whole in [packet("10.244.1.5", 0), packet("fd00:244::5", 0)] {
            let end = if whole[0] == 0x45 { 16 } else { 24 };
            (0..end).for_each(|length| queue.push(&whole[..length], now));
        }
        queue.push(&[0x15; 64], now);
        assert_eq!(queue.counts(), (0, 0, 41));
    }
}
