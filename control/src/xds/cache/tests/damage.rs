//! Damaged files, and those of another version: none of them is a policy. For what isn't whole see `replaced_file.rs`.

use super::*;

const HEADER: &[u8] = b"vipgate policy cache 2\n";

/// What is wrong with these bytes of a cache.
fn damage(bytes: &[u8]) -> String {
    match decode_file(bytes) {
        Err(damage) => damage.to_string(),
        Ok(resources) => panic!("{} bytes are a policy: {resources:?}", bytes.len()),
    }
}

proptest! {
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
    for (length, expected) in [(0, Damage::NoHeader("policy cache")), (bytes.len() - 1, Damage::WrongFingerprint)] {
        fs::write(&path, &bytes[..length]).unwrap();
        assert_eq!(load(&path), CacheContents::Damaged(expected));
    }
    fs::write(&path, &bytes).unwrap();
    let (cache, contents) = open(&path);
    assert_eq!(contents, CacheContents::Damaged(Damage::WrongFingerprint));
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
