//! Persistence: content, confirmation time, write errors.

use std::os::unix::fs::PermissionsExt;

use super::*;

proptest! {
    #[test]
    fn what_was_written_is_read(
        state in prop::collection::btree_map(
            (prop::sample::select(Kind::ALL.to_vec()), "\\PC{0,3}").prop_map(|(kind, name)| key(kind, &name)),
            ("[0-9a-f]{0,16}", prop::collection::vec(any::<u8>(), 0..40))
                .prop_map(|(version, body)| StoredResource { version, body: body.into() }),
            0..20,
        ),
    ) {
        let (_dir, path) = temp_path();
        store(&open(&path).0, &state);
        prop_assert_eq!(load(&path), CacheContents::Policy(state, CONFIRMED_AT));
    }
}

#[test]
fn a_new_cache_is_empty() {
    let (dir, path) = temp_path();
    assert_eq!(load(&path), CacheContents::Empty);
    assert_eq!(load(&path), CacheContents::Empty);
    // Missing directories are created.
    assert_eq!(load(&dir.path().join("some/where/policy.cache")), CacheContents::Empty);
}

#[test]
fn an_empty_policy_is_read_as_a_policy() {
    let (_dir, path) = temp_path();
    store(&open(&path).0, &State::new());
    assert_eq!(load_policy(&path), State::new());
}

#[test]
fn the_confirmation_time_is_the_mtime() {
    let (_dir, path) = temp_path();
    let bytes = two_writes(&path);
    // Opening doesn't change it.
    let (cache, contents) = open(&path);
    assert_eq!(contents, CacheContents::Policy(two_states()[1].clone(), CONFIRMED_AT));
    let later = CONFIRMED_AT + Duration::from_secs(1_700_000_000);
    cache.store(None, later).unwrap();
    drop(cache);
    assert_eq!(load(&path), CacheContents::Policy(two_states()[1].clone(), later));
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn a_file_that_was_removed_is_not_confirmed() {
    let (_dir, path) = temp_path();
    two_writes(&path);
    let (cache, _) = open(&path);
    fs::remove_file(&path).unwrap();
    assert_eq!(cache.store(None, CONFIRMED_AT).unwrap_err().kind(), ErrorKind::NotFound);
    store(&cache, &two_states()[1]);
    drop(cache);
    assert_eq!(load_policy(&path), two_states()[1]);
}

#[test]
fn only_the_owner_can_read_the_file_and_nothing_else_is_left() {
    let (dir, path) = temp_path();
    let (cache, _) = open(&path);
    for state in &two_states() {
        store(&cache, state);
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["policy.cache", "policy.cache.lock"]);
        for name in names {
            let mode = fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }
}

/// No policy is better than one without an acknowledged update.
#[test]
fn a_failed_write_leaves_no_older_policy() {
    let (_dir, path) = temp_path();
    two_writes(&path);
    let (cache, _) = open(&path);
    let draft = PathBuf::from(format!("{}.draft", path.display()));
    fs::create_dir(&draft).unwrap();
    assert!(cache.store(Some(&encode(&two_states()[0])), CONFIRMED_AT).is_err());
    drop(cache);
    assert_eq!(load(&path), CacheContents::Empty);
    fs::remove_dir(&draft).unwrap();
    store(&open(&path).0, &two_states()[0]);
    assert_eq!(load_policy(&path), two_states()[0]);
}
