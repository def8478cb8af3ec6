//! How often we may speak on our own: ICMP errors and resets (RFC 1812 section 4.3.2.8, RFC 4443 section 2.4 f). In all, and
//! for each sender, so that one who provokes answers doesn't silence those for others.

use crate::session::tuple::HashKey;
use crate::time::Tick;

/// Answers a second of one worker, and how many of them at once.
const PER_SECOND: u32 = 1_000;
const AT_ONCE: u32 = 100;
/// The same for one sender: enough for a traceroute.
const PER_SECOND_EACH: u32 = 20;
const AT_ONCE_EACH: u32 = 20;
/// Senders are told apart by hash in this many places.
const PLACES: usize = 1024;

/// A bucket that fills with time; its level is in thousandths of an answer.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    level: u32,
    filled: Tick,
}

impl Bucket {
    fn take(&mut self, per_second: u32, at_once: u32, now: Tick) -> bool {
        let elapsed = now.since(self.filled);
        if elapsed > 0 {
            let more = elapsed.saturating_mul(per_second);
            self.level = self.level.saturating_add(more).min(at_once * 1000);
            self.filled = now;
        }
        let enough = self.level >= 1000;
        if enough {
            self.level -= 1000;
        }
        enough
    }
}

/// What one worker may say.
#[derive(Debug)]
pub struct Limiter {
    all: Bucket,
    each: Box<[Bucket; PLACES]>,
    key: HashKey,
    drawn: u64,
}

impl Limiter {
    /// A full one. `key` makes its pace hard to guess: whoever can tell from outside how many answers are left learns which ports
    /// are in use (CVE-2020-25705).
    pub fn new(key: HashKey, now: Tick) -> Self {
        let full = |at_once: u32| Bucket { level: at_once * 1000, filled: now };
        Self { all: full(AT_ONCE), each: Box::new([full(AT_ONCE_EACH); PLACES]), key, drawn: 0 }
    }

    /// Whether one more answer may go to the sender with this hash; counts it.
    pub fn may(&mut self, sender: u64, now: Tick) -> bool {
        let each = &mut self.each[(sender >> 32) as usize % PLACES];
        if !each.take(PER_SECOND_EACH, AT_ONCE_EACH, now) || !self.all.take(PER_SECOND, AT_ONCE, now) {
            return false;
        }
        // Now and then an answer costs more than one.
        self.drawn += 1;
        if self.key.draw(self.drawn).is_multiple_of(4) {
            self.all.level = self.all.level.saturating_sub(1000);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sender_gets_its_share_and_leaves_the_rest_to_others() {
        let mut limiter = Limiter::new(HashKey::fixed(), Tick(5));
        let heard = (0..1000).filter(|_| limiter.may(1 << 40, Tick(5))).count();
        assert_eq!(heard, AT_ONCE_EACH as usize);
        assert!(limiter.may(2 << 40, Tick(5)));
        let heard = (0..10_000).filter(|n| limiter.may(1 << 40, Tick(5 + n / 10))).count();
        assert!((15..=21).contains(&heard), "{heard} in a second");
    }

    #[test]
    fn all_together_are_limited_and_the_limit_renews() {
        let mut limiter = Limiter::new(HashKey::fixed(), Tick(0));
        let storm = |limiter: &mut Limiter, now| (0..5000_u64).filter(|n| limiter.may(n << 33, Tick(now))).count();
        assert!((60..=100).contains(&storm(&mut limiter, 0)));
        assert!(storm(&mut limiter, 1) < 5);
        assert!((60..=100).contains(&storm(&mut limiter, 60_000)));
    }
}
