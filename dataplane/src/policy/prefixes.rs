//! Longest-prefix match on an immutable set of prefixes, flattened into disjoint ranges.
//!
//! A lookup is one binary search in an array of addresses, without a trie walk; building costs a sort.

use crate::flow::address::Address;

/// A set of prefixes, each with a value.
#[derive(Clone, Debug)]
pub struct Prefixes<A, T> {
    /// First address of each range, ascending; the first is the family's lowest.
    starts: Box<[A]>,
    /// The value from there to the next start.
    values: Box<[Option<T>]>,
}

impl<A: Address, T: Copy + PartialEq> Prefixes<A, T> {
    /// Builds a set from (first address, length, value). Of equal prefixes, the first one wins.
    pub fn new(prefixes: impl IntoIterator<Item = (A, u8, T)>) -> Self {
        let mut sorted: Vec<(A, u8, T)> = prefixes.into_iter().collect();
        sorted.sort_by_key(|&(first, length, _)| (first, length));
        sorted.dedup_by_key(|&mut (first, length, _)| (first, length));
        let mut layout = Layout { starts: vec![A::default()], values: vec![None] };
        // The prefixes that enclose the current position, outermost first.
        let mut open: Vec<(A, Option<T>)> = vec![(A::MAX, None)];
        for (first, length, value) in sorted {
            layout.close_before(&mut open, Some(first));
            layout.push(first, Some(value));
            open.push((first.last_of_prefix(length), Some(value)));
        }
        layout.close_before(&mut open, None);
        Self { starts: layout.starts.into(), values: layout.values.into() }
    }

    /// The value of the longest prefix that covers `address`.
    #[inline]
    pub fn find(&self, address: A) -> Option<T> {
        let after = self.starts.partition_point(|&start| start <= address);
        self.values[after - 1]
    }

    /// Number of ranges.
    pub fn ranges(&self) -> usize {
        self.starts.len()
    }
}

struct Layout<A, T> {
    starts: Vec<A>,
    values: Vec<Option<T>>,
}

impl<A: Address, T: Copy + PartialEq> Layout<A, T> {
    /// Closes every open prefix that ends before `next`: after its end the enclosing one applies again.
    fn close_before(&mut self, open: &mut Vec<(A, Option<T>)>, next: Option<A>) {
        while let [.., (_, outer), (last, _)] = open[..] {
            if next.is_some_and(|next| next <= last) {
                break;
            }
            if let Some(behind) = last.next() {
                self.push(behind, outer);
            }
            open.pop();
        }
    }

    fn push(&mut self, start: A, value: Option<T>) {
        if self.starts.last() == Some(&start) {
            self.values.pop();
            self.starts.pop();
        }
        if self.values.last() == Some(&value) {
            return;
        }
        self.starts.push(start);
        self.values.push(value);
    }
}

/// A prefix with its value, if it is of this family.
pub(super) fn prefix<A: Address, T>(net: &ipnet::IpNet, value: T) -> Option<(A, u8, T)> {
    Some((A::from_ip(net.network())?, net.prefix_len(), value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::flow::address::V6;

    #[test]
    fn the_longest_prefix_wins_and_the_outer_one_applies_after_it() {
        let set = Prefixes::new([(0, 0, 'd'), (0x0a00_0000, 8, 'a'), (0x0a01_0000, 16, 'b'), (0x0a01_0203, 32, 'c')]);
        assert_eq!(set.find(0x0900_0000), Some('d'));
        assert_eq!(set.find(0x0a00_0000), Some('a'));
        assert_eq!(set.find(0x0a01_0202), Some('b'));
        assert_eq!(set.find(0x0a01_0203), Some('c'));
        assert_eq!(set.find(0x0a01_0204), Some('b'));
        assert_eq!(set.find(0x0a02_0000), Some('a'));
        assert_eq!(set.find(u32::MAX), Some('d'));
    }

    #[test]
    fn an_empty_set_matches_nothing_and_a_host_prefix_can_be_the_last_address() {
        let none = Prefixes::<u32, u8>::new([]);
        assert_eq!((none.find(0), none.find(u32::MAX)), (None, None));
        let top = Prefixes::new([(V6::MAX, 128, 1)]);
        assert_eq!((top.find(V6::MAX), top.find(V6::default())), (Some(1), None));
    }

    proptest! {
        #[test]
        fn it_agrees_with_trying_every_prefix(
            set in prop::collection::vec((any::<u32>(), 0_u8..=32), 0..40),
            probes in prop::collection::vec(any::<u32>(), 1..40),
        ) {
            let prefixes: Vec<(u32, u8, usize)> = set.iter().enumerate()
                .map(|(i, &(address, length))| (address & !u32::MAX.checked_shr(length.into()).unwrap_or(0), length, i))
                .collect();
            let built = Prefixes::new(prefixes.iter().copied());
            let edges = prefixes.iter().flat_map(|&(first, length, _)| {
                let last = first.last_of_prefix(length);
                [first, last, first.wrapping_sub(1), last.wrapping_add(1)]
            });
            for probe in probes.iter().copied().chain(edges) {
                let expected = prefixes.iter()
                    .filter(|&&(first, length, _)| first <= probe && probe <= first.last_of_prefix(length))
                    .rev().max_by_key(|&&(_, length, _)| length).map(|&(_, _, i)| i);
                // Of equal prefixes the first wins; `rev` compensates for `max_by_key`, which returns the last.
                prop_assert_eq!(built.find(probe), expected, "address {:#x}", probe);
            }
        }
    }
}
