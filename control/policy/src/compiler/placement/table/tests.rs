use std::cell::Cell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use vipgate_coverage::property;

use super::*;

thread_local! {
    /// How often items were compared.
    static COMPARED: Cell<usize> = const { Cell::new(0) };
}

/// An item with a key and a value.
#[derive(Clone, Debug, Eq)]
struct Item(u16, u8);

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        COMPARED.set(COMPARED.get() + 1);
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Keyed for Item {
    type Key = u16;

    fn key(&self) -> &u16 {
        &self.0
    }
}

fn check(table: &Table<Item>, expected: &[Item]) {
    assert!(table.iter().eq(expected), "{table:?}");
    assert_eq!((table.len(), table.is_empty()), (expected.len(), expected.is_empty()));
    assert!(table.chunks().iter().all(|chunk| !chunk.is_empty() && chunk.len() <= 2 * CHUNK));
    for item in expected {
        assert_eq!(table.get(&item.0), Some(item));
    }
    assert_eq!(table.get(&5000), None);
}

/// The items of `new` as the differences from `old` give them, and the keys of the removed ones.
fn rebuilt(old: &Table<Item>, new: &Table<Item>) -> (Vec<Item>, Vec<u16>) {
    let mut items: BTreeMap<u16, Item> = old.iter().map(|item| (item.0, item.clone())).collect();
    let mut removed = Vec::new();
    differences(old, new, |key, item| {
        if let Some(item) = item {
            assert_ne!(items.insert(*key, item.clone()).as_ref(), Some(item), "it is the same");
        } else {
            assert!(items.remove(key).is_some());
            removed.push(*key);
        }
    });
    (items.into_values().collect(), removed)
}

/// The number of chunks that both have.
fn shared(old: &Table<Item>, new: &Table<Item>) -> usize {
    new.chunks().iter().filter(|chunk| old.chunks().iter().any(|it| Arc::ptr_eq(it, chunk))).count()
}

#[test]
fn an_edited_table_equals_a_new_one_and_shares_what_stays() {
    let step = || {
        prop_oneof![
            4 => prop::collection::btree_map(0..4000_u16, any::<Option<u8>>(), 0..4),
            1 => prop::collection::btree_map(0..4000_u16, any::<Option<u8>>(), 500..2000),
            1 => Just((0..4000).map(|key| (key, None)).collect()),
            1 => (0..4000_u16, 1..1500_u16).prop_map(|(from, count)| (from..(from + count).min(4000)).map(|key| (key, None)).collect()),
        ]
    };
    let steps = prop::collection::vec(step(), 1..12);
    let classes = ["shared chunk", "no difference", "empty", "removed"];
    property(ProptestConfig::with_cases(64), &(0..3000_u16, steps), &classes, |(count, steps), coverage| {
        let mut model: BTreeMap<u16, u8> = (0..count).map(|key| (key, 0)).collect();
        let mut table: Table<Item> = model.iter().map(|(key, value)| Item(*key, *value)).collect();
        for step in steps {
            let removed: Vec<&u16> = step.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| key).collect();
            let inserted = step.iter().filter_map(|(key, value)| Some(Item(*key, (*value)? % 3))).collect();
            let edited = table.edit(&removed, inserted);
            for (key, value) in &step {
                match value {
                    Some(value) => drop(model.insert(*key, value % 3)),
                    None => drop(model.remove(key)),
                }
            }
            let expected: Vec<Item> = model.iter().map(|(key, value)| Item(*key, *value)).collect();
            check(&edited, &expected);
            prop_assert_eq!(&edited, &expected.clone().into());
            prop_assert_eq!(&table.replaced(expected.clone()), &edited);
            let (items, gone) = rebuilt(&table, &edited);
            prop_assert_eq!(items, expected);
            prop_assert!(
                table.iter().filter(|item| !model.contains_key(&item.0)).map(|item| item.0).eq(gone.iter().copied())
            );
            coverage.add("shared chunk", shared(&table, &edited) as u64);
            coverage.add("removed", gone.len() as u64);
            coverage.add("no difference", u64::from(table == edited));
            coverage.add("empty", u64::from(edited.is_empty()));
            table = edited;
        }
        Ok(())
    });
}

#[test]
fn a_changed_item_replaces_one_chunk() {
    let table: Table<Item> = (0..4000).map(|key| Item(key, 0)).collect();
    let edited = table.edit(&[], vec![Item(2000, 1)]);
    assert_eq!((table.chunks().len(), edited.chunks().len(), shared(&table, &edited)), (32, 32, 31));
    let mut differing = Vec::new();
    COMPARED.set(0);
    differences(&table, &edited, |key, item| differing.push((*key, item.is_some())));
    assert_eq!((COMPARED.get(), differing), (CHUNK, vec![(2000, true)]), "items of one chunk are compared");
    assert!(edited.skip_before(|key| *key < 2000).eq(edited.iter().skip(2000)));
    assert_eq!(edited.skip_before(|_| true).next(), None);
    let same = table.edit(&[&9999], vec![Item(2000, 0)]);
    assert!(same.chunks().iter().zip(table.chunks()).all(|(a, b)| Arc::ptr_eq(a, b)));
}
