use vipgate_policy::manifest::Family;

use super::*;
use crate::policyd::object_status::condition::Truth;
use crate::source::store::CompileOutcome;

fn usage() -> PoolUsage {
    PoolUsage {
        name: "public".to_owned(),
        services: 3,
        policies: 1,
        quarantined: 2,
        free: 10,
        exhausted: vec![],
        namespaces: vec![("a".to_owned(), 1), ("b".to_owned(), 2)],
    }
}

fn status(usage: &PoolUsage) -> DesiredStatus {
    let outcome = CompileOutcome::default();
    pool_status(&Acceptance::of(&outcome), "AddressPool/public", std::slice::from_ref(usage), &[]).unwrap()
}

#[test]
fn a_status_counts_what_is_there_and_what_is_used() {
    let status = status(&usage());
    let fields = json!({
        "capacity": 16, "used": 4, "services": 3, "policies": 1, "quarantined": 2,
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
    assert_eq!(pool_status(&Acceptance::of(&outcome), "AddressPool/other", &[usage()], &[]), None);
}

#[test]
fn a_pool_with_a_provider_says_whether_it_is_observed_and_its_vips_are_attached() {
    let facts =
        PoolFacts { name: "public".to_owned(), is_observed: true, vips: 3, attached: 3, ..PoolFacts::default() };
    let conditions = |facts: PoolFacts| {
        let outcome = CompileOutcome::default();
        let status = pool_status(&Acceptance::of(&outcome), "AddressPool/public", &[usage()], &[facts]).unwrap();
        let conditions = status.conditions.into_iter().skip(2);
        conditions.map(|it| (it.kind, it.status, it.reason, it.message)).collect::<Vec<_>>()
    };
    let attached = conditions(facts.clone());
    assert_eq!((attached[0].0, attached[0].1, &*attached[0].2), ("ProviderReady", Truth::True, "Observed"));
    assert_eq!((attached[1].0, attached[1].1, &*attached[1].2), ("Attached", Truth::True, "Attached"));
    let fault = Some(("Throttled".to_owned(), "DescribeAddresses: RequestLimitExceeded".to_owned()));
    let problem = Some(("NoCapacity".to_owned(), "203.0.113.3: no room".to_owned()));
    let faulty = conditions(PoolFacts { fault, problem, attached: 2, ..facts });
    assert_eq!((faulty[0].1, &*faulty[0].2), (Truth::False, "Throttled"));
    assert_eq!((faulty[1].1, &*faulty[1].2), (Truth::False, "NoCapacity"));
    assert_eq!(faulty[1].3, "1 of 3 VIPs aren't attached to their gateways: 203.0.113.3: no room");
    let unobserved = conditions(PoolFacts { name: "public".to_owned(), ..PoolFacts::default() });
    assert_eq!((unobserved[0].1, unobserved[1].1), (Truth::Unknown, Truth::False));
}
