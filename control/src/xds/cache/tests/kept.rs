//! What comes back, and when it was known to be right.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::tally::property;

fn changes() -> impl Strategy<Value = Changes> {
    let kind = prop::sample::select(Kind::ALL.to_vec());
    let value = prop::option::weighted(0.7, ("[0-9a-f]{0,16}", prop::collection::vec(any::<u8>(), 0..40)));
    // Few names, or hardly any would come twice, and any now and then.
    let name = prop_oneof![4 => "[ab]", 1 => "\\PC{0,3}"];
    let one = (kind, name, value).prop_map(|(kind, name, value)| {
        (key(kind, &name), value.map(|(version, body)| Held { version, body: body.into() }))
    });
    prop::collection::vec(one, 0..6)
}

#[test]
fn what_was_appended_comes_back() {
    let classes = ["new", "changed", "removed", "never was", "no change", "read again"];
    property(
        ProptestConfig::with_cases(64),
        &prop::collection::vec((changes(), any::<bool>()), 1..8),
        &classes,
        |updates, tally| {
            let (_folder, path) = place();
            let (mut cache, begin) = open(&path);
            prop_assert_eq!(begin, Found::Nothing);
            let mut state = State::new();
            for (changes, reopens) in updates {
                tally.add("no change", u64::from(changes.is_empty()));
                for (key, held) in &changes {
                    tally.count(match (state.contains_key(key), held.is_some()) {
                        (false, true) => "new",
                        (true, true) => "changed",
                        (true, false) => "removed",
                        (false, false) => "never was",
                    });
                }
                update(&mut cache, &mut state, changes);
                if reopens {
                    drop(cache);
                    let modified = fs::metadata(&path).unwrap().modified().unwrap();
                    let (again, found) = open(&path);
                    prop_assert_eq!(found, Found::Policy(state.clone(), modified));
                    tally.add("read again", u64::from(!state.is_empty()));
                    cache = again;
                }
            }
            drop(cache);
            prop_assert_eq!(super::state(&path), state);
            Ok(())
        },
    );
}

#[test]
fn there_is_nothing_at_first() {
    let (folder, path) = place();
    assert_eq!(found(&path), Found::Nothing);
    assert_eq!(found(&path), Found::Nothing);
    // Directories are made.
    assert_eq!(found(&folder.path().join("some/where/policy.cache")), Found::Nothing);
}

#[test]
fn an_empty_policy_is_not_nothing() {
    let (_folder, path) = place();
    open(&path).0.append(vec![], &State::new()).unwrap();
    assert_eq!(state(&path), State::new());
}

#[test]
fn it_is_known_since_the_file_was_last_modified() {
    let (_folder, path) = place();
    let last = three_updates(&path).pop().unwrap().0;
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    File::options().write(true).open(&path).unwrap().set_modified(then).unwrap();
    // Reading it makes it no younger, also when a part is cut off.
    assert_eq!(found(&path), Found::Policy(last.clone(), then));
    let file = File::options().append(true).open(&path).unwrap();
    (&file).write_all(b"half a record").unwrap();
    file.set_modified(then).unwrap();
    assert_eq!(found(&path), Found::Policy(last.clone(), then));
    // Confirming it does.
    let (cache, _) = open(&path);
    let before = SystemTime::now();
    cache.confirm().unwrap();
    drop(cache);
    let Found::Policy(same, known_at) = found(&path) else { panic!("no policy") };
    assert_eq!(same, last);
    assert!(known_at >= before - Duration::from_secs(1) && known_at <= SystemTime::now());
}

#[test]
fn an_update_without_changes_confirms() {
    let (_folder, path) = place();
    let (last, length_before) = three_updates(&path).pop().unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let (mut cache, _) = open(&path);
    cache.file.set_modified(then).unwrap();
    cache.append(vec![], &last).unwrap();
    assert_eq!(length(&path) as usize, length_before);
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > then);
}

