use proptest::prelude::*;
use vipgate_coverage::property;

use super::*;

/// An item with a key and a value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Item(u16, u8);

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
fn rebuilt(old: &Table<Item>, new: &Table<Item>) -> (Vec<Item>, Vec<u16>, usize) {
    let (mut items, mut removed, mut shared) = (Vec::new(), Vec::new(), 0);
    differences(old, new, |_, difference| match difference {
        Difference::Shared(chunk) => {
            shared += 1;
            items.extend(old.chunks()[chunk].iter().cloned());
        }
        Difference::Kept((chunk, at)) => items.push(old.chunks()[chunk][at].clone()),
        Difference::Changed(item, (chunk, at)) => {
            assert!(old.chunks()[chunk][at].0 == item.0 && old.chunks()[chunk][at] != *item);
            items.push(item.clone());
        }
        Difference::Added(item) => {
            assert_eq!(old.get(&item.0), None);
            items.push(item.clone());
        }
        Difference::Removed((chunk, at)) => removed.push(old.chunks()[chunk][at].0),
    });
    (items, removed, shared)
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
        let mut model: std::collections::BTreeMap<u16, u8> = (0..count).map(|key| (key, 0)).collect();
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
            let (items, gone, shared) = rebuilt(&table, &edited);
            prop_assert_eq!(items, expected);
            prop_assert!(
                table.iter().filter(|item| !model.contains_key(&item.0)).map(|item| item.0).eq(gone.iter().copied())
            );
            coverage.add("shared chunk", shared as u64);
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
    let shared = edited.chunks().iter().filter(|chunk| table.chunks().iter().any(|it| Arc::ptr_eq(it, chunk))).count();
    assert_eq!((table.chunks().len(), edited.chunks().len(), shared), (32, 32, 31));
    assert_eq!(rebuilt(&table, &edited).2, 31);
    let same = table.edit(&[&9999], vec![Item(2000, 0)]);
    assert!(same.chunks().iter().zip(table.chunks()).all(|(a, b)| Arc::ptr_eq(a, b)));
}
