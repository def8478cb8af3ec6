//! Truncated and corrupted journals.

use super::*;

#[test]
fn a_truncated_last_record_is_dropped() {
    let (_dir, path) = temp_path();
    let states = three_updates(&path);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), states[2].1);
    for pair in states.windows(2) {
        let [(before, start), (_, end)] = pair else { unreachable!() };
        for cut in *start..*end {
            fs::write(&path, &bytes[..cut]).unwrap();
            let (mut cache, contents) = open(&path);
            let CacheContents::Policy(mut state, _) = contents else { panic!("cut at {cut}: {contents:?}") };
            assert_eq!(&state, before, "cut at {cut}");
            // The next record is appended after the last complete one.
            update(&mut cache, &mut state, vec![(endpoint("next"), Some(resource("5")))]);
            drop(cache);
            assert_eq!(load_policy(&path), state, "cut at {cut}");
        }
    }
}

#[test]
fn a_truncated_first_record_is_damage() {
    let (_dir, path) = temp_path();
    let first = three_updates(&path)[0].1;
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, b"").unwrap();
    assert_eq!(load(&path), CacheContents::Empty);
    for cut in 1..first {
        fs::write(&path, &bytes[..cut]).unwrap();
        let contents = load(&path);
        let expected = if cut < MAGIC.len() { "has no policy cache header" } else { "first record is truncated" };
        assert!(damage_reason(&contents).contains(expected), "cut at {cut}: {contents:?}");
    }
}

#[test]
fn any_changed_bit_or_byte_is_detected() {
    let (_dir, path) = temp_path();
    three_updates(&path);
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        for change in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            let replayed = replay(&bytes);
            assert!(replayed.is_err(), "byte {at} ^ {change:#x}: {replayed:?}");
        }
    }
}

proptest! {
    /// Removed or inserted bytes: the result is an error or a former state, never another policy or a panic.
    #[test]
    fn a_corrupted_journal_never_yields_a_policy_that_never_was(
        at in any::<prop::sample::Index>(),
        length in 0_usize..40,
        inserted in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let (_dir, path) = temp_path();
        let states = three_updates(&path);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, inserted);
        if let Ok(Some((resources, _))) = replay(&bytes) {
            prop_assert!(states.iter().any(|(state, _)| *state == resources), "{:?}", resources);
        }
    }

    #[test]
    fn random_bytes_are_rejected(bytes: Vec<u8>, has_header: bool) {
        let mut journal = if has_header { MAGIC.to_vec() } else { Vec::new() };
        journal.extend(&bytes);
        prop_assert!(journal.is_empty() || replay(&journal).is_err());
    }
}

#[test]
fn a_damaged_journal_is_unchanged_until_the_next_update() {
    let (_dir, path) = temp_path();
    three_updates(&path);
    let mut bytes = fs::read(&path).unwrap();
    bytes[30] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let (mut cache, contents) = open(&path);
    assert_eq!(damage_reason(&contents), "record 1 is corrupt: wrong fingerprint");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    let mut state = State::new();
    update(&mut cache, &mut state, vec![(endpoint("new"), Some(resource("1")))]);
    drop(cache);
    assert_eq!(load_policy(&path), state);
}

#[test]
fn a_journal_of_another_version_is_damage() {
    let entry =
        JournalEntry { kind: 77, name: "x".to_owned(), removed: false, version: String::new(), body: Bytes::default() };
    let payload = JournalUpdate { entries: vec![entry] }.encode_to_vec();
    let mut bytes = MAGIC.to_vec();
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(Fingerprint::of(&payload).to_le_bytes());
    bytes.extend(payload);
    assert_eq!(replay(&bytes).unwrap_err().to_string(), "record 1 has an unknown resource kind");
    bytes[MAGIC.len() - 2] = b'2';
    assert_eq!(replay(&bytes).unwrap_err().to_string(), "has no policy cache header of this version");
}