#[test]
fn a_journal_of_much_that_no_longer_counts_is_written_anew() {
    let (_folder, path) = place();
    let (mut cache, mut state) = (open(&path).0, State::new());
    let body: Vec<u8> = vec![7; 128 << 10];
    let (mut longest, mut shrunk) = (0, 0);
    let mut before = 0;
    for i in 0..80 {
        let held = Held { version: i.to_string(), body: body.clone().into() };
        update(
            &mut cache,
            &mut state,
            vec![(endpoint("a"), Some(held)), (endpoint(&format!("b{i}")), Some(held_small(i)))],
        );
        let now = length(&path);
        shrunk += usize::from(now < before);
        (longest, before) = (longest.max(now), now);
    }
    assert_eq!(shrunk, 2);
    assert!(longest <= SMALL + (129 << 10) && before < SMALL, "{longest} {before}");
    assert_eq!(length(&path), cache.length);
    drop(cache);
    assert_eq!(super::state(&path), state);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "the draft has taken its place");
}

fn held_small(i: i32) -> Held {
    held(&i.to_string())
}

/// What is long because all of it counts isn't written anew with each update.
#[test]
fn a_long_journal_of_what_counts_goes_on() {
    let (_folder, path) = place();
    let (mut cache, mut state) = (open(&path).0, State::new());
    let much = (0..50).map(|i| {
        let held = Held { version: String::new(), body: vec![i; 128 << 10].into() };
        (endpoint(&i.to_string()), Some(held))
    });
    update(&mut cache, &mut state, much.collect());
    let mut before = length(&path);
    assert!(before > SMALL);
    for i in 0..10 {
        update(&mut cache, &mut state, vec![(endpoint("a"), Some(held_small(i)))]);
        let now = length(&path);
        assert!(now > before && now < before + 100);
        before = now;
    }
    drop(cache);
    assert_eq!(super::state(&path), state);
}

#[test]
fn nobody_else_may_read_it() {
    let (_folder, path) = place();
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let (mut cache, mut state) = (open(&path).0, State::new());
    assert_eq!(mode(), 0o600);
    for i in 0..2 {
        update(&mut cache, &mut state, vec![(endpoint("a"), Some(held_small(i)))]);
        assert_eq!(mode(), 0o600);
    }
}

#[test]
fn what_is_no_longer_trusted_is_written_anew() {
    let (_folder, path) = place();
    three_updates(&path);
    let (mut cache, _) = open(&path);
    cache.forget();
    let mut state = State::new();
    update(&mut cache, &mut state, vec![(endpoint("new"), Some(held("1")))]);
    drop(cache);
    assert_eq!(super::state(&path), state);
}

/// Better no policy than one that lacks what was acknowledged.
#[test]
fn an_append_that_fails_leaves_nothing() {
    let (_folder, path) = place();
    let mut last = three_updates(&path).pop().unwrap().0;
    let (mut cache, _) = open(&path);
    // No file is so long: the kernel refuses.
    (cache.length, cache.compact) = (1 << 62, 1 << 62);
    let change = vec![(endpoint("z"), Some(held("1")))];
    assert!(cache.append(change.clone(), &last).is_err());
    assert_eq!(length(&path), 0);
    // The next one has all of it.
    update(&mut cache, &mut last, change);
    drop(cache);
    assert_eq!(state(&path), last);
}

#[test]
fn a_journal_that_cannot_be_written_anew_is_empty() {
    let (_folder, path) = place();
    let last = three_updates(&path).pop().unwrap().0;
    let (mut cache, _) = open(&path);
    let draft = PathBuf::from(format!("{}.draft", path.display()));
    fs::create_dir(&draft).unwrap();
    cache.forget();
    assert!(cache.append(vec![], &last).is_err());
    drop(cache);
    assert_eq!(found(&path), Found::Nothing);
    fs::remove_dir(&draft).unwrap();
    open(&path).0.append(vec![], &last).unwrap();
    assert_eq!(state(&path), last);
}
