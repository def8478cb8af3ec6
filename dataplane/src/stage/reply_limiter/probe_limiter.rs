//! Rate limit of replies to health checks. The source of a SYN may be spoofed; a sender that acknowledges the SYN-ACK
//! has received it, and is confirmed for an hour. Confirmed senders have buckets of their own, for open connections
//! apart from those for SYNs, which others can spoof with a prober's address. All others share a small bucket.
//!
//! Each worker confirms senders for itself. A full table takes no newcomers: they stay unconfirmed.

use super::bucket::Bucket;
use crate::flow::address::Address;
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};

/// Rate per second and burst of all unconfirmed senders, and of those of one address prefix.
const UNCONFIRMED_RATE: u32 = 1_000;
const UNCONFIRMED_BURST: u32 = 100;
const PREFIX_RATE: u32 = 20;
const PREFIX_BURST: u32 = 20;
/// Buckets of prefixes; a prefix's bucket is selected by hash.
const PREFIX_BUCKETS: usize = 1024;
/// Rate and burst of all confirmed senders, for SYNs and for open connections each.
const CONFIRMED_RATE: u32 = 4_000;
const CONFIRMED_BURST: u32 = 1_000;
/// Rate and burst of one of them: a load balancer that checks ten thousand Services every ten seconds. A connection
/// takes one reply to its SYN and two more.
const CONFIRMED_SENDER_RATE: u32 = 2_000;
const CONFIRMED_SENDER_BURST: u32 = 500;
/// How long a sender stays confirmed: probers' intervals are up to five minutes, and only one of several workers gets a
/// connection.
const CONFIRMED_MS: u32 = 3_600_000;
/// Confirmed senders are in a set-associative table.
const SETS: usize = 256;
const WAYS: usize = 4;

/// Buckets for the two kinds of segments.
#[derive(Clone, Copy, Debug)]
struct Budget {
    /// SYNs, and segments that get a reset.
    opening: Bucket,
    /// Segments of open connections.
    open: Bucket,
}

impl Budget {
    fn full(burst: u32, now: Tick) -> Self {
        Self { opening: Bucket::full(burst, now), open: Bucket::full(burst, now) }
    }

    fn take(&mut self, is_open: bool, rate: u32, burst: u32, now: Tick) -> bool {
        let bucket = if is_open { &mut self.open } else { &mut self.opening };
        bucket.take(rate, burst, now)
    }
}

/// A sender that has acknowledged what it was sent.
#[derive(Clone, Copy, Debug)]
struct ConfirmedSender {
    /// The upper bits of its hash; 0 is an unused entry.
    tag: u32,
    /// When it last did.
    confirmed: Tick,
    budget: Budget,
}

impl ConfirmedSender {
    fn is_valid(&self, now: Tick) -> bool {
        // Not `since`, which is 0 for what is older than 24 days.
        self.tag != 0 && now.0.wrapping_sub(self.confirmed.0) < CONFIRMED_MS
    }

    fn is(&self, tag: u32, now: Tick) -> bool {
        self.tag == tag && self.is_valid(now)
    }
}

/// The rate limiter of one worker.
#[derive(Debug)]
pub struct ProbeLimiter {
    unconfirmed: Bucket,
    prefixes: Box<[Bucket; PREFIX_BUCKETS]>,
    confirmed: Budget,
    senders: Box<[[ConfirmedSender; WAYS]]>,
    key: HashKey,
}

impl ProbeLimiter {
    /// A limiter with full buckets, without confirmed senders. `key` keeps others from choosing addresses that collide
    /// with a prober's.
    pub fn new(key: HashKey, now: Tick) -> Self {
        let unused = ConfirmedSender { tag: 0, confirmed: now, budget: Budget::full(0, now) };
        Self {
            unconfirmed: Bucket::full(UNCONFIRMED_BURST, now),
            prefixes: Box::new([Bucket::full(PREFIX_BURST, now); PREFIX_BUCKETS]),
            confirmed: Budget::full(CONFIRMED_BURST, now),
            senders: vec![[unused; WAYS]; SETS].into(),
            key,
        }
    }

    /// Confirms a sender, which has acknowledged what it was sent.
    pub fn confirm<A: Address>(&mut self, sender: A, now: Tick) {
        let (set, tag) = self.place(sender);
        let entries = &mut self.senders[set];
        if let Some(entry) = entries.iter_mut().find(|entry| entry.is(tag, now)) {
            entry.confirmed = now;
        } else if let Some(unused) = entries.iter_mut().find(|entry| !entry.is_valid(now)) {
            *unused = ConfirmedSender { tag, confirmed: now, budget: Budget::full(CONFIRMED_SENDER_BURST, now) };
        }
    }

    /// Takes a token for a reply to a segment of this sender; false if there is none. `is_open`: it belongs to an open
    /// connection.
    pub fn allow<A: Address>(&mut self, sender: A, is_open: bool, now: Tick) -> bool {
        let (set, tag) = self.place(sender);
        if let Some(entry) = self.senders[set].iter_mut().find(|entry| entry.is(tag, now)) {
            return entry.budget.take(is_open, CONFIRMED_SENDER_RATE, CONFIRMED_SENDER_BURST, now)
                && self.confirmed.take(is_open, CONFIRMED_RATE, CONFIRMED_BURST, now);
        }
        let prefix = sender.last_of_prefix(if A::BITS == u32::BITS as u8 { 24 } else { 48 });
        let bucket = &mut self.prefixes[(self.key.hash(&only_source(prefix)) >> 32) as usize % PREFIX_BUCKETS];
        bucket.take(PREFIX_RATE, PREFIX_BURST, now) && self.unconfirmed.take(UNCONFIRMED_RATE, UNCONFIRMED_BURST, now)
    }

