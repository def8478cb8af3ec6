use super::*;

/// What is left of a plan of which a Service waits until this second, with so many quarantined addresses.
fn rest(waits_until: Option<i64>, quarantined: u64) -> Rest {
    let at = |second| Timestamp::from_second(second).unwrap();
    let usage = PoolUsage {
        name: "public".to_owned(),
        services: 0,
        policies: 0,
        quarantined,
        free: 0,
        exhausted: vec![],
        namespaces: vec![],
    };
    let plan = AllocationPlan { usage: vec![usage], waits_until: waits_until.map(at), ..AllocationPlan::default() };
    Rest::after(&plan, at(100))
}

#[test]
fn a_round_follows_when_a_quarantine_ends() {
    assert_eq!(rest(None, 0), Rest::Nothing);
    assert_eq!(rest(None, 3), Rest::Later(COUNT_INTERVAL), "they are counted");
    assert_eq!(rest(Some(110), 3), Rest::Later(Duration::from_secs(10)));
    assert_eq!(rest(Some(1000), 3), Rest::Later(COUNT_INTERVAL));
    assert_eq!(rest(Some(1000), 0), Rest::Later(Duration::from_mins(15)));
    for past in [99, 100] {
        assert_eq!(rest(Some(past), 0), Rest::Later(ROUND_INTERVAL), "the clock was set");
    }
}

#[test]
fn what_failed_is_more_urgent_than_what_waits() {
    let order = [Rest::Failed, Rest::Later(ROUND_INTERVAL), Rest::Later(COUNT_INTERVAL), Rest::Nothing];
    assert!(order.is_sorted());
}

#[test]
fn a_write_that_fails_again_and_again_delays_the_next_round() {
    let after = |milliseconds| Rest::of(Some(Duration::from_millis(milliseconds)));
    assert_eq!((Rest::of(None), after(0)), (Rest::Nothing, Rest::Later(ROUND_INTERVAL)));
    assert_eq!((after(1000), after(2000)), (Rest::Later(MAX_RETRY_DELAY), Rest::Failed));
}
