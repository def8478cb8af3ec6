//! Port availability: the result that an allocation would have, without allocating, for [`crate::stage::trace`].

use super::{AllocationClass, Allocator, PortShard};
use crate::ports::selection::{Candidates, Selection};
use crate::ports::vip::VipPorts;
use crate::ports::{BLOCKS, BlockId, Stripe};

/// Maximum lookups of one query: 64 blocks, some hundred microseconds.
const MAX_LOOKUPS: u32 = 4096;

/// Result that an allocation would have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// A port is free.
    Available,
    /// No port is free.
    Exhausted,
    /// Nearly all ports are in use; a full search would delay packets for too long.
    NearlyExhausted,
}

impl Allocator {
    /// Result that [`Allocator::allocate`] would have.
    pub fn availability(
        &self,
        (vip, part): (&VipPorts, PortShard<'_>),
        claim: AllocationClass,
        is_free: impl Fn(u16) -> bool,
    ) -> Availability {
        let range = match claim {
            AllocationClass::Guaranteed => Some(self.range),
            AllocationClass::Ordinary => vip.ordinary(self.range),
        };
        let Some(range) = range else { return Availability::Exhausted };
        let blocks = part.blocks;
        let owned = &self.holdings[usize::from(vip.id.0)].owned;
        let choice = Selection { owned, candidates: Candidates { vip, blocks, range, stripe: Stripe::ALL }, random: 0 };
        let mut lookups = 0;
        // It could claim a block without owner.
        let is_candidate = |block: &BlockId| {
            blocks.contains(*block) && (owned.contains(*block) || vip.pool.owner(block.first_port()).is_none())
        };
        for block in (0..BLOCKS).map(BlockId::at).filter(is_candidate) {
            let mut usable = choice.usable(block);
            while usable != 0 {
                if is_free(block.first_port() + usable.trailing_zeros() as u16) {
                    return Availability::Available;
                }
                lookups += 1;
                if lookups == MAX_LOOKUPS {
                    return Availability::NearlyExhausted;
                }
                usable &= usable - 1;
            }
        }
        Availability::Exhausted
    }
}
