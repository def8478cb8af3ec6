//! One journal, one process; and places where there can't be any.

use super::*;

#[test]
fn a_journal_in_use_is_refused() {
    let (_folder, path) = place();
    three_updates(&path);
    let (cache, _) = open(&path);
    let error = Cache::open(&path).unwrap_err();
    assert!(matches!(error, CacheError::InUse(_)), "{error}");
    let expected =
        format!("policy.server.cache: {} is in use by another process: each gateway needs its own", path.display());
    assert_eq!(error.to_string(), expected);
    drop(cache);
    assert_eq!(state(&path).len(), 3);
}

/// Who waits for the lock gets what the other left behind, also if that was written anew meanwhile.
#[test]
fn who_waits_gets_what_is_there_in_the_end() {
    let (_folder, path) = place();
    let (mut first, mut state) = (open(&path).0, State::new());
    let waiting = thread::spawn({
        let path = path.clone();
        move || found(&path)
    });
    thread::sleep(Duration::from_millis(100));
    // The first update of all: a new file takes the place of the one that the other waits for.
    update(&mut first, &mut state, vec![(endpoint("a"), Some(held("1")))]);
    thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished());
    update(&mut first, &mut state, vec![(endpoint("b"), Some(held("2")))]);
    drop(first);
    let Found::Policy(found, _) = waiting.join().unwrap() else { panic!("no policy") };
    assert_eq!(found, state);
}

#[test]
fn a_journal_may_have_any_name() {
    let (folder, _) = place();
    for name in ["policy", "policy.draft", "policy.draft.draft", ".policy"] {
        let path = folder.path().join(name);
        let last = three_updates(&path).pop().unwrap().0;
        assert_eq!(state(&path), last);
    }
}

#[test]
fn a_place_where_none_can_be_is_named() {
    let (folder, path) = place();
    fs::write(&path, "").unwrap();
    let inside_a_file = path.join("policy.cache");
    for bad in [&*inside_a_file, folder.path(), Path::new("/proc/nowhere/policy.cache")] {
        let error = Cache::open(bad).unwrap_err();
        assert!(matches!(error, CacheError::Io { .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("policy.server.cache: {}: ", bad.display())), "{error}");
    }
}
