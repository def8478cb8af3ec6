//! The order of a soak's events: the soak itself has no harness.

use crate::plan::{Change, Event, Plan, TENANTS};

fn order(seed: u64) -> Vec<(u64, Event)> {
    let mut plan = Plan::new(seed);
    (0..30).flat_map(|_| plan.segment()).collect()
}

#[test]
fn the_same_seed_is_the_same_order() {
    let (one, other) = (order(7), order(8));
    assert!(one.len() > 200 && one == order(7) && one != other);
    let said = |needle: &str| one.iter().filter(|(_, event)| event.to_string().contains(needle)).count();
    for needle in ["kill gw-", "drain", "restart", "policy server", "cut", "clock", "tenant", "flood"] {
        assert!(said(needle) > 3, "{needle}: {}", said(needle));
    }
    assert!(one.iter().any(|(_, event)| event.disturbs()) && !one.iter().all(|(_, event)| event.disturbs()));
}

#[test]
fn a_tenant_comes_before_it_changes_or_goes() {
    for seed in 0..50 {
        let mut there = [false; TENANTS];
        for (_, event) in order(seed) {
            if let Event::Policy { tenant, change } = event {
                assert_eq!(there[tenant], change != Change::Add, "seed {seed}: {event}");
                there[tenant] = change != Change::Remove;
            }
        }
    }
}
