//! Attempts to link that failed: which of them an operator should read of. While gateways start, one of them may know the other before the
//! view that names it has come there, so what passes by itself within seconds is no warning; what stays is one, once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::frame::Broken;

/// A failure is a warning when attempts still fail after this long.
const GRACE: Duration = Duration::from_secs(3);
/// After so long without a failure, the next one is the first again.
const OVER: Duration = Duration::from_secs(10);
/// Gateways and addresses of which something is remembered.
const MOST: usize = 256;

/// With whom attempts fail.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum With {
    /// A gateway of the view.
    Gateway(Arc<str>),
    /// Somebody at this address.
    Stranger(IpAddr),
}

#[derive(Debug)]
struct Trouble {
    since: Instant,
    last: Instant,
    /// What was warned of last.
    said: Option<Broken>,
}

/// All attempts that failed not long ago.
#[derive(Debug, Default)]
pub(super) struct Troubles(HashMap<With, Trouble>);

impl Troubles {
    /// An attempt has failed, or a link has ended (`was_linked`); whether that is a warning now.
    pub(super) fn failed(&mut self, with: With, was_linked: bool, why: &Broken, now: Instant) -> bool {
        if self.0.len() >= MOST && !self.0.contains_key(&with) {
            self.0.clear();
        }
        let new = Trouble { since: now, last: now, said: None };
        let trouble = self.0.entry(with).or_insert(new);
        if was_linked || now.duration_since(trouble.last) >= OVER {
            *trouble = Trouble { since: now, last: now, said: None };
        }
        trouble.last = now;
        let counts = was_linked || now.duration_since(trouble.since) >= GRACE;
        counts && trouble.said.replace(why.clone()).as_ref() != Some(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(begun: Instant, ms: u64) -> Instant {
        begun + Duration::from_millis(ms)
    }

    #[test]
    fn what_passes_while_gateways_start_is_no_warning_and_what_stays_is_one() {
        let (mut troubles, begun) = (Troubles::default(), Instant::now());
        let b = || With::Gateway("b".into());
        let denied = Broken::Connection("AccessDenied".to_owned());
        let warned: Vec<u64> =
            (0..100).map(|n| n * 100).filter(|ms| troubles.failed(b(), false, &denied, at(begun, *ms))).collect();
        assert_eq!(warned, [3_000], "once, when it stays");
        assert!(troubles.failed(b(), false, &Broken::Unpinned, at(begun, 10_000)), "another reason");
        assert!(!troubles.failed(With::Gateway("c".into()), false, &denied, at(begun, 10_000)), "another gateway");
        assert!(!troubles.failed(b(), false, &denied, at(begun, 60_000)), "long after the last one: a start again");
    }

    #[test]
    fn a_link_that_ends_is_a_warning_at_once() {
        let (mut troubles, begun) = (Troubles::default(), Instant::now());
        let (b, why) = (|| With::Gateway("b".into()), Broken::Stuck);
        assert!(!troubles.failed(b(), false, &why, begun));
        assert!(troubles.failed(b(), true, &why, at(begun, 1)));
        assert!(!troubles.failed(b(), false, &why, at(begun, 100)), "it is said already");
        assert!(!troubles.failed(b(), false, &Broken::Unpinned, at(begun, 200)), "and passes, perhaps");
        assert!(troubles.failed(b(), false, &Broken::Unpinned, at(begun, 3_100)));
    }

    #[test]
    fn strangers_take_no_room_without_end() {
        let (mut troubles, now) = (Troubles::default(), Instant::now());
        for n in 0..10_000_u32 {
            troubles.failed(With::Stranger(IpAddr::V4(n.into())), false, &Broken::Unpinned, now);
        }
        assert!(troubles.0.len() <= MOST);
    }
}
