use vipgate_dataplane::flow::ids::InterfaceId;

use super::*;

const LIMITS: ResolverLimits = ResolverLimits {
    min_interval: Duration::from_secs(1),
    per_second: 4,
    max_next_hops: 3,
    refresh_interval: Duration::from_secs(30),
};

fn hop(last: u8) -> NextHop {
    (InterfaceId(0), [192, 0, 2, last].into())
}

fn table() -> (NextHopTable, Instant) {
    (NextHopTable::new(LIMITS), Instant::now())
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn requests_for_one_next_hop_are_rate_limited() {
    let (mut table, now) = table();
    assert_eq!(table.request(hop(1), now), Admission::Request(None));
    assert_eq!(table.request(hop(1), now + Duration::from_millis(999)), Admission::RateLimited);
    assert_eq!(table.request(hop(1), now + seconds(1)), Admission::Request(None));
}

#[test]
fn requests_for_all_next_hops_are_rate_limited() {
    let (mut table, now) = table();
    let requested = |table: &mut NextHopTable, now| {
        (0..100).filter(|i| table.request(hop(*i), now) != Admission::RateLimited).count()
    };
    assert_eq!(requested(&mut table, now), 4);
    assert_eq!(requested(&mut table, now + Duration::from_millis(500)), 2);
    assert_eq!(requested(&mut table, now + seconds(100)), 4);
}

#[test]
fn the_least_recently_used_next_hop_is_evicted() {
    let (mut table, now) = table();
    for (i, last) in [1, 2, 3].into_iter().enumerate() {
        assert_eq!(table.request(hop(last), now + seconds(i as u64)), Admission::Request(None));
    }
    table.set_managed(hop(2), true);
    table.mark_in_use(&[hop(1)], now + seconds(5));
    assert_eq!(
        table.request(hop(4), now + seconds(6)),
        Admission::Request(Some(Released { hop: hop(2), managed: true }))
    );
    assert_eq!(table.next_hops().len(), 3);
}

#[test]
fn a_list_longer_than_the_limit_is_truncated() {
    let (mut table, now) = table();
    let hops: Vec<NextHop> = (0..10).map(hop).collect();
    assert_eq!(table.mark_in_use(&hops, now), []);
    assert_eq!(table.mark_in_use(&hops, now + seconds(1)), []);
    let mut all = table.next_hops();
    all.sort_unstable();
    assert_eq!(all, &hops[..3]);
}

#[test]
fn marked_next_hops_are_due_at_once_and_then_every_interval() {
    let (mut table, now) = table();
    table.mark_in_use(&[hop(1), hop(2)], now);
    assert_eq!(table.due(now).len(), 2);
    assert_eq!(table.due(now + seconds(29)), []);
    assert_eq!(table.due(now + seconds(30)).len(), 2);
}

#[test]
fn a_failed_next_hop_is_released_unless_it_is_in_use() {
    let (mut table, now) = table();
    table.request(hop(1), now);
    table.mark_in_use(&[hop(2)], now);
    assert!(table.should_release(hop(1), now));
    assert!(!table.should_release(hop(2), now));
    assert!(!table.should_release(hop(2), now + seconds(89)));
    assert!(table.should_release(hop(2), now + seconds(90)));
    assert!(!table.should_release(hop(3), now), "not tracked");
}

#[test]
fn a_restored_next_hop_is_managed() {
    let (mut table, now) = table();
    table.restore(hop(2), now);
    assert_eq!(table.remove(hop(2)), Some(Released { hop: hop(2), managed: true }));
    assert_eq!(table.remove(hop(2)), None);
}
