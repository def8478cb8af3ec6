//! Announcements of VIPs on the link (gratuitous ARP, unsolicited NA): each VIP three times, one second apart, a
//! bounded number per turn.

use std::net::IpAddr;

use crate::flow::time::Tick;

/// Announcements of one VIP: one more than ANNOUNCE_NUM of RFC 5227 section 1.1, for failovers.
const ANNOUNCE_NUM: u8 = 3;
/// Interval between the announcements of one VIP.
const ANNOUNCE_INTERVAL_MS: u32 = 1_000;
/// Announcements in one turn, so that ten thousand VIPs do not delay packets.
const MAX_PER_TURN: usize = 16;

/// The pending announcements of one worker.
#[derive(Debug, Default)]
pub struct Announcements {
    vips: Vec<IpAddr>,
    next: usize,
    rounds_left: u8,
    next_round: Tick,
}

impl Announcements {
    /// Starts to announce these VIPs, together with those that earlier calls left unfinished.
    pub fn start(&mut self, mut vips: Vec<IpAddr>, now: Tick) {
        if self.rounds_left > 0 {
            vips.extend(self.vips[self.next..].iter());
            vips.sort_unstable();
            vips.dedup();
        }
        *self = Self { vips, next: 0, rounds_left: ANNOUNCE_NUM, next_round: now };
    }

    /// Whether announcements are pending.
    pub fn is_busy(&self) -> bool {
        self.rounds_left > 0
    }

    /// The VIPs to announce in this turn.
    pub fn due(&mut self, now: Tick) -> &[IpAddr] {
        if self.rounds_left == 0 || !now.reached(self.next_round) {
            return &[];
        }
        let from = self.next;
        let to = (from + MAX_PER_TURN).min(self.vips.len());
        self.next = to;
        if to == self.vips.len() {
            self.next = 0;
            self.rounds_left -= 1;
            self.next_round = now.plus(ANNOUNCE_INTERVAL_MS);
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
        let mut announcements = Announcements::default();
        announcements.start(vips, Tick(0));
        let mut announced = 0;
        for ms in 0..5_000 {
            let turn = announcements.due(Tick(ms)).len();
            assert!(turn <= MAX_PER_TURN);
            announced += turn;
            assert!(announced <= 20 * (1 + ms as usize / 1_000), "too early");
        }
        assert_eq!(announced, 60);
        assert!(!announcements.is_busy());
    }
}
