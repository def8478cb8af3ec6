//! What policies lack of pools whose provider can allocate addresses.

use super::*;
use crate::diagnostic::Code;
use crate::manifest::Family;

/// Two policies for a pool whose provider has these addresses, each with the object that it is claimed for.
fn compiled_with(pool: &str, counts: [u32; 2], addresses: &[(&str, Option<&str>)]) -> Compiled {
    let policy = |name: &str, year: u32, count: u32| {
        format!(
            "---\napiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\n\
             metadata: {{name: {name}, namespace: a, creationTimestamp: \"{year}-01-01T00:00:00Z\"}}\n\
             spec: {{selectors: [{{podSelector: {{}}}}], pools: [{{name: public, count: {count}}}]}}\n"
        )
    };
    let provider = "aws: {region: eu-west-1, tags: {a: b}}";
    let text = format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: public}}\n\
         spec: {{provider: {{{provider}{pool}}}}}\n{}{}",
        policy("old", 2020, counts[0]),
        policy("young", 2021, counts[1])
    );
    let mut objects = objects(&text);
    for object in &mut objects {
        object.observe_addresses(addresses);
    }
    compile(&objects)
}

fn shortages(compiled: &Compiled) -> Vec<(&str, usize)> {
    assert!(compiled.shortages.iter().all(|it| it.pool == "public" && it.family == Family::V4));
    compiled.shortages.iter().map(|it| (it.owner.as_str(), it.wanted)).collect()
}

fn exhausted(compiled: &Compiled) -> Vec<bool> {
    let all = compiled.diagnostics.iter().filter(|it| it.code == Code::PoolExhausted);
    all.map(Diagnostic::is_error).collect()
}

#[test]
fn a_pool_that_may_grow_reports_what_policies_lack_as_warnings() {
    let reserve = ", ownership: reserve, max: 4";
    let compiled = compiled_with(reserve, [2, 1], &[("203.0.113.1", None)]);
    assert_eq!(shortages(&compiled), [("EgressPolicy a/old", 2), ("EgressPolicy a/young", 1)]);
    assert_eq!(exhausted(&compiled), [false, false]);
    let addresses = [("203.0.113.1", None), ("203.0.113.2", Some("EgressPolicy a/old")), ("203.0.113.3", None)];
    let compiled = compiled_with(reserve, [2, 1], &addresses);
    assert_eq!((shortages(&compiled), exhausted(&compiled)), (vec![], vec![]));
}

#[test]
fn what_is_claimed_for_another_object_is_lacking() {
    let addresses = [("203.0.113.1", Some("Service b/s")), ("203.0.113.2", Some("EgressPolicy a/young"))];
    let compiled = compiled_with(", ownership: reserve, max: 4", [1, 1], &addresses);
    assert_eq!(shortages(&compiled), [("EgressPolicy a/old", 1)]);
}

#[test]
fn a_pool_of_existing_addresses_is_exhausted() {
    let compiled = compiled_with("", [1, 1], &[("203.0.113.1", None)]);
    assert_eq!((shortages(&compiled), exhausted(&compiled)), (vec![], vec![true]));
}
