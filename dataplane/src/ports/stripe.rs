//! Port stripes: which ports of a shard are allocated first. Each stripe is every eighth port, and each new owner of a
//! shard gets another stripe.
//!
//! When a gateway fails, its sessions that are not replicated yet are lost. Their ports look free to the shard's new
//! owner, but the remotes still have these connections. So the new owner uses other ports than the owners within the
//! last seven changes of the active members. Toward a destination where most of these are in use it uses every fourth
//! port, not those of the stripes directly before and after; then every second; and then all.

use super::BLOCK_PORTS;

/// Number of stripes.
const STRIPES: u64 = 8;
/// The first of each eight ports of a block.
const FIRST: u64 = {
    let (mut ports, mut at) = (0, 0);
    while at < BLOCK_PORTS {
        ports |= 1 << at;
        at += STRIPES as usize;
    }
    ports
};

/// A subset of the ports of every block, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe(u64);

impl Stripe {
    /// All ports: no other gateway can have allocated any.
    pub const ALL: Self = Self(u64::MAX);

    /// Stripe of a shard's owner after this number of changes of the active members. Eight consecutive numbers have
    /// different stripes.
    pub fn for_epoch(membership_changes: u64) -> Self {
        Self(FIRST << (membership_changes % STRIPES))
    }

    /// A stripe with twice as many ports: it adds those whose own turn is the furthest away. `None` if it has all.
    pub(super) fn widened(self) -> Option<Self> {
        let turns = u64::BITS / self.0.count_ones();
        (turns > 1).then(|| Self(self.0 | self.0.rotate_left(turns / 2)))
    }

    /// Its ports in each block, as bits.
    #[inline]
    pub(super) fn ports(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_consecutive_stripes_are_disjoint_and_cover_all_ports() {
        for first in [0, 5, u64::MAX - 8] {
            let stripes: Vec<u64> = (first..first + 8).map(|number| Stripe::for_epoch(number).ports()).collect();
            assert!(stripes.iter().all(|ports| ports.count_ones() == 8), "{stripes:?}");
            assert_eq!(stripes.iter().fold(0, |all, ports| all | ports), Stripe::ALL.ports());
        }
    }

    #[test]
    fn widened_stripes_of_nearby_epochs_stay_disjoint_up_to_half_of_the_ports() {
        for number in 0..8 {
            let widths = |number| std::iter::successors(Some(Stripe::for_epoch(number)), |stripe| stripe.widened());
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
