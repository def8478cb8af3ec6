//! Which ports of a share are given out first: every eighth, and others each time that the share changes hands.
//!
//! A gateway that dies takes with it the sessions that it had told nobody of yet. Their ports look free to whoever stands in for it, but
//! their far sides still take them for connections that live. So whoever gets a share keeps to other ports than the last seven that had
//! it, for as long as there are any; only toward a destination where these are in use it takes what there is.

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

    /// The stripe of whoever gets a share by the view with this number. Views that follow each other have different ones.
    pub fn of_view(number: u64) -> Self {
        Self(FIRST << (number % STRIPES))
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
    fn eight_views_in_a_row_have_ports_of_their_own_and_together_all() {
        for first in [0, 5, u64::MAX - 8] {
            let stripes: Vec<u64> = (first..first + 8).map(|number| Stripe::of_view(number).ports()).collect();
            assert!(stripes.iter().all(|ports| ports.count_ones() == 8), "{stripes:?}");
            assert_eq!(stripes.iter().fold(0, |all, ports| all | ports), Stripe::ALL.ports());
        }
    }
}
