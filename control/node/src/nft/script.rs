//! The scripts for `nft -f` that take the kernel from one table to another. A script is a transaction, but a packet may be
//! under way while it commits: it meets the chain that it is in as it was, and elements, and chains that begin after it,
//! as they become. So no element leads to a chain of the same transaction, which would be empty for such a packet, and a
//! table is changed where it is, since the chains of a deleted one run on for a moment without the elements of their maps.

use std::fmt::Write;

use super::table::{Chain, Map, Set, TABLE, Table};

/// What the kernel has.
#[derive(Clone, Copy, Debug)]
pub enum Before<'a> {
    /// This table.
    Exactly(&'a Table),
    /// Objects with these names and properties; what they contain isn't known.
    Objects(&'a Table),
}

/// The change of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The first transaction: adds what is new and what nothing leads to yet. Empty if there is nothing.
    pub prepare: String,
    /// The second one: changes what is there, and removes the rest. Empty if nothing differs.
    pub switch: String,
}

/// The change from what the kernel has.
pub fn change(before: Before<'_>, new: &Table) -> Change {
    let (Before::Exactly(old) | Before::Objects(old)) = before;
    let is_known = matches!(before, Before::Exactly(_));
    let [mut prepare, mut switch] = [Script(String::new()), Script(String::new())];
    prepare.add(old, new);
    switch.change(old, new, is_known);
    switch.remove(old, new);
    Change { prepare: prepare.0, switch: switch.0 }
}

/// The script that replaces whatever table the kernel has. Packets that are under way may leave unsteered if it has one.
pub fn replacement(new: &Table) -> String {
    // Adding what exists is no error, and deleting what doesn't is one.
    let mut script = format!("add table {TABLE}\ndelete table {TABLE}\nadd table {TABLE}\n");
    let Change { prepare, switch } = change(Before::Exactly(&Table::default()), new);
    script.extend([prepare, switch]);
    script
}

struct Script(String);

