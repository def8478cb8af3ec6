//! The table that an earlier process has left, as `nft -j list table` shows it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::table::{Chain, Map, Set, Table};

/// The objects of a listing, without what they contain: a wanted table can take their place. `None`: it can't, since they
/// have other properties than those of the same name, or a kind that no table of ours has.
pub fn objects(listing: &Value, wanted: &Table) -> Option<Table> {
    let mut table = Table::default();
    for object in listing["nftables"].as_array()? {
        // The version may have been left out of it.
        let Some((kind, object)) = object.as_object()?.iter().next() else { continue };
        let name = || object["name"].as_str().map(str::to_owned);
        match kind.as_str() {
            "metainfo" | "rule" => {}
            // A table that sleeps stays asleep.
            "table" if object["flags"].is_null() => {}
            "counter" => drop(table.counters.insert(name()?)),
            "set" => {
                let name = name()?;
                let set = wanted.sets.get(&name);
                if set.is_some_and(|set| !is_set(object, set)) {
                    return None;
                }
                let (element, is_interval) = set.map_or(("", false), |set| (set.element, set.is_interval));
                table.sets.insert(name, Set { element, is_interval, elements: BTreeSet::new() });
            }
            "map" => {
                let name = name()?;
                let types = wanted.maps.get(&name).map_or("", |map| map.types);
                if !types.is_empty() && !is_map(object, types) {
                    return None;
                }
                table.maps.insert(name, Map { types, elements: BTreeMap::new() });
            }
            "chain" => {
                let name = name()?;
                let chain = wanted.chains.get(&name);
                if chain.is_some_and(|chain| !is_chain(object, chain.hook)) {
                    return None;
                }
                table.chains.insert(name, Chain { hook: chain.and_then(|chain| chain.hook), ..Chain::default() });
            }
            _ => return None,
        }
    }
    Some(table)
}

fn is_set(object: &Value, set: &Set) -> bool {
    let flags = object["flags"].as_array().map(Vec::as_slice).unwrap_or_default();
    object["type"] == set.element && flags.iter().map(Value::as_str).eq(set.is_interval.then_some(Some("interval")))
}

fn is_map(object: &Value, types: &str) -> bool {
    let of = |field: &str| object[field].as_str().unwrap_or_default();
    object["flags"].is_null() && types == format!("{} : {}", of("type"), of("map"))
}

fn is_chain(object: &Value, hook: Option<&str>) -> bool {
    let Some(hook) = hook else { return object["hook"].is_null() };
    let of = |field: &str| object[field].as_str().unwrap_or_default();
    let Some((properties, priority)) = hook.split_once(" priority ") else { return false };
    properties == format!("{} hook {}", of("type"), of("hook"))
        && of("policy") == "accept"
        && object["prio"].as_i64().is_some_and(|number| self::priority(priority) == Some(number))
}

/// The number of a priority such as `dstnat + 10` (nft(8), standard priority names).
fn priority(text: &str) -> Option<i64> {
    let mut words = text.split(' ');
    let base = match words.next()? {
        "raw" => -300,
        "mangle" => -150,
        "dstnat" => -100,
        "filter" => 0,
        "srcnat" => 100,
        _ => return None,
    };
    Some(match (words.next(), words.next()) {
        (None, None) => base,
        (Some("+"), Some(offset)) => base + offset.parse::<i64>().ok()?,
        (Some("-"), Some(offset)) => base - offset.parse::<i64>().ok()?,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wanted() -> Table {
        let set = |is_interval| Set { element: "ipv4_addr", is_interval, elements: ["10.0.0.1".to_owned()].into() };
        let map = Map { types: "ipv4_addr : verdict", elements: BTreeMap::new() };
        let base = Chain { hook: Some("filter hook prerouting priority dstnat + 10"), ..Chain::new(["accept"]) };
        Table {
            counters: ["held".to_owned()].into(),
            sets: [("pods4".to_owned(), set(true)), ("known4".to_owned(), set(false))].into(),
            maps: [("endpoints4".to_owned(), map)].into(),
            chains: [("steer".to_owned(), base), ("pass".to_owned(), Chain::new(["accept"]))].into(),
        }
    }

    /// As nft 1.0.6 lists it.
    fn listing() -> Value {
        json!({"nftables": [
            {},
            {"table": {"family": "inet", "name": "vipgate"}},
            {"counter": {"family": "inet", "name": "gone", "table": "vipgate"}},
            {"set": {"name": "pods4", "type": "ipv4_addr", "flags": ["interval"], "elem": [{"prefix": {}}]}},
            {"set": {"name": "gone4", "type": "ipv4_addr"}},
            {"map": {"name": "endpoints4", "type": "ipv4_addr", "map": "verdict", "elem": [["10.9.1.2", {}]]}},
            {"chain": {"name": "steer", "type": "filter", "hook": "prerouting", "prio": -90, "policy": "accept"}},
            {"chain": {"name": "gone", "comment": "gw-1"}},
            {"rule": {"chain": "steer", "expr": []}},
        ]})
    }

    #[test]
    fn objects_of_an_earlier_process_are_known_by_name_without_what_they_contain() {
        let (wanted, found) = (wanted(), objects(&listing(), &wanted()).unwrap());
        assert_eq!(found.counters, ["gone".to_owned()].into());
        assert_eq!(found.sets.keys().map(String::as_str).collect::<BTreeSet<_>>(), ["gone4", "pods4"].into());
        assert_eq!(found.maps["endpoints4"].types, wanted.maps["endpoints4"].types);
        assert_eq!(found.chains["steer"], Chain { rules: Vec::new(), ..wanted.chains["steer"].clone() });
        assert!(found.chains.contains_key("gone") && !found.chains.contains_key("pass"));
        assert!(found.sets.values().all(|set| set.elements.is_empty()));
    }

    #[test]
    fn objects_with_other_properties_are_nothing_to_change_in_place() {
        let other = [
            ("1/table/flags", json!(["dormant"])),
            ("3/set/type", json!("ipv6_addr")),
            ("3/set/flags", json!(["interval", "timeout"])),
            ("3/set/flags", Value::Null),
            ("5/map/map", json!("mark")),
            ("5/map/flags", json!(["interval"])),
            ("6/chain/prio", json!(-100)),
            ("6/chain/hook", json!("output")),
            ("6/chain/type", json!("nat")),
            ("6/chain/policy", json!("drop")),
            ("6/chain/hook", Value::Null),
            ("8", json!({"flowtable": {"name": "f"}})),
        ];
        for (path, value) in other {
            let mut listing = listing();
            let (parent, field) = path.rsplit_once('/').unwrap_or(("", path));
            let at = if parent.is_empty() { String::new() } else { format!("/{parent}") };
            let parent = listing["nftables"].pointer_mut(&at).unwrap();
            match parent {
                Value::Array(items) => items[field.parse::<usize>().unwrap()] = value.clone(),
                parent => parent[field] = value.clone(),
            }
            assert!(objects(&listing, &wanted()).is_none(), "{path}: {value}");
        }
    }

    #[test]
    fn priorities_have_the_numbers_of_the_kernel() {
        let known = [("raw", -300), ("dstnat + 10", -90), ("mangle", -150), ("filter - 10", -10), ("srcnat - 20", 80)];
        for (text, number) in known {
            assert_eq!(priority(text), Some(number), "{text}");
        }
        for unknown in ["security", "raw +", "raw * 2", "raw + x", ""] {
            assert_eq!(priority(unknown), None, "{unknown}");
        }
    }
}