    /// The set and the tag of a sender: an IPv4 address, or a network of IPv6 addresses that one host can use.
    fn place<A: Address>(&self, sender: A) -> (usize, u32) {
        let network = sender.last_of_prefix(if A::BITS == u32::BITS as u8 { 32 } else { 64 });
        let hash = self.key.hash(&only_source(network));
        (hash as usize % SETS, (hash >> 32) as u32 | 1)
    }
}

fn only_source<A: Address>(source: A) -> Tuple<A> {
    Tuple { source, ..Tuple::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::address::V6;

    const NOW: Tick = Tick(u32::MAX - 50);

    fn limiter() -> ProbeLimiter {
        ProbeLimiter::new(HashKey::fixed(), NOW)
    }

    /// An address of the nth prefix.
    fn v4(n: u32) -> u32 {
        0x0b00_0007 + (n << 8)
    }

    fn v6(n: u32) -> V6 {
        V6 { high: 0x2a00_0000_0000_0000 + (u64::from(n) << 16), low: 7 }
    }

    /// Takes all tokens for unconfirmed senders.
    fn exhaust(limiter: &mut ProbeLimiter, now: Tick) {
        for n in 0..2_000 {
            limiter.allow(v4(1_000_000 + n), false, now);
        }
        assert!(!limiter.allow(v4(999_999), false, now));
    }

    fn flood<A: Address>(address: impl Fn(u32) -> A) {
        let (mut limiter, prober) = (limiter(), address(50_000));
        limiter.confirm(prober, NOW);
        let mut allowed = 0;
        for n in 0..20_000 {
            let now = NOW.plus(n / 100);
            allowed += u32::from(limiter.allow(address(n), n % 2 == 0, now));
            if n % 100 == 0 {
                assert!(limiter.allow(prober, false, now) && limiter.allow(prober, true, now), "{n}");
            }
        }
        assert!((100..=300).contains(&allowed), "{allowed}");
    }

    #[test]
    fn a_flood_of_spoofed_senders_leaves_confirmed_ones_their_replies() {
        flood(v4);
        flood(v6);
    }

    #[test]
    fn senders_of_one_prefix_leave_others_their_replies() {
        let mut limiter = limiter();
        let allowed = (0..1_000_u32).filter(|&n| limiter.allow(0x0b00_0000 + n % 256, false, NOW)).count();
        assert_eq!(allowed, PREFIX_BURST as usize);
        assert!(limiter.allow(v4(1), false, NOW));
        let of_prefix = |n: u32| V6 { high: 0x2a00_0000_0001_0000 + u64::from(n), low: u64::from(n) };
        let allowed = (0..1_000).filter(|&n| limiter.allow(of_prefix(n), false, NOW)).count();
        assert_eq!(allowed, PREFIX_BURST as usize);
        assert!(limiter.allow(v6(2), false, NOW));
    }

    #[test]
    fn spoofed_syns_of_a_confirmed_sender_stop_neither_its_connections_nor_others() {
        let mut limiter = limiter();
        let (prober, other) = (v4(1), v4(2));
        limiter.confirm(prober, NOW);
        limiter.confirm(other, NOW);
        let allowed = (0..10_000).filter(|_| limiter.allow(prober, false, NOW)).count();
        assert_eq!(allowed, CONFIRMED_SENDER_BURST as usize);
        assert!(limiter.allow(prober, true, NOW) && limiter.allow(other, false, NOW));
        let allowed = (0..20_000).filter(|&n| limiter.allow(prober, true, NOW.plus(n / 20))).count();
        assert!((2_400..=2_500).contains(&allowed), "{allowed} in a second");
    }

    #[test]
    fn all_confirmed_senders_together_are_limited() {
        let mut limiter = limiter();
        for is_open in [false, true] {
            let mut allowed = 0;
            for n in 0..5_000 {
                limiter.confirm(v4(n % 20), NOW);
                allowed += u32::from(limiter.allow(v4(n % 20), is_open, NOW));
            }
            assert_eq!(allowed, CONFIRMED_BURST);
        }
    }

    #[test]
    fn newcomers_displace_no_confirmed_sender_and_one_is_forgotten_after_an_hour() {
        let mut limiter = limiter();
        let prober = v4(7);
        limiter.confirm(prober, NOW);
        for n in 0..100_000 {
            limiter.confirm(v6(n), NOW);
        }
        for (ms, is_confirmed) in [(CONFIRMED_MS - 1, true), (CONFIRMED_MS, false), (1 << 31, false)] {
            exhaust(&mut limiter, NOW.plus(ms));
            assert_eq!(limiter.allow(prober, false, NOW.plus(ms)), is_confirmed, "{ms}");
        }
        limiter.confirm(prober, NOW.plus(1 << 31));
        assert!(limiter.allow(prober, false, NOW.plus(1 << 31)), "entries are free again");
    }

    #[test]
    fn any_address_of_an_ipv6_network_is_one_sender() {
        let mut limiter = limiter();
        limiter.confirm(v6(1), NOW);
        exhaust(&mut limiter, NOW);
        assert!(limiter.allow(V6 { low: 99, ..v6(1) }, false, NOW));
        assert!(!limiter.allow(V6 { high: v6(1).high + 1, ..v6(1) }, false, NOW));
    }
}