impl Script {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String can't fail.
        let _ = writeln!(self.0, "{line}");
    }

    /// Adds what is new, but base chains: declared first, since rules and elements refer to chains, sets and maps.
    fn add(&mut self, old: &Table, new: &Table) {
        let sets = || new.sets.iter().filter(|(name, _)| !old.sets.contains_key(*name));
        let maps = || new.maps.iter().filter(|(name, _)| !old.maps.contains_key(*name));
        let is_new = |(name, chain): &(&String, &Chain)| chain.hook.is_none() && !old.chains.contains_key(*name);
        let chains = || new.chains.iter().filter(is_new);
        for name in new.counters.difference(&old.counters) {
            self.line(format_args!("add counter {TABLE} {name}"));
        }
        for (name, set) in sets() {
            let flags = if set.is_interval { " flags interval;" } else { "" };
            self.line(format_args!("add set {TABLE} {name} {{ type {};{flags} }}", set.element));
        }
        for (name, map) in maps() {
            self.line(format_args!("add map {TABLE} {name} {{ type {}; }}", map.types));
        }
        for (name, chain) in chains() {
            self.line(format_args!("add chain {TABLE} {name}{}", properties(chain)));
        }
        sets().for_each(|(name, set)| self.elements("add", name, set.elements.iter().cloned()));
        chains().for_each(|(name, chain)| self.rules(name, chain));
        maps().for_each(|(name, map)| self.map_elements("add", name, map.elements.iter()));
    }

    /// Changes what is there, and adds base chains.
    fn change(&mut self, old: &Table, new: &Table, is_known: bool) {
        for (name, set) in &new.sets {
            if let Some(before) = old.sets.get(name) {
                self.change_set(name, is_known.then_some(before), set);
            }
        }
        for (name, map) in &new.maps {
            if let Some(before) = old.maps.get(name) {
                self.change_map(name, is_known.then_some(before), map);
            }
        }
        for (name, chain) in &new.chains {
            match old.chains.get(name) {
                None if chain.hook.is_none() => {}
                None => {
                    self.line(format_args!("add chain {TABLE} {name}{}", properties(chain)));
                    self.rules(name, chain);
                }
                Some(before) if is_known && before.rules == chain.rules => {}
                Some(_) => {
                    self.line(format_args!("flush chain {TABLE} {name}"));
                    self.rules(name, chain);
                }
            }
        }
    }

    fn change_set(&mut self, name: &str, before: Option<&Set>, set: &Set) {
        match before.map(|before| &before.elements) {
            Some(before) if *before == set.elements => {}
            // Intervals that adjoin one that goes are a trap of some versions of nft.
            Some(before) if before.is_empty() || !set.is_interval => {
                self.elements("delete", name, before.difference(&set.elements).cloned());
                self.elements("add", name, set.elements.difference(before).cloned());
            }
            _ => {
                self.line(format_args!("flush set {TABLE} {name}"));
                self.elements("add", name, set.elements.iter().cloned());
            }
        }
    }

    fn change_map(&mut self, name: &str, before: Option<&Map>, map: &Map) {
        let Some(Map { elements: before, .. }) = before else {
            self.line(format_args!("flush map {TABLE} {name}"));
            return self.map_elements("add", name, map.elements.iter());
        };
        let stale = before.iter().filter(|(key, value)| map.elements.get(*key) != Some(*value));
        self.elements("delete", name, stale.map(|(key, _)| key.clone()));
        self.map_elements("add", name, map.elements.iter().filter(|(key, value)| before.get(*key) != Some(*value)));
    }

    fn rules(&mut self, name: &str, chain: &Chain) {
        for rule in &chain.rules {
            self.line(format_args!("add rule {TABLE} {name} {rule}"));
        }
    }

    fn map_elements<'a>(
        &mut self,
        command: &str,
        name: &str,
        elements: impl Iterator<Item = (&'a String, &'a String)>,
    ) {
        self.elements(command, name, elements.map(|(key, value)| format!("{key} : {value}")));
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
                ("flush", "map") => table.maps.get_mut(name).unwrap().elements.clear(),
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

    /// The table without what its objects contain.
    fn objects(table: &Table) -> Table {
        let mut table = table.clone();
        table.sets.values_mut().for_each(|set| set.elements.clear());
        table.maps.values_mut().for_each(|map| map.elements.clear());
        table.chains.values_mut().for_each(|chain| chain.rules.clear());
        table
    }

    /// What the names of another table lead to: all that packets meet, if those are the only ones.
    fn part(table: &Table, names: &Table) -> Table {
        let mut table = table.clone();
        table.counters.retain(|name| names.counters.contains(name));
        table.sets.retain(|name, _| names.sets.contains_key(name));
        table.maps.retain(|name, _| names.maps.contains_key(name));
        table.chains.retain(|name, _| names.chains.contains_key(name));
        table
    }

    proptest! {
        #[test]
        fn scripts_lead_from_any_table_to_any_other_in_an_order_that_the_kernel_permits(
            tables in prop::collection::vec(table(), 1..5),
            ways in prop::collection::vec(0..3, 5),
        ) {
            let mut kernel = Kernel::default();
            let mut before: Option<Table> = None;
            for (table, way) in tables.into_iter().zip(ways) {
                match before.as_ref().filter(|_| way > 0) {
                    None => kernel.run(&replacement(&table)),
                    Some(old) => {
                        // What an earlier process has left.
                        let found = objects(old);
                        let change = change(if way == 1 { Before::Exactly(old) } else { Before::Objects(&found) }, &table);
                        prop_assert!(way != 1 || *old != table || change.prepare.is_empty() && change.switch.is_empty());
                        kernel.run(&change.prepare);
                        prop_assert_eq!(&part(kernel.0.as_ref().unwrap(), old), old, "{}", change.prepare);
                        let declared = change.switch.lines().any(|line| line.starts_with("add chain"));
                        prop_assert!(!declared, "an element may lead to an empty chain: {}", change.switch);
                        kernel.run(&change.switch);
                    }
                }
                prop_assert_eq!(kernel.0.as_ref(), Some(&table));
                before = Some(table);
            }
        }
    }
}
