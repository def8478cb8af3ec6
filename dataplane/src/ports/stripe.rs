//! Which ports of a share are given out first: every eighth, and others each time that the share changes hands.
//!
//! A gateway that dies takes with it the sessions that it had told nobody of yet. Their ports look free to whoever stands in for it, but
//! their far sides still take them for connections that live. So whoever gets a share keeps to other ports than those who had it
//! within the last seven changes of who serves. Toward a destination where most of these are in use it takes every fourth port, those of the
//! one before and of the one after not among them; then every second; and then what there is.

use super::BLOCK_PORTS;

/// Stripes that there are.
const STRIPES: u64 = 8;
/// The first port of each eight of a block.
const FIRST: u64 = {
    let (mut ports, mut at) = (0, 0);
    while at < BLOCK_PORTS {
        ports |= 1 << at;
        at += STRIPES as usize;
    }
    ports
};

/// Some ports of every block, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe(u64);

impl Stripe {
    /// All ports: nobody else can have given out any.
    pub const ALL: Self = Self(u64::MAX);

    /// The stripe of whoever gets a share when those who serve have changed so often. Eight changes in a row have different ones.
    pub fn after(serving_changes: u64) -> Self {
        Self(FIRST << (serving_changes % STRIPES))
    }

    /// Twice as many, where these are in use: those are added that are the last to be the turn of others. `None`: it has all.
    pub(super) fn wider(self) -> Option<Self> {
        let turns = u64::BITS / self.0.count_ones();
        (turns > 1).then(|| Self(self.0 | self.0.rotate_left(turns / 2)))
    }

    /// Its ports of any block, as bits.
    #[inline]
    pub(super) fn ports(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_changes_in_a_row_have_ports_of_their_own_and_together_all() {
        for first in [0, 5, u64::MAX - 8] {
            let stripes: Vec<u64> = (first..first + 8).map(|number| Stripe::after(number).ports()).collect();
            assert!(stripes.iter().all(|ports| ports.count_ones() == 8), "{stripes:?}");
            assert_eq!(stripes.iter().fold(0, |all, ports| all | ports), Stripe::ALL.ports());
        }
    }

    #[test]
    fn neighbours_in_the_row_meet_only_where_both_need_more_than_half() {
        for number in 0..8 {
            let widths = |number| std::iter::successors(Some(Stripe::after(number)), |stripe| stripe.wider());
            let counts: Vec<u32> = widths(number).map(|stripe| stripe.ports().count_ones()).collect();
            assert_eq!(counts, [8, 16, 32, 64]);
            assert_eq!(widths(number).last(), Some(Stripe::ALL));
            for (level, apart) in [(0, 7), (1, 3), (2, 1)] {
                for other in number + 1..=number + apart {
                    let [one, two] = [number, other].map(|number| widths(number).nth(level).unwrap().ports());
                    assert_eq!(one & two, 0, "{number} and {other}");
                }
            }
        }
    }
}
