//! Tests of the soak's schedule.

use super::{PolicyChange, Schedule, SoakEvent, TENANTS};

fn schedule(seed: u64) -> Vec<(u64, SoakEvent)> {
    let mut schedule = Schedule::new(seed);
    (0..30).flat_map(|_| schedule.segment()).collect()
}

#[test]
fn the_schedule_is_a_function_of_the_seed() {
    let (one, other) = (schedule(7), schedule(8));
    assert!(one.len() > 200 && one == schedule(7) && one != other);
    let count = |needle: &str| one.iter().filter(|(_, event)| event.to_string().contains(needle)).count();
    for needle in ["kill gw-", "drain", "restart", "policy server", "cut", "clock", "tenant", "flood"] {
        assert!(count(needle) > 3, "{needle}: {}", count(needle));
    }
    assert!(one.iter().any(|(_, event)| event.is_disruptive()) && !one.iter().all(|(_, event)| event.is_disruptive()));
}

#[test]
fn a_tenant_is_added_before_it_is_changed_or_removed() {
    for seed in 0..50 {
        let mut exists = [false; TENANTS];
        for (_, event) in schedule(seed) {
            if let SoakEvent::Policy { tenant, change } = event {
                assert_eq!(exists[tenant], change != PolicyChange::Add, "seed {seed}: {event}");
                exists[tenant] = change != PolicyChange::Remove;
            }
        }
    }
}
