//! Numbers of gateways on this node. Connection marks contain them, so a number stays with its gateway, also over
//! restarts of the agent, and isn't given to another one soon.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::marks::GatewayIndex;

/// The numbers of gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Indices {
    by_name: BTreeMap<Arc<str>, GatewayIndex>,
    /// The number that was allocated last.
    last: u32,
}

impl Indices {
    /// Numbers from an earlier process.
    pub fn restored(numbers: impl IntoIterator<Item = (Arc<str>, GatewayIndex)>) -> Self {
        let by_name: BTreeMap<_, _> = numbers.into_iter().collect();
        let last = by_name.values().map(|index| index.0).max().unwrap_or_default();
        Self { by_name, last }
    }

    /// The numbers, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, GatewayIndex)> {
        self.by_name.iter().map(|(name, index)| (name, *index))
    }

    /// Frees the numbers of other gateways.
    pub fn retain<'a>(&mut self, gateways: impl Iterator<Item = &'a str>) {
        let kept: std::collections::BTreeSet<&str> = gateways.collect();
        self.by_name.retain(|name, _| kept.contains(&**name));
    }

    /// The number of a gateway; a new one is the next free one after the last that was allocated. `None`: all are in use.
    pub fn allocate(&mut self, gateway: &Arc<str>, max: u32) -> Option<GatewayIndex> {
        // One from an earlier process may be too high for a mask that has become narrower.
        if let Some(index) = self.by_name.get(gateway).filter(|index| index.0 <= max) {
            return Some(*index);
        }
        let next = (0..max).map(|step| GatewayIndex((self.last + step) % max + 1));
        let index = next.into_iter().find(|index| !self.by_name.values().any(|other| other == index))?;
        self.last = index.0;
        self.by_name.insert(gateway.clone(), index);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stays_with_its_gateway_and_is_reused_last() {
        let mut indices = Indices::default();
        let [a, b, c, d]: [Arc<str>; 4] = ["a", "b", "c", "d"].map(Arc::from);
        assert_eq!(indices.allocate(&a, 3), Some(GatewayIndex(1)));
        assert_eq!(indices.allocate(&b, 3), Some(GatewayIndex(2)));
        indices.retain(["b"].into_iter());
        assert_eq!(indices.allocate(&c, 3), Some(GatewayIndex(3)));
        assert_eq!(indices.allocate(&d, 3), Some(GatewayIndex(1)));
        assert_eq!(indices.allocate(&a, 3), None);
        assert_eq!(indices.allocate(&b, 3), Some(GatewayIndex(2)));
        let numbers: Vec<_> = indices.iter().map(|(name, index)| (name.clone(), index)).collect();
        let mut restored = Indices::restored(numbers);
        assert_eq!(restored.allocate(&c, 3), Some(GatewayIndex(3)));
        restored.retain(["c"].into_iter());
        assert_eq!(restored.allocate(&a, 3), Some(GatewayIndex(1)));
    }

    #[test]
    fn a_number_that_the_mask_has_no_value_for_is_replaced() {
        let [a, b, c]: [Arc<str>; 3] = ["a", "b", "c"].map(Arc::from);
        let mut indices = Indices::restored([(a.clone(), GatewayIndex(40)), (b.clone(), GatewayIndex(2))]);
        assert_eq!(indices.allocate(&b, 2), Some(GatewayIndex(2)));
        assert_eq!(indices.allocate(&a, 2), Some(GatewayIndex(1)));
        assert_eq!(indices.allocate(&a, 2), Some(GatewayIndex(1)));
        assert_eq!(indices.allocate(&c, 2), None);
    }
}
