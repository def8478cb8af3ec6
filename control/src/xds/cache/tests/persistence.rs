//! Persistence: replay, confirmation time, compaction, write errors.

use std::os::unix::fs::PermissionsExt;

use vipgate_coverage::property;

use super::*;

fn changes() -> impl Strategy<Value = Changes> {
    let kind = prop::sample::select(Kind::ALL.to_vec());
    let value = prop::option::weighted(0.7, ("[0-9a-f]{0,16}", prop::collection::vec(any::<u8>(), 0..40)));
    // Few names, so that keys repeat; sometimes any other.
    let name = prop_oneof![4 => "[ab]", 1 => "\\PC{0,3}"];
    let change = (kind, name, value).prop_map(|(kind, name, value)| {
        (key(kind, &name), value.map(|(version, body)| StoredResource { version, body: body.into() }))
    });
    prop::collection::vec(change, 0..6)
}

#[test]
fn appended_updates_are_replayed() {
    let classes = ["new", "changed", "removed", "unknown", "no change", "reopened"];
    property(
        ProptestConfig::with_cases(64),
        &prop::collection::vec((changes(), any::<bool>()), 1..8),
        &classes,
        |updates, coverage| {
            let (_dir, path) = temp_path();
            let (mut cache, initial) = open(&path);
            prop_assert_eq!(initial, CacheContents::Empty);
            let mut state = State::new();
            for (changes, reopens) in updates {
                coverage.add("no change", u64::from(changes.is_empty()));
                for (key, resource) in &changes {
                    coverage.count(match (state.contains_key(key), resource.is_some()) {
                        (false, true) => "new",
                        (true, true) => "changed",
                        (true, false) => "removed",
                        (false, false) => "unknown",
                    });
                }
                update(&mut cache, &mut state, changes);
                if reopens {
                    drop(cache);
                    let modified = fs::metadata(&path).unwrap().modified().unwrap();
                    let (reopened, contents) = open(&path);
                    prop_assert_eq!(contents, CacheContents::Policy(state.clone(), modified));
                    coverage.add("reopened", u64::from(!state.is_empty()));
                    cache = reopened;
                }
            }
            drop(cache);
            prop_assert_eq!(load_policy(&path), state);
            Ok(())
        },
    );
}

#[test]
fn a_new_journal_is_empty() {
    let (dir, path) = temp_path();
    assert_eq!(load(&path), CacheContents::Empty);
    assert_eq!(load(&path), CacheContents::Empty);
    // Missing directories are created.
    assert_eq!(load(&dir.path().join("some/where/policy.cache")), CacheContents::Empty);
}

#[test]
fn an_empty_policy_is_replayed_as_a_policy() {
    let (_dir, path) = temp_path();
    open(&path).0.append(vec![], &State::new()).unwrap();
    assert_eq!(load_policy(&path), State::new());
}

#[test]
fn the_confirmation_time_is_the_mtime() {
    let (_dir, path) = temp_path();
    let last = three_updates(&path).pop().unwrap().0;
    let earlier = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    File::options().write(true).open(&path).unwrap().set_modified(earlier).unwrap();
    // Opening doesn't change it, even if a truncated record is removed.
    assert_eq!(load(&path), CacheContents::Policy(last.clone(), earlier));
    let file = File::options().append(true).open(&path).unwrap();
    (&file).write_all(b"half a record").unwrap();
    file.set_modified(earlier).unwrap();
    assert_eq!(load(&path), CacheContents::Policy(last.clone(), earlier));
    // Confirming does.
    let (cache, _) = open(&path);
    let before = SystemTime::now();
    cache.confirm().unwrap();
    drop(cache);
    let CacheContents::Policy(resources, confirmed_at) = load(&path) else { panic!("no policy") };
    assert_eq!(resources, last);
    assert!(confirmed_at >= before - Duration::from_secs(1) && confirmed_at <= SystemTime::now());
}

#[test]
fn an_update_without_changes_confirms() {
    let (_dir, path) = temp_path();
    let (last, length_before) = three_updates(&path).pop().unwrap();
    let earlier = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let (mut cache, _) = open(&path);
    cache.file.set_modified(earlier).unwrap();
    cache.append(vec![], &last).unwrap();
    assert_eq!(length(&path) as usize, length_before);
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > earlier);
}

