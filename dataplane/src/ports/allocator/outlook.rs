//! What asking for a port would come to, without taking one: for those who want to know why, see [`crate::explain`].

use super::{Allocator, Claim, Part};
use crate::ports::choice::{Choice, Of};
use crate::ports::{BLOCKS, BlockId, Stripe};
use crate::snapshot::policy::Vip;

/// Ports that one look asks for at most: 64 blocks, some hundred microseconds.
const MOST_LOOKS: u32 = 4096;

/// What asking for a port would come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// There is a free one.
    Free,
    /// There is none.
    Exhausted,
    /// Nearly all of them are in use; whether one is free takes longer to find out than packets can wait.
    Crowded,
}

impl Allocator {
    /// What [`Allocator::allocate`] would come to.
    pub fn outlook(
        &self,
        (vip, part): (&Vip, Option<Part<'_>>),
        claim: Claim,
        is_free: impl Fn(u16) -> bool,
    ) -> Outlook {
        let range = match claim {
            Claim::Guaranteed => Some(self.range),
            Claim::Ordinary => vip.ordinary(self.range),
        };
        let Some(range) = range else { return Outlook::Exhausted };
        let blocks = part.unwrap_or(Part::ALL).blocks;
        let owned = &self.holdings[usize::from(vip.id.0)].owned;
        let choice = Choice { owned, of: Of { vip, blocks, range, stripe: Stripe::ALL }, random: 0 };
        let mut looks = 0;
        // What nobody has, it could take.
        let could_have = |block: &BlockId| {
            blocks.contains(*block) && (owned.contains(*block) || vip.pool.owner(block.first_port()).is_none())
        };
        for block in (0..BLOCKS).map(BlockId::at).filter(could_have) {
            let mut usable = choice.usable(block);
            while usable != 0 {
                if is_free(block.first_port() + usable.trailing_zeros() as u16) {
                    return Outlook::Free;
                }
                looks += 1;
                if looks == MOST_LOOKS {
                    return Outlook::Crowded;
                }
                usable &= usable - 1;
            }
        }
        Outlook::Exhausted
    }
}
