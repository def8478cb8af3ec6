//! Truncated and corrupted files: none of them is a policy, and none is an older one.

use super::*;

const HEADER: &[u8] = b"vipgate policy cache 2\n";

/// What is wrong with these bytes of a cache.
fn damage(bytes: &[u8]) -> String {
    match decode_file(bytes) {
        Err(damage) => damage.to_string(),
        Ok(resources) => panic!("{} bytes are a policy: {resources:?}", bytes.len()),
    }
}

#[test]
fn a_file_that_is_cut_anywhere_is_no_policy() {
    let (_dir, path) = temp_path();
    let bytes = two_writes(&path);
    for cut in 0..bytes.len() {
        fs::write(&path, &bytes[..cut]).unwrap();
        let CacheContents::Damaged(damage) = load(&path) else { panic!("cut at {cut}") };
        let expected = match cut {
            _ if cut < HEADER.len() => "has no policy cache header of this version",
            _ if cut < HEADER.len() + 8 => "is truncated",
            _ => "is truncated or corrupt: wrong fingerprint",
        };
        assert_eq!(damage.to_string(), expected, "cut at {cut}");
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(load_policy(&path), two_states()[1]);
}

#[test]
fn a_file_with_bytes_behind_its_end_is_no_policy() {
    let (_dir, path) = temp_path();
    let bytes = two_writes(&path);
    for more in [b"\0".as_slice(), b"\0\0\0\0", b"\n", &bytes] {
        assert_eq!(damage(&[&*bytes, more].concat()), "is truncated or corrupt: wrong fingerprint");
    }
}

/// A file system may have the length of a file, but zeros where it hasn't written.
#[test]
fn a_file_that_ends_in_zeros_is_no_policy() {
    let (_dir, path) = temp_path();
    let bytes = two_writes(&path);
    for cut in 0..bytes.len() {
        let mut zeroed = bytes.clone();
        zeroed[cut..].fill(0);
        if zeroed != bytes {
            damage(&zeroed);
        }
    }
}

#[test]
fn any_changed_bit_or_byte_is_detected() {
    let (_dir, path) = temp_path();
    let bytes = two_writes(&path);
    for at in 0..bytes.len() {
        for change in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            let decoded = decode_file(&bytes);
            assert!(decoded.is_err(), "byte {at} ^ {change:#x}: {decoded:?}");
        }
    }
}

proptest! {
    /// Removed or inserted bytes: never another policy, never a panic.
    #[test]
    fn a_corrupted_file_never_yields_another_policy(
        at in any::<prop::sample::Index>(),
        length in 0_usize..40,
        inserted in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let (_dir, path) = temp_path();
        let mut bytes = two_writes(&path);
        let at = at.index(bytes.len());
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, inserted);
        if let Ok(resources) = decode_file(&bytes) {
            prop_assert_eq!(&resources, &two_states()[1]);
        }
    }

    #[test]
    fn random_bytes_are_rejected(bytes: Vec<u8>, has_header: bool) {
        let mut file = if has_header { HEADER.to_vec() } else { Vec::new() };
        file.extend(&bytes);
        prop_assert!(decode_file(&file).is_err());
    }

    /// Even if the fingerprint is right.
    #[test]
    fn random_content_does_not_panic(content: Vec<u8>) {
        let _ = decode_file(&FORMAT.file(&content));
    }
}

#[test]
fn a_damaged_file_is_unchanged_until_the_next_update() {
    let (_dir, path) = temp_path();
    let mut bytes = two_writes(&path);
    bytes[50] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let (cache, contents) = open(&path);
    assert_eq!(contents, CacheContents::Damaged(Damage::WrongFingerprint.into()));
    assert_eq!(fs::read(&path).unwrap(), bytes);
    store(&cache, &two_states()[0]);
    drop(cache);
    assert_eq!(load_policy(&path), two_states()[0]);
}

#[test]
fn a_file_of_another_version_is_no_policy() {
    let (_dir, path) = temp_path();
    let mut bytes = two_writes(&path);
    for version in *b"139" {
        bytes[HEADER.len() - 2] = version;
        assert_eq!(damage(&bytes), "has no policy cache header of this version");
    }
    let of_kind = |kind| CachedResource { kind, name: "x".to_owned(), version: String::new(), body: Bytes::default() };
    let content = [of_kind(1), of_kind(77)].map(|resource| resource.encode_length_delimited_to_vec()).concat();
    assert_eq!(damage(&FORMAT.file(&content)), "resource 2 has an unknown kind");
    let bytes = FORMAT.file(&[1, 0xff]);
    assert!(damage(&bytes).starts_with("resource 1: "), "{}", damage(&bytes));
}
