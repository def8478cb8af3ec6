//! Telling the network where VIPs are: each one three times, a second apart, a few a turn.

use std::net::IpAddr;

use crate::time::Tick;

/// Announcements of one VIP (RFC 5227 section 1.1 ANNOUNCE_NUM is 2; takeovers are worth one more).
const TIMES: u8 = 3;
/// Between them.
const APART_MS: u32 = 1_000;
/// Announcements in one turn, so that ten thousand VIPs don't hold packets up.
const IN_ONE_TURN: usize = 16;

/// The announcements that one worker still has to make.
#[derive(Debug, Default)]
pub struct Announcer {
    vips: Vec<IpAddr>,
    next: usize,
    left: u8,
    round_began: Tick,
}

impl Announcer {
    /// Begins to announce these VIPs, in place of what was left of earlier ones.
    pub fn begin(&mut self, mut vips: Vec<IpAddr>, now: Tick) {
        if self.left > 0 {
            vips.extend(self.vips[self.next..].iter());
            vips.sort_unstable();
            vips.dedup();
        }
        *self = Self { vips, next: 0, left: TIMES, round_began: now };
    }

    /// Whether something is left to announce.
    pub fn is_busy(&self) -> bool {
        self.left > 0
    }

    /// The VIPs to announce in this turn.
    pub fn turn(&mut self, now: Tick) -> &[IpAddr] {
        if self.left == 0 || !now.reached(self.round_began) {
            return &[];
        }
        let from = self.next;
        let to = (from + IN_ONE_TURN).min(self.vips.len());
        self.next = to;
        if to == self.vips.len() {
            self.next = 0;
            self.left -= 1;
            self.round_began = now.plus(APART_MS);
        }
        &self.vips[from..to]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vip_is_announced_three_times_a_second_apart() {
        let vips: Vec<IpAddr> = (0..20_u8).map(|n| [192, 0, 2, n].into()).collect();
        let mut announcer = Announcer::default();
        announcer.begin(vips, Tick(0));
        let mut heard = 0;
        for ms in 0..5_000 {
            let turn = announcer.turn(Tick(ms)).len();
            assert!(turn <= IN_ONE_TURN);
            heard += turn;
            assert!(heard <= 20 * (1 + ms as usize / 1_000), "too early");
        }
        assert_eq!(heard, 60);
        assert!(!announcer.is_busy());
    }
}
