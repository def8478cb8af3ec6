//! When an update is whole: settings have come, and count what is there.

use super::*;
use crate::xds::fixtures::deal;
use crate::xds::resource::{encode_all, settings};

/// Settings that count so.
fn counting(counts: [usize; Kind::COUNTED]) -> DeltaDiscoveryResponse {
    let (key, content, _) = settings(counts, 1);
    response(Kind::Settings, &[(key, Some(Held { version: "1".to_owned(), body: content.body }))])
}

fn staged(deal: &Deal) -> Book {
    let mut book = Book::default();
    let all = encode_all(deal).into_iter();
    let all: Vec<_> = all.map(|(key, it)| (key, Some(Held { version: "1".to_owned(), body: it.body }))).collect();
    for response in responses(&all) {
        book.stage(response).unwrap();
    }
    book
}

#[test]
fn without_settings_nothing_is_whole() {
    assert!(!Book::default().is_whole());
    let mut book = staged(&deal(2));
    assert!(!book.is_whole() && book.has_staged());
    assert_eq!(book.miscount(), None);
    book.commit();
    assert!(!book.is_whole() && !book.has_staged());
}

#[test]
fn settings_that_are_held_make_nothing_new_whole() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut book = book_of(&two);
    assert!(!book.is_whole());
    let news = three.differences(&two);
    book.stage(response(Kind::Endpoint, &news[..1])).unwrap();
    assert!(!book.is_whole());
    book.stage(three.settle()).unwrap();
    assert!(book.is_whole());
}

#[test]
fn counts_that_do_not_match_are_not_whole() {
    let cases = [
        ([1, 1, 2, 1, 1, 1, 1], None),
        ([0, 1, 2, 1, 1, 1, 1], Some("counts 0 of EgressPolicy, but there are 1")),
        ([1, 2, 2, 1, 1, 1, 1], Some("counts 2 of Vip, but there are 1")),
        ([1, 1, 1, 1, 1, 1, 1], Some("counts 1 of Endpoint, but there are 2")),
        ([1, 1, 3, 1, 1, 1, 1], Some("counts 3 of Endpoint, but there are 2")),
        ([1, 1, 2, 2, 1, 1, 1], Some("counts 2 of Service, but there are 1")),
        ([1, 1, 2, 1, 0, 1, 1], Some("counts 0 of Gateway, but there are 1")),
        ([1, 1, 2, 1, 1, 0, 1], Some("counts 0 of OverlayNode, but there are 1")),
        ([1, 1, 2, 1, 1, 1, 0], Some("counts 0 of Cluster, but there are 1")),
    ];
    for (counts, miscount) in cases {
        let mut book = staged(&deal(2));
        book.stage(counting(counts)).unwrap();
        assert_eq!(book.is_whole(), miscount.is_none(), "{counts:?}");
        assert_eq!(book.miscount().as_deref(), miscount);
    }
}

#[test]
fn counts_are_those_after_the_update() {
    let mut book = book_of(&Told::of(&deal(3)));
    let endpoint = |i: u8| key(Kind::Endpoint, &format!("10.0.0.{i}"));
    let same = |i: u8| (endpoint(i), book.held().get(&endpoint(i)).cloned());
    // One goes, one that never was goes too, one comes again, and one goes and comes.
    let first = response(Kind::Endpoint, &[(endpoint(1), None), (endpoint(9), None), same(2), (endpoint(3), None)]);
    let second = response(Kind::Endpoint, &[same(3)]);
    book.stage(first).unwrap();
    book.stage(second).unwrap();
    book.stage(counting([1, 1, 3, 1, 1, 1, 1])).unwrap();
    assert!(!book.is_whole());
    book.stage(counting([1, 1, 2, 1, 1, 1, 1])).unwrap();
    assert!(book.is_whole());
    book.commit();
    book.stage(counting([1, 1, 2, 1, 1, 1, 1])).unwrap();
    assert!(book.is_whole());
}

#[test]
fn settings_that_go_make_nothing_whole() {
    let mut book = book_of(&Told::of(&deal(2)));
    assert!(book.expects_settings());
    book.stage(response(Kind::Settings, &[(key(Kind::Settings, "settings"), None)])).unwrap();
    assert!(!book.is_whole() && !book.expects_settings());
    book.discard();
    assert!(book.expects_settings());
}
