//! Rate limit of the packets that the gateway originates: ICMP errors and TCP resets (RFC 1812 section 4.3.2.8, RFC
//! 4443 section 2.4 f). Token buckets for the worker and for each sender, so that one sender does not use up the
//! replies for others.

use crate::flow::time::Tick;
use crate::flow::tuple::HashKey;

/// Rate per second and burst of one worker.
const RATE: u32 = 1_000;
const BURST: u32 = 100;
/// Rate and burst per sender: enough for a traceroute.
const SENDER_RATE: u32 = 20;
const SENDER_BURST: u32 = 20;
/// Buckets of senders; a sender's bucket is selected by hash.
const SENDER_BUCKETS: usize = 1024;

/// A token bucket; its level is in thousandths of a token.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    level: u32,
    filled: Tick,
}

impl Bucket {
    fn take(&mut self, rate: u32, burst: u32, now: Tick) -> bool {
        let elapsed = now.since(self.filled);
        if elapsed > 0 {
            let refill = elapsed.saturating_mul(rate);
            self.level = self.level.saturating_add(refill).min(burst * 1000);
            self.filled = now;
        }
        let is_allowed = self.level >= 1000;
        if is_allowed {
            self.level -= 1000;
        }
        is_allowed
    }
}

/// The rate limiter of one worker.
#[derive(Debug)]
pub struct ReplyLimiter {
    worker: Bucket,
    senders: Box<[Bucket; SENDER_BUCKETS]>,
    key: HashKey,
    draws: u64,
}

impl ReplyLimiter {
    /// A limiter with full buckets. `key` randomizes the rate: an observer who can infer how many tokens are left
    /// learns which ports are in use (CVE-2020-25705).
    pub fn new(key: HashKey, now: Tick) -> Self {
        let full = |burst: u32| Bucket { level: burst * 1000, filled: now };
        Self { worker: full(BURST), senders: Box::new([full(SENDER_BURST); SENDER_BUCKETS]), key, draws: 0 }
    }

    /// Takes a token for a reply to the sender with this hash; false if there is none.
    pub fn allow(&mut self, sender: u64, now: Tick) -> bool {
        let bucket = &mut self.senders[(sender >> 32) as usize % SENDER_BUCKETS];
        if !bucket.take(SENDER_RATE, SENDER_BURST, now) || !self.worker.take(RATE, BURST, now) {
            return false;
        }
        // A random fourth of the replies costs a second token.
        self.draws += 1;
        if self.key.draw(self.draws).is_multiple_of(4) {
            self.worker.level = self.worker.level.saturating_sub(1000);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sender_is_limited_and_others_are_not() {
        let mut limiter = ReplyLimiter::new(HashKey::fixed(), Tick(5));
        let allowed = (0..1000).filter(|_| limiter.allow(1 << 40, Tick(5))).count();
        assert_eq!(allowed, SENDER_BURST as usize);
        assert!(limiter.allow(2 << 40, Tick(5)));
        let allowed = (0..10_000).filter(|n| limiter.allow(1 << 40, Tick(5 + n / 10))).count();
        assert!((15..=21).contains(&allowed), "{allowed} in a second");
    }

    #[test]
    fn all_senders_together_are_limited_and_the_limit_refills() {
        let mut limiter = ReplyLimiter::new(HashKey::fixed(), Tick(0));
        let flood =
            |limiter: &mut ReplyLimiter, now| (0..5000_u64).filter(|n| limiter.allow(n << 33, Tick(now))).count();
        assert!((60..=100).contains(&flood(&mut limiter, 0)));
        assert!(flood(&mut limiter, 1) < 5);
        assert!((60..=100).contains(&flood(&mut limiter, 60_000)));
    }
}
