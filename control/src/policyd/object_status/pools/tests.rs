use vipgate_policy::manifest::Family;

use super::*;
use crate::policyd::object_status::condition::Truth;
use crate::source::store::CompileOutcome;

fn usage() -> PoolUsage {
    PoolUsage {
        name: "public".to_owned(),
        services: 3,
        policies: 1,
        free: 12,
        exhausted: vec![],
        namespaces: vec![("a".to_owned(), 1), ("b".to_owned(), 2)],
    }
}

fn status(usage: &PoolUsage) -> DesiredStatus {
    let outcome = CompileOutcome::default();
    pool_status(&Acceptance::of(&outcome), "AddressPool/public", std::slice::from_ref(usage)).unwrap()
}

#[test]
fn a_status_counts_what_is_there_and_what_is_used() {
    let status = status(&usage());
    let fields = json!({
        "capacity": 16, "used": 4, "services": 3, "policies": 1,
        "namespaces": [{"name": "a", "used": 1}, {"name": "b", "used": 2}],
    });
    assert_eq!(Value::Object(status.fields), fields);
    assert_eq!((status.conditions[1].kind, status.conditions[1].status), (EXHAUSTED, Truth::False));
}

#[test]
fn a_pool_without_a_free_address_of_one_family_is_exhausted() {
    let status = status(&PoolUsage { exhausted: vec![Family::V4], ..usage() });
    let condition = &status.conditions[1];
    assert_eq!((condition.status, &*condition.message), (Truth::True, "no IPv4 address is free"));
}

#[test]
fn counts_and_namespaces_are_bounded() {
    let namespaces = (0..100).map(|n| (format!("n{n:03}"), n)).collect();
    let status = status(&PoolUsage { free: u64::MAX, namespaces, ..usage() });
    assert_eq!(status.fields["capacity"], i64::MAX);
    let named = status.fields["namespaces"].as_array().unwrap();
    assert_eq!((named.len(), &named[0]["name"]), (MAX_NAMESPACES, &json!("n068")), "those with the most");
}

#[test]
fn a_pool_whose_usage_is_not_known_keeps_its_status() {
    let outcome = CompileOutcome::default();
    assert_eq!(pool_status(&Acceptance::of(&outcome), "AddressPool/other", &[usage()]), None);
}
