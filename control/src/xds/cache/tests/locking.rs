//! Locking: one process per cache.

use super::*;

#[test]
fn a_locked_cache_is_rejected() {
    let (_dir, path) = temp_path();
    two_writes(&path);
    let (cache, _) = open(&path);
    let error = Cache::open(&path).unwrap_err();
    assert_eq!(error.to_string(), "is in use by another process: each gateway needs its own");
    drop(cache);
    assert_eq!(load_policy(&path), two_states()[1]);
}

/// Although the owner replaces the file meanwhile.
#[test]
fn a_process_that_waited_for_the_lock_reads_the_final_state() {
    let (_dir, path) = temp_path();
    let first = open(&path).0;
    let waiting = thread::spawn({
        let path = path.clone();
        move || load_policy(&path)
    });
    for state in &two_states() {
        thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished());
        store(&first, state);
    }
    drop(first);
    assert_eq!(waiting.join().unwrap(), two_states()[1]);
}

#[test]
fn a_cache_may_have_any_name() {
    let (dir, _) = temp_path();
    for name in ["policy", "policy.draft", "policy.draft.draft", "policy.lock", ".policy"] {
        let path = dir.path().join(name);
        two_writes(&path);
        assert_eq!(load_policy(&path), two_states()[1]);
    }
}
