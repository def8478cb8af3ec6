//! The script for `nft -f` that takes the kernel from one table to another, in one transaction: no packet meets a state
//! in between.

use std::fmt::Write;

use super::table::{Chain, Set, TABLE, Table};

/// The script from one table to another; `None` as the first: whatever the kernel has is replaced. Empty if nothing
/// differs.
pub fn script(old: Option<&Table>, new: &Table) -> String {
    let mut script = Script(String::new());
    let empty = Table::default();
    if old.is_none() {
        // Adding what exists is no error, and deleting what doesn't is one.
        script.line(format_args!("add table {TABLE}"));
        script.line(format_args!("delete table {TABLE}"));
        script.line(format_args!("add table {TABLE}"));
    }
    let old = old.unwrap_or(&empty);
    script.declare(old, new);
    script.change(old, new);
    script.remove(old, new);
    script.0
}

struct Script(String);

impl Script {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String can't fail.
        let _ = writeln!(self.0, "{line}");
    }

    /// Declares what is new, without contents: rules and elements refer to chains and sets.
    fn declare(&mut self, old: &Table, new: &Table) {
        for name in new.counters.difference(&old.counters) {
            self.line(format_args!("add counter {TABLE} {name}"));
        }
        for (name, set) in new.sets.iter().filter(|(name, _)| !old.sets.contains_key(*name)) {
            let flags = if set.is_interval { " flags interval;" } else { "" };
            self.line(format_args!("add set {TABLE} {name} {{ type {};{flags} }}", set.element));
        }
        for (name, map) in new.maps.iter().filter(|(name, _)| !old.maps.contains_key(*name)) {
            self.line(format_args!("add map {TABLE} {name} {{ type {}; }}", map.types));
        }
        for (name, chain) in new.chains.iter().filter(|(name, _)| !old.chains.contains_key(*name)) {
            self.line(format_args!("add chain {TABLE} {name}{}", properties(chain)));
        }
    }

    fn change(&mut self, old: &Table, new: &Table) {
        for (name, set) in &new.sets {
            self.change_set(name, old.sets.get(name), set);
        }
        for (name, map) in &new.maps {
            let before = old.maps.get(name).map(|map| &map.elements);
            let is_other = |key: &String, value: &String| before.is_none_or(|before| before.get(key) != Some(value));
            let stale = before.into_iter().flatten().filter(|(key, value)| map.elements.get(*key) != Some(*value));
            self.elements("delete", name, stale.map(|(key, _)| key.clone()));
            let added = map.elements.iter().filter(|(key, value)| is_other(key, value));
            self.elements("add", name, added.map(|(key, value)| format!("{key} : {value}")));
        }
        for (name, chain) in &new.chains {
            let before = old.chains.get(name);
            if before.is_some_and(|before| before.rules == chain.rules) {
                continue;
            }
            if before.is_some() {
                self.line(format_args!("flush chain {TABLE} {name}"));
            }
            for rule in &chain.rules {
                self.line(format_args!("add rule {TABLE} {name} {rule}"));
            }
        }
    }

    fn change_set(&mut self, name: &str, before: Option<&Set>, set: &Set) {
        let empty = std::collections::BTreeSet::new();
        let before = before.map_or(&empty, |before| &before.elements);
        if *before == set.elements {
            return;
        }
        // Intervals that adjoin one that goes are a trap of some versions of nft.
        if set.is_interval && !before.is_empty() {
            self.line(format_args!("flush set {TABLE} {name}"));
            self.elements("add", name, set.elements.iter().cloned());
        } else {
            self.elements("delete", name, before.difference(&set.elements).cloned());
            self.elements("add", name, set.elements.difference(before).cloned());
        }
    }

    fn elements(&mut self, command: &str, name: &str, elements: impl Iterator<Item = String>) {
        let list: Vec<String> = elements.collect();
        if !list.is_empty() {
            self.line(format_args!("{command} element {TABLE} {name} {{ {} }}", list.join(", ")));
        }
    }

    /// Removes what is gone: rules first, since they refer to other chains and sets.
    fn remove(&mut self, old: &Table, new: &Table) {
        let gone: Vec<&String> = old.chains.keys().filter(|name| !new.chains.contains_key(*name)).collect();
        for name in &gone {
            self.line(format_args!("flush chain {TABLE} {name}"));
        }
        // Their elements refer to chains, too.
        for name in old.maps.keys().filter(|name| !new.maps.contains_key(*name)) {
            self.line(format_args!("delete map {TABLE} {name}"));
        }
        for name in &gone {
            self.line(format_args!("delete chain {TABLE} {name}"));
        }
        for name in old.sets.keys().filter(|name| !new.sets.contains_key(*name)) {
            self.line(format_args!("delete set {TABLE} {name}"));
        }
        for name in old.counters.difference(&new.counters) {
            self.line(format_args!("delete counter {TABLE} {name}"));
        }
    }
}