#[test]
fn a_journal_with_mostly_outdated_records_is_compacted() {
    let (_dir, path) = temp_path();
    let (mut cache, mut state) = (open(&path).0, State::new());
    let body: Vec<u8> = vec![7; 128 << 10];
    let (mut max, mut compactions) = (0, 0);
    let mut before = 0;
    for i in 0..80 {
        let large = StoredResource { version: i.to_string(), body: body.clone().into() };
        update(
            &mut cache,
            &mut state,
            vec![(endpoint("a"), Some(large)), (endpoint(&format!("b{i}")), Some(small(i)))],
        );
        let now = length(&path);
        compactions += usize::from(now < before);
        (max, before) = (max.max(now), now);
    }
    assert_eq!(compactions, 2);
    assert!(max <= MIN_COMPACTION_LENGTH + (129 << 10) && before < MIN_COMPACTION_LENGTH, "{max} {before}");
    assert_eq!(length(&path), cache.length);
    drop(cache);
    assert_eq!(load_policy(&path), state);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "the draft was renamed");
}

fn small(i: i32) -> StoredResource {
    resource(&i.to_string())
}

/// A journal that is long without outdated records isn't compacted with each update.
#[test]
fn a_long_journal_of_current_records_is_appended_to() {
    let (_dir, path) = temp_path();
    let (mut cache, mut state) = (open(&path).0, State::new());
    let many = (0..50).map(|i| {
        let large = StoredResource { version: String::new(), body: vec![i; 128 << 10].into() };
        (endpoint(&i.to_string()), Some(large))
    });
    update(&mut cache, &mut state, many.collect());
    let mut before = length(&path);
    assert!(before > MIN_COMPACTION_LENGTH);
    for i in 0..10 {
        update(&mut cache, &mut state, vec![(endpoint("a"), Some(small(i)))]);
        let now = length(&path);
        assert!(now > before && now < before + 100);
        before = now;
    }
    drop(cache);
    assert_eq!(load_policy(&path), state);
}

#[test]
fn only_the_owner_can_read_the_file() {
    let (_dir, path) = temp_path();
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let (mut cache, mut state) = (open(&path).0, State::new());
    assert_eq!(mode(), 0o600);
    for i in 0..2 {
        update(&mut cache, &mut state, vec![(endpoint("a"), Some(small(i)))]);
        assert_eq!(mode(), 0o600);
    }
}

#[test]
fn an_invalidated_journal_is_rewritten() {
    let (_dir, path) = temp_path();
    three_updates(&path);
    let (mut cache, _) = open(&path);
    cache.invalidate();
    let mut state = State::new();
    update(&mut cache, &mut state, vec![(endpoint("new"), Some(resource("1")))]);
    drop(cache);
    assert_eq!(load_policy(&path), state);
}

/// No policy is better than one without an acknowledged update.
#[test]
fn a_failed_append_empties_the_journal() {
    let (_dir, path) = temp_path();
    let mut last = three_updates(&path).pop().unwrap().0;
    let (mut cache, _) = open(&path);
    // Beyond the maximum file size: the write fails.
    (cache.length, cache.compacted_length) = (1 << 62, 1 << 62);
    let change = vec![(endpoint("z"), Some(resource("1")))];
    assert!(cache.append(change.clone(), &last).is_err());
    assert_eq!(length(&path), 0);
    // The next update writes all resources.
    update(&mut cache, &mut last, change);
    drop(cache);
    assert_eq!(load_policy(&path), last);
}

#[test]
fn a_failed_compaction_empties_the_journal() {
    let (_dir, path) = temp_path();
    let last = three_updates(&path).pop().unwrap().0;
    let (mut cache, _) = open(&path);
    let draft = PathBuf::from(format!("{}.draft", path.display()));
    fs::create_dir(&draft).unwrap();
    cache.invalidate();
    assert!(cache.append(vec![], &last).is_err());
    drop(cache);
    assert_eq!(load(&path), CacheContents::Empty);
    fs::remove_dir(&draft).unwrap();
    open(&path).0.append(vec![], &last).unwrap();
    assert_eq!(load_policy(&path), last);
}
