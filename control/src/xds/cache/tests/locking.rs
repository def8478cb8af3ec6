//! Locking: one process per journal; and invalid paths.

use super::*;

#[test]
fn a_locked_journal_is_rejected() {
    let (_dir, path) = temp_path();
    three_updates(&path);
    let (cache, _) = open(&path);
    let error = Cache::open(&path).unwrap_err();
    assert!(matches!(error, CacheError::InUse(_)), "{error}");
    let expected =
        format!("policy.server.cache: {} is in use by another process: each gateway needs its own", path.display());
    assert_eq!(error.to_string(), expected);
    drop(cache);
    assert_eq!(load_policy(&path).len(), 3);
}

/// Even if the owner has replaced the file (compaction) meanwhile.
#[test]
fn a_process_that_waited_for_the_lock_reads_the_final_state() {
    let (_dir, path) = temp_path();
    let (mut first, mut state) = (open(&path).0, State::new());
    let waiting = thread::spawn({
        let path = path.clone();
        move || load(&path)
    });
    thread::sleep(Duration::from_millis(100));
    // The first update replaces the file whose lock the thread waits for.
    update(&mut first, &mut state, vec![(endpoint("a"), Some(resource("1")))]);
    thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished());
    update(&mut first, &mut state, vec![(endpoint("b"), Some(resource("2")))]);
    drop(first);
    let CacheContents::Policy(resources, _) = waiting.join().unwrap() else { panic!("no policy") };
    assert_eq!(resources, state);
}

#[test]
fn a_journal_may_have_any_name() {
    let (dir, _) = temp_path();
    for name in ["policy", "policy.draft", "policy.draft.draft", ".policy"] {
        let path = dir.path().join(name);
        let last = three_updates(&path).pop().unwrap().0;
        assert_eq!(load_policy(&path), last);
    }
}

#[test]
fn an_invalid_path_is_named_in_the_error() {
    let (dir, path) = temp_path();
    fs::write(&path, "").unwrap();
    let inside_a_file = path.join("policy.cache");
    for invalid in [&*inside_a_file, dir.path(), Path::new("/proc/nowhere/policy.cache")] {
        let error = Cache::open(invalid).unwrap_err();
        assert!(matches!(error, CacheError::Io { .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("policy.server.cache: {}: ", invalid.display())), "{error}");
    }
}
