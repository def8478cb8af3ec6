//! Counters of the table that go on counting when the table is created anew.

use std::collections::BTreeMap;

use crate::kernel::Counter;

/// Named counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// As the kernel had them last.
    last: BTreeMap<String, Counter>,
    totals: BTreeMap<String, Counter>,
}

impl Counters {
    /// Adds what the kernel has counted since the last time. One that has become less was created anew.
    pub(super) fn update(&mut self, now: BTreeMap<String, Counter>) {
        for (name, counter) in &now {
            let last = self.last.get(name).copied().filter(|last| last.packets <= counter.packets).unwrap_or_default();
            let total = self.totals.entry(name.clone()).or_default();
            total.packets += counter.packets - last.packets;
            total.bytes += counter.bytes.saturating_sub(last.bytes);
        }
        self.totals.retain(|name, _| now.contains_key(name));
        self.last = now;
    }

    /// All that was counted.
    pub(super) fn totals(&self) -> &BTreeMap<String, Counter> {
        &self.totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_begins_anew_goes_on_counting() {
        let at = |packets| BTreeMap::from([("guard".to_owned(), Counter { packets, bytes: packets * 100 })]);
        let mut counters = Counters::default();
        let totals = [5, 7, 7, 2, 3].map(|packets| {
            counters.update(at(packets));
            counters.totals()["guard"].packets
        });
        assert_eq!(totals, [5, 7, 7, 9, 10]);
        assert_eq!(counters.totals()["guard"].bytes, 1000);
        counters.update(BTreeMap::new());
        assert!(counters.totals().is_empty());
    }
}
