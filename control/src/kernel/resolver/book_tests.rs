use std::time::Duration;

use vipgate_dataplane::io::InterfaceId;

use super::*;

const LIMITS: ResolverLimits =
    ResolverLimits { pause: Duration::from_secs(1), per_second: 4, hops: 3, look_again: Duration::from_secs(30) };

fn hop(last: u8) -> Hop {
    (InterfaceId(0), [192, 0, 2, last].into())
}

fn book() -> (Book, Instant) {
    let now = Instant::now();
    (Book::new(LIMITS, now), now)
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn one_hop_is_asked_for_once_a_pause() {
    let (mut book, now) = book();
    assert_eq!(book.want(hop(1), now), Admission::Ask(None));
    assert_eq!(book.want(hop(1), now + Duration::from_millis(999)), Admission::Wait);
    assert_eq!(book.want(hop(1), now + seconds(1)), Admission::Ask(None));
}

#[test]
fn all_hops_together_stay_within_the_rate() {
    let (mut book, now) = book();
    let asked = |book: &mut Book, now| (0..100).filter(|i| book.want(hop(*i), now) != Admission::Wait).count();
    assert_eq!(asked(&mut book, now), 4);
    assert_eq!(asked(&mut book, now + Duration::from_millis(500)), 2);
    assert_eq!(asked(&mut book, now + seconds(100)), 4);
}

#[test]
fn the_one_that_nobody_wanted_for_longest_makes_room() {
    let (mut book, now) = book();
    for (i, last) in [1, 2, 3].into_iter().enumerate() {
        assert_eq!(book.want(hop(last), now + seconds(i as u64)), Admission::Ask(None));
    }
    book.set_managed(hop(2), true);
    book.keep(&[hop(1)], now + seconds(5));
    assert_eq!(book.want(hop(4), now + seconds(6)), Admission::Ask(Some(LetGo { hop: hop(2), managed: true })));
    assert_eq!(book.all().len(), 3);
}

#[test]
fn a_list_that_is_too_long_keeps_its_beginning() {
    let (mut book, now) = book();
    let hops: Vec<Hop> = (0..10).map(hop).collect();
    assert_eq!(book.keep(&hops, now), []);
    assert_eq!(book.keep(&hops, now + seconds(1)), []);
    let mut all = book.all();
    all.sort_unstable();
    assert_eq!(all, &hops[..3]);
}

#[test]
fn kept_hops_are_due_at_once_and_then_every_period() {
    let (mut book, now) = book();
    book.keep(&[hop(1), hop(2)], now);
    assert_eq!(book.due(now).len(), 2);
    assert_eq!(book.due(now + seconds(29)), []);
    assert_eq!(book.due(now + seconds(30)).len(), 2);
}

#[test]
fn what_fails_is_given_up_unless_it_is_in_use() {
    let (mut book, now) = book();
    book.want(hop(1), now);
    book.keep(&[hop(2)], now);
    assert!(book.gives_up(hop(1), now));
    assert!(!book.gives_up(hop(2), now));
    assert!(!book.gives_up(hop(2), now + seconds(89)));
    assert!(book.gives_up(hop(2), now + seconds(90)));
    assert!(!book.gives_up(hop(3), now), "never heard of");
}

#[test]
fn what_an_earlier_life_has_left_is_the_kernels_to_be_told() {
    let (mut book, now) = book();
    book.adopt(hop(2), now);
    assert_eq!(book.remove(hop(2)), Some(LetGo { hop: hop(2), managed: true }));
    assert_eq!(book.remove(hop(2)), None);
}
