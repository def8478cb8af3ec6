//! Gateways that say that they can't do what they serve for: who stops, who goes on, who stands in.

use super::*;

#[test]
fn who_is_unable_stops_while_an_able_one_serves_and_says_why() {
    let mut office = Office::serving(&["a", "b", "c"]);
    office.hears_unable("a");
    assert_eq!(office.serving_now(), ["a", "b", "c"], "others may be about to say so, too");
    assert_eq!(office.member("a").unable.as_deref(), Some("interface gw-out has no carrier"));
    office.stays(&["a"], &["b", "c"]);
    assert_eq!(office.serving_now(), ["b", "c"]);
    assert!(!office.member("a").lapsed && office.member("a").epoch == office.roster.view().number);
    office.stays(&["a", "b"], &["c"]);
    office.stays(&["a", "b"], &["c"]);
    assert_eq!(office.serving_now(), ["c"]);
    office.stays(&["a", "b", "c"], &[]);
    office.stays(&["a", "b", "c"], &[]);
    assert_eq!(office.serving_now(), ["c"], "the last one goes on, and nobody comes in its place who can't do better");
    // One of them is well again, and stands in for the last one when it has been well for a while.
    office.hears("b", 1, Wish::Ready).unwrap();
    assert_eq!(office.serving_now(), ["b", "c"]);
    office.stays(&["a", "c"], &["b"]);
    assert_eq!(office.serving_now(), ["b"]);
    assert_eq!(office.member("b").unable, None);
    office.hears("a", 1, Wish::Ready).unwrap();
    assert_eq!(office.serving_now(), ["a", "b"]);
}

/// Such as the death of the router that they share, and its return.
#[test]
fn what_befalls_all_one_after_the_other_stops_nobody() {
    let names = ["a", "b", "c"];
    let mut office = Office::serving(&names);
    for well in [false, true] {
        for at in 0..names.len() {
            for (n, name) in names.iter().enumerate() {
                let is_able = (n <= at) == well;
                if is_able {
                    office.hears(name, 1, Wish::Ready).unwrap();
                } else {
                    office.hears_unable(name);
                }
            }
            office.wait(ms(90));
            assert_eq!(office.serving_now(), names, "{well} {at}");
        }
        for _ in 0..10 {
            let (unable, ready): (&[_], &[_]) = if well { (&[], &names) } else { (&names, &[]) };
            office.stays(unable, ready);
            assert_eq!(office.serving_now(), names);
        }
    }
}

#[test]
fn where_nobody_would_serve_whoever_lives_does() {
    let mut office = Office::serving(&["a", "b"]);
    office.hears_unable("a");
    office.stays(&["a"], &["b"]);
    assert_eq!(office.serving_now(), ["b"]);
    office.stays(&["a"], &[]);
    office.stays(&["a"], &[]);
    office.wait(ms(1));
    assert_eq!(office.serving_now(), ["a"], "b is dead");
    office.hears_unable("a");
    assert_eq!(office.serving_now(), ["a"]);
    // An able one that people drain stays drained.
    let mut office = Office::serving(&["a", "b"]);
    office.hears("a", 1, Wish::Draining).unwrap();
    office.wait(TTL);
    office.hears("a", 1, Wish::Draining).unwrap();
    office.wait(ms(1));
    office.hears("a", 1, Wish::Draining).unwrap();
    assert!(office.serving_now().is_empty());
}

/// The only able gateway is restarted: shares don't move to one that can't serve them, and back.
#[test]
fn an_unable_one_stands_in_for_nobody_who_is_about_to_come_back() {
    let mut office = Office::serving_with_secrets(&["a", "b"]);
    let unable = |office: &mut Office| {
        let beat = Beat { unable: Some("a link is down".into()), ..office.beat_of("b", 1, None, Wish::Draining) };
        assert_eq!(office.take(&beat), Ok(Heard::Counts));
    };
    for _ in 0..4 {
        unable(&mut office);
        office.wait(ms(150));
        office.shows("a", 1, None, Wish::Ready).unwrap();
    }
    assert_eq!(office.serving_now(), ["a"]);
    office.roster.left("a", secret(1).incarnation());
    office.shows("a", 2, Some(1), Wish::Joining).unwrap();
    unable(&mut office);
    assert!(office.serving_now().is_empty());
    office.shows("a", 2, None, Wish::Ready).unwrap();
    assert_eq!(office.serving_now(), ["a"]);
    // One that only ever comes is waited for no longer than two TTLs.
    office.roster.left("a", secret(2).incarnation());
    for round in 0..10 {
        office.shows("a", 3, Some(2), Wish::Joining).unwrap();
        unable(&mut office);
        assert_eq!(office.serving_now().is_empty(), round < 8, "{round}");
        office.wait(ms(150));
    }
}

#[test]
fn people_drain_nobody_as_long_as_the_others_are_unable() {
    let mut office = Office::serving(&["a", "b"]);
    office.hears_unable("b");
    office.stays(&["b"], &["a"]);
    assert_eq!(office.serving_now(), ["a"]);
    office.hears("a", 1, Wish::Draining).unwrap();
    assert_eq!(office.serving_now(), ["a"]);
    office.hears("b", 1, Wish::Ready).unwrap();
    assert_eq!(office.serving_now(), ["b"]);
}
