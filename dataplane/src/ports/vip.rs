//! The SNAT ports of one VIP: what its allocation needs of policy.

use std::sync::Arc;

use super::pool::PortPool;
use super::{BlockId, PortRange};
use crate::flow::ids::VipId;

/// The SNAT ports of one VIP.
#[derive(Clone, Debug)]
pub struct VipPorts {
    /// Its index in the workers' port tables.
    pub id: VipId,
    /// Allocation of its port blocks to workers.
    pub pool: Arc<PortPool>,
    /// Removed from policy, but ports of it are still in use.
    pub retired: bool,
    /// Ports that are never allocated, ascending.
    pub reserved: Box<[u16]>,
    /// Sum of the ports guaranteed to its endpoints.
    pub guaranteed: u32,
}

impl VipPorts {
    /// The part of a port range that all endpoints may use; the rest is kept for those below their guarantee. `None` if
    /// nothing is left.
    #[inline]
    pub fn ordinary(&self, range: PortRange) -> Option<PortRange> {
        match self.guaranteed {
            0 => Some(range),
            // Reserved ports may be among the last ones.
            count => range.without_last(count.saturating_add(self.reserved.len() as u32)),
        }
    }

    /// Bit mask of the reserved ports in `block`.
    #[inline]
    pub fn reserved_mask(&self, block: BlockId) -> u64 {
        let first = block.first_port();
        let (Some(&lowest), Some(&highest)) = (self.reserved.first(), self.reserved.last()) else { return 0 };
        // Most blocks have no reserved ports. One comparison checks both bounds: a single, well-predicted branch.
        let lowest = BlockId::of(lowest).first_port();
        if first.wrapping_sub(lowest) > highest - lowest {
            return 0;
        }
        let from = self.reserved.partition_point(|&port| port < first);
        self.reserved[from..]
            .iter()
            .take_while(|&&port| port - first < 64)
            .fold(0, |mask, &port| mask | 1 << (port - first))
    }
}
