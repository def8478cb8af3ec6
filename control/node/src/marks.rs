//! Packet marks: the bits of a packet's mark, and of its connection's, that say how it is routed. All other bits belong
//! to others: Antrea has 0xff, AWS' CNI 0x80 of it, the plugin portmap 0x2000, kube-proxy 0xc000, Calico 0xffff0000.
//! [`crate::mark_users`] finds other rules that use these bits nevertheless.

use std::fmt;

/// The default mask: bits 8 to 12, so up to 29 gateways. In the low half, which Calico leaves alone, they are all that the
/// others don't use.
pub const DEFAULT_MASK: u32 = 0x1f00;
/// Values at the end of the range that are no gateways.
const RESERVED: u32 = 2;

/// How a packet is routed other than without vipgate, where no bit is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Into the tunnel to a gateway.
    Gateway(GatewayIndex),
    /// ICMP unreachable: there is no gateway.
    Unreachable,
    /// To the agent, until the pod's policy is known.
    Hold,
}

/// Number of a gateway on this node, from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayIndex(pub u32);

/// The bits that belong to vipgate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkMask(u32);

impl Default for MarkMask {
    fn default() -> Self {
        Self(DEFAULT_MASK)
    }
}

impl MarkMask {
    /// Checks a mask.
    ///
    /// # Errors
    /// Its bits aren't adjacent, or it has fewer than three.
    pub fn new(mask: u32) -> Result<Self, &'static str> {
        if mask.count_ones() < 3 {
            return Err("at least 3 bits are needed: three values have other meanings, and each gateway needs one");
        }
        let low = mask >> mask.trailing_zeros();
        if low & low.wrapping_add(1) != 0 {
            return Err("its bits aren't adjacent");
        }
        Ok(Self(mask))
    }

    /// The mask itself.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// How many gateways can be distinguished.
    pub fn max_gateways(self) -> u32 {
        self.max_value() - RESERVED
    }

    fn max_value(self) -> u32 {
        self.0 >> self.0.trailing_zeros()
    }

    /// The mark of an action, within the mask; never 0.
    pub fn mark(self, action: Action) -> u32 {
        let value = match action {
            Action::Gateway(GatewayIndex(index)) => index,
            Action::Unreachable => self.max_value() - 1,
            Action::Hold => self.max_value(),
        };
        value << self.0.trailing_zeros()
    }
}

/// Where routing rules and tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingNumbers {
    /// Priority of the first rule; the next two are used, too.
    pub rule_priority: u32,
    /// The routing table of held packets; that of gateway N is N higher.
    pub first_table: u32,
}

impl RoutingNumbers {
    /// The routing table of a gateway.
    pub fn table(self, index: GatewayIndex) -> u32 {
        self.first_table + index.0
    }
}

impl fmt::Display for MarkMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_distinct_and_within_the_mask() {
        for mask in [DEFAULT_MASK, 0x7, 0xe000_0000, u32::MAX] {
            let mask = MarkMask::new(mask).unwrap();
            let gateways = (1..=mask.max_gateways().min(70)).map(|index| Action::Gateway(GatewayIndex(index)));
            let last = Action::Gateway(GatewayIndex(mask.max_gateways()));
            let actions = gateways.chain([last, Action::Unreachable, Action::Hold]);
            let mut by_mark = std::collections::BTreeMap::new();
            for action in actions {
                let mark = mask.mark(action);
                assert!(mark != 0 && mark & !mask.bits() == 0, "{action:?}: {mark:#x}");
                assert!(by_mark.insert(mark, action).is_none_or(|other| other == action), "{action:?}");
            }
        }
        assert_eq!(MarkMask::default().max_gateways(), 29);
    }

    #[test]
    fn the_default_leaves_the_bits_of_others_alone() {
        // As far as they leave routing to the kernel: docs/nodes.md.
        let others = [
            ("Antrea", 0xff),
            ("AWS VPC CNI", 0x80),
            ("portmap", 0x2000),
            ("kube-proxy", 0xc000),
            ("kube-router", 0x3_0000),
            ("Weave Net", 0x6_0000),
            ("Tailscale", 0xff_0000),
            ("Calico", 0xffff_0000),
        ];
        for (name, bits) in others {
            assert_eq!(DEFAULT_MASK & bits, 0, "{name}");
        }
    }

    #[test]
    fn masks_with_gaps_or_too_few_bits_are_rejected() {
        assert_eq!(MarkMask::new(0x3f10), Err("its bits aren't adjacent"));
        for narrow in [0, 1, 0x300] {
            assert!(MarkMask::new(narrow).is_err_and(|reason| reason.starts_with("at least 3 bits")));
        }
    }
}
