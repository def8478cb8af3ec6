//! What was cut short, and what is not what was written.

use super::*;

#[test]
fn a_last_record_that_was_cut_short_is_dropped() {
    let (_folder, path) = place();
    let states = three_updates(&path);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), states[2].1);
    for pair in states.windows(2) {
        let [(before, start), (_, end)] = pair else { unreachable!() };
        for cut in *start..*end {
            fs::write(&path, &bytes[..cut]).unwrap();
            let (mut cache, found) = open(&path);
            let Found::Policy(mut state, _) = found else { panic!("cut at {cut}: {found:?}") };
            assert_eq!(&state, before, "cut at {cut}");
            // What comes next stands behind what is whole.
            update(&mut cache, &mut state, vec![(endpoint("next"), Some(held("5")))]);
            drop(cache);
            assert_eq!(super::state(&path), state, "cut at {cut}");
        }
    }
}

#[test]
fn a_first_record_that_was_cut_short_is_damage() {
    let (_folder, path) = place();
    let first = three_updates(&path)[0].1;
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, b"").unwrap();
    assert_eq!(found(&path), Found::Nothing);
    for cut in 1..first {
        fs::write(&path, &bytes[..cut]).unwrap();
        let found = found(&path);
        let expected =
            if cut < MAGIC.len() { "doesn't begin like a policy cache" } else { "first record is cut short" };
        assert!(damage(&found).contains(expected), "cut at {cut}: {found:?}");
    }
}

#[test]
fn a_journal_in_which_anything_has_changed_is_damaged() {
    let (_folder, path) = place();
    three_updates(&path);
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        for change in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            let read = read(&bytes);
            assert!(read.is_err(), "byte {at} ^ {change:#x}: {read:?}");
        }
    }
}

proptest! {
    /// Bytes that are lost, doubled or put in the middle give no wrong policy, and no panic.
    #[test]
    fn what_is_not_what_was_written_is_never_a_policy_that_never_was(
        at in any::<prop::sample::Index>(),
        length in 0_usize..40,
        put in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let (_folder, path) = place();
        let states = three_updates(&path);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, put);
        if let Ok(Some((held, _))) = read(&bytes) {
            prop_assert!(states.iter().any(|(state, _)| *state == held), "{:?}", held);
        }
    }

    #[test]
    fn any_bytes_are_no_journal(bytes: Vec<u8>, begins: bool) {
        let mut journal = if begins { MAGIC.to_vec() } else { Vec::new() };
        journal.extend(&bytes);
        prop_assert!(journal.is_empty() || read(&journal).is_err());
    }
}

#[test]
fn a_damaged_journal_stays_as_it_is_until_the_next_update() {
    let (_folder, path) = place();
    three_updates(&path);
    let mut bytes = fs::read(&path).unwrap();
    bytes[30] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let (mut cache, found) = open(&path);
    assert_eq!(damage(&found), "record 1 isn't what was written");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    let mut state = State::new();
    update(&mut cache, &mut state, vec![(endpoint("new"), Some(held("1")))]);
    drop(cache);
    assert_eq!(super::state(&path), state);
}

#[test]
fn what_another_version_wrote_is_damage() {
    let entry = Entry { kind: 77, name: "x".to_owned(), gone: false, version: String::new(), body: Bytes::default() };
    let payload = Update { entries: vec![entry] }.encode_to_vec();
    let mut bytes = MAGIC.to_vec();
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(Fingerprint::of(&payload).to_le_bytes());
    bytes.extend(payload);
    assert_eq!(read(&bytes).unwrap_err(), "record 1 has a kind that this version doesn't know");
    bytes[MAGIC.len() - 2] = b'2';
    assert_eq!(read(&bytes).unwrap_err(), "it doesn't begin like a policy cache of this version");
}