/// Hook and comment of a chain.
fn properties(chain: &Chain) -> String {
    let hook = chain.hook.map(|hook| format!(" type {hook}; policy accept;")).unwrap_or_default();
    let comment = Some(&chain.comment).filter(|comment| !comment.is_empty());
    let comment = comment.map(|comment| format!(" comment \"{comment}\";")).unwrap_or_default();
    if hook.is_empty() && comment.is_empty() { String::new() } else { format!(" {{{hook}{comment} }}") }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::nft::table::Map;

    /// The kernel's table, as far as scripts change it; each command checks what the kernel would.
    #[derive(Debug, Default)]
    struct Kernel(Option<Table>);

    impl Kernel {
        fn run(&mut self, script: &str) {
            script.lines().for_each(|line| self.command(line));
        }

        fn command(&mut self, line: &str) {
            let (verb, rest) = line.split_once(' ').unwrap();
            let (kind, rest) = rest.split_once(' ').unwrap();
            let rest = rest.strip_prefix(TABLE).unwrap().trim_start();
            if kind == "table" {
                match verb {
                    "add" => drop(self.0.get_or_insert_default()),
                    _ => drop(self.0.take().expect("a table that isn't there can't be deleted")),
                }
                return;
            }
            let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
            let referenced = self.is_referenced(name);
            let table = self.0.as_mut().unwrap();
            match (verb, kind) {
                ("add", "counter") => assert!(table.counters.insert(name.to_owned())),
                ("add", "set") => {
                    let set = Set { element: "x", is_interval: rest.contains("interval"), elements: BTreeSet::new() };
                    assert!(table.sets.insert(name.to_owned(), set).is_none());
                }
                ("add", "map") => {
                    let map = Map { types: "x : verdict", elements: BTreeMap::new() };
                    assert!(table.maps.insert(name.to_owned(), map).is_none());
                }
                ("add", "chain") => assert!(table.chains.insert(name.to_owned(), Chain::default()).is_none()),
                ("add", "rule") => {
                    for target in targets(rest) {
                        assert!(table.chains.contains_key(target), "{line}: no chain {target}");
                    }
                    table.chains.get_mut(name).unwrap().rules.push(rest.to_owned());
                }
                ("flush", "chain") => table.chains.get_mut(name).unwrap().rules.clear(),
                ("flush", "set") => table.sets.get_mut(name).unwrap().elements.clear(),
                (_, "element") => {
                    let list = rest.trim_start_matches("{ ").trim_end_matches(" }");
                    list.split(", ").for_each(|element| change_element(table, verb, name, element));
                }
                ("delete", "chain") => {
                    assert!(!referenced, "{line}: it is still referred to");
                    assert!(table.chains.remove(name).unwrap().rules.is_empty());
                }
                ("delete", "map") => assert!(!referenced && table.maps.remove(name).is_some(), "{line}"),
                ("delete", "set") => assert!(!referenced && table.sets.remove(name).is_some(), "{line}"),
                ("delete", "counter") => assert!(!referenced && table.counters.remove(name), "{line}"),
                _ => panic!("{line}"),
            }
        }

        /// Whether a rule or an element refers to this name.
        fn is_referenced(&self, name: &str) -> bool {
            let table = self.0.as_ref().unwrap();
            let rules = table.chains.values().flat_map(|chain| &chain.rules);
            let verdicts = table.maps.values().flat_map(|map| map.elements.values());
            rules.chain(verdicts).any(|text| text.split([' ', '@', '"']).any(|word| word == name))
        }
    }

    fn targets(rule: &str) -> impl Iterator<Item = &str> {
        rule.split("goto ").skip(1).map(|rest| rest.split(' ').next().unwrap())
    }

    fn change_element(table: &mut Table, verb: &str, name: &str, element: &str) {
        let (key, value) = element.split_once(" : ").unwrap_or((element, ""));
        if let Some(map) = table.maps.get_mut(name) {
            if verb == "delete" {
                assert!(map.elements.remove(key).is_some());
            } else {
                assert!(targets(value).all(|target| table.chains.contains_key(target)), "{element}");
                assert!(map.elements.insert(key.to_owned(), value.to_owned()).is_none());
            }
        } else {
            let set = table.sets.get_mut(name).unwrap();
            assert!(if verb == "delete" { set.elements.remove(key) } else { set.elements.insert(key.to_owned()) });
        }
    }

    /// Tables whose rules and elements refer to chains, sets, maps and counters of their own.
    fn table() -> impl Strategy<Value = Table> {
        let chains = prop::collection::btree_set(0..5_u8, 1..5);
        let contents = prop::collection::vec((0..8_u8, 0..5_u8), 0..12);
        (chains, contents.clone(), contents.clone(), contents, any::<bool>()).prop_map(
            |(chains, set, map, rules, is_interval)| {
                let chains: Vec<String> = chains.into_iter().map(|n| format!("chain{n}")).collect();
                let chain = |n: u8| &chains[usize::from(n) % chains.len()];
                let mut table = Table::default();
                if !set.is_empty() {
                    let elements = set.iter().map(|(n, _)| format!("10.0.0.{n}")).collect();
                    let name = if is_interval { "ranges" } else { "addresses" };
                    table.sets.insert(name.to_owned(), Set { element: "x", is_interval, elements });
                }
                if !map.is_empty() {
                    let elements =
                        map.iter().map(|(n, to)| (format!("10.0.1.{n}"), format!("goto {}", chain(*to)))).collect();
                    table.maps.insert("map".to_owned(), Map { types: "x : verdict", elements });
                }
                for name in &chains {
                    table.chains.insert(name.clone(), Chain::default());
                }
                for (n, to) in rules {
                    let rule = match n {
                        0 if table.maps.contains_key("map") => "ip saddr vmap @map".to_owned(),
                        1 if table.sets.contains_key("ranges") => "ip saddr @ranges drop".to_owned(),
                        2 => {
                            table.counters.insert(format!("count{to}"));
                            format!("counter name \"count{to}\"")
                        }
                        _ => format!("goto {}", chain(to)),
                    };
                    let owner = chain(n).clone();
                    table.chains.get_mut(&owner).unwrap().rules.push(rule);
                }
                table
            },
        )
    }

    proptest! {
        #[test]
        fn scripts_lead_from_any_table_to_any_other_in_an_order_that_the_kernel_permits(
            tables in prop::collection::vec(table(), 1..5),
            is_known in prop::collection::vec(any::<bool>(), 5),
        ) {
            let mut kernel = Kernel::default();
            let mut before: Option<Table> = None;
            for (table, is_known) in tables.into_iter().zip(is_known) {
                // What an earlier process has left is replaced.
                let known = before.as_ref().filter(|_| is_known);
                let text = script(known, &table);
                prop_assert!(known != Some(&table) || text.is_empty());
                kernel.run(&text);
                prop_assert_eq!(kernel.0.as_ref(), Some(&table), "{}", text);
                before = Some(table);
            }
        }
    }
}
