//! Rate limit of the packets that the gateway originates: ICMP errors, TCP resets, and replies to health checks (RFC 1812
//! section 4.3.2.8, RFC 4443 section 2.4 f). Token buckets for the worker and for each sender, so that one sender does
//! not use up the replies for others. Health checks have buckets of their own (`probe_limiter.rs`): a flood of them
//! neither stops ICMP errors nor shows how many are left.

mod bucket;
mod probe_limiter;

use self::bucket::Bucket;
pub use self::probe_limiter::ProbeLimiter;
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

/// The rate limiter of one worker.
#[derive(Debug)]
pub struct ReplyLimiter {
    /// Replies to health checks.
    pub probes: ProbeLimiter,
    worker: Bucket,
    senders: Box<[Bucket; SENDER_BUCKETS]>,
    key: HashKey,
    draws: u64,
}

impl ReplyLimiter {
    /// A limiter with full buckets. `key` randomizes the rate: an observer who can infer how many tokens are left
    /// learns which ports are in use (CVE-2020-25705).
    pub fn new(key: HashKey, now: Tick) -> Self {
        Self {
            probes: ProbeLimiter::new(key, now),
            worker: Bucket::full(BURST, now),
            senders: Box::new([Bucket::full(SENDER_BURST, now); SENDER_BUCKETS]),
            key,
            draws: 0,
        }
    }

    /// Takes a token for an ICMP error or a reset to the sender with this hash; false if there is none.
    pub fn allow(&mut self, sender: u64, now: Tick) -> bool {
        let bucket = &mut self.senders[(sender >> 32) as usize % SENDER_BUCKETS];
        if !bucket.take(SENDER_RATE, SENDER_BURST, now) || !self.worker.take(RATE, BURST, now) {
            return false;
        }
        // A random fourth of the replies costs a second token.
        self.draws += 1;
        if self.key.draw(self.draws).is_multiple_of(4) {
            self.worker.remove();
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
