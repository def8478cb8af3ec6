//! What is read is exactly what was written last, or nothing.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use proptest::prelude::*;

use super::*;

const FORMAT: Format = Format { name: "test file", version: 3, mode: 0o600 };
const HEADER: &[u8] = b"vipgate test file 3\n";
const CONTENT: &[u8] = b"a content that is longer than a fingerprint, with zeros \0\0 in it, but not at its end";

#[test]
fn a_file_is_replaced_with_its_mode_and_a_draft_of_before_does_not_matter() {
    let directory = tempfile::tempdir().unwrap();
    let (path, other) = (directory.path().join("new/file"), directory.path().join("other"));
    fs::write(&other, "other").unwrap();
    for (mode, content) in [(0o600, "first"), (0o640, "second")] {
        replace(&path, mode, &[content.as_bytes(), b"!"]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{content}!"));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
        symlink(&other, directory.path().join("new/file.draft")).unwrap();
    }
    assert_eq!(fs::read_to_string(other).unwrap(), "other", "nothing is written through a link");
}

#[test]
fn a_file_that_cannot_be_replaced_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    replace(&path, 0o600, &[b"old"]).unwrap();
    fs::create_dir(directory.path().join("file.draft")).unwrap();
    assert!(replace(&path, 0o600, &[b"new"]).is_err());
    assert_eq!(fs::read_to_string(path).unwrap(), "old");
}

#[test]
fn no_draft_is_left_by_a_failure() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::create_dir(&path).unwrap();
    assert!(replace(&path, 0o600, &[b"new"]).is_err());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_file_in_a_format_is_read_as_it_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    assert_eq!(FORMAT.read(&path).unwrap_err().kind(), ErrorKind::NotFound);
    for content in [b"".as_slice(), CONTENT] {
        FORMAT.write(&path, content).unwrap();
        assert_eq!(FORMAT.read(&path).unwrap().unwrap(), content);
        assert_eq!(fs::read(&path).unwrap(), FORMAT.file(content));
        for other in [Format { name: "other file", ..FORMAT }, Format { version: 4, ..FORMAT }] {
            let damage = other.read(&path).unwrap().unwrap_err();
            assert_eq!(damage.to_string(), format!("has no {} header of this version", other.name));
        }
    }
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let bytes = FORMAT.file(CONTENT);
    for cut in 0..bytes.len() {
        let expected = match cut {
            _ if cut < HEADER.len() => "has no test file header of this version",
            _ if cut < HEADER.len() + 8 => "is truncated",
            _ => "is truncated or corrupt: wrong fingerprint",
        };
        assert_eq!(FORMAT.content(&bytes[..cut]).unwrap_err().to_string(), expected, "cut at {cut}");
    }
}

#[test]
fn a_file_with_bytes_behind_its_end_is_refused() {
    let bytes = FORMAT.file(CONTENT);
    for more in [b"\0".as_slice(), b"\0\0\0\0", b"\n", &bytes] {
        assert_eq!(FORMAT.content(&[&*bytes, more].concat()), Err(Damage::WrongFingerprint));
    }
}

/// A file system may have the length of a file, but zeros where it hasn't written.
#[test]
fn a_file_that_ends_in_zeros_is_refused() {
    let bytes = FORMAT.file(CONTENT);
    for cut in 0..bytes.len() {
        let mut zeroed = bytes.clone();
        zeroed[cut..].fill(0);
        assert!(FORMAT.content(&zeroed).is_err(), "zeros from {cut}");
    }
}

#[test]
fn any_changed_bit_or_byte_is_detected() {
    let bytes = FORMAT.file(CONTENT);
    for at in 0..bytes.len() {
        for change in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            assert!(FORMAT.content(&bytes).is_err(), "byte {at} ^ {change:#x}");
        }
    }
}

proptest! {
    /// Removed or inserted bytes: never another content, never a panic.
    #[test]
    fn a_corrupted_file_never_yields_another_content(
        at in any::<prop::sample::Index>(),
        length in 0_usize..40,
        inserted in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let mut bytes = FORMAT.file(CONTENT);
        let at = at.index(bytes.len());
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, inserted);
        if let Ok(content) = FORMAT.content(&bytes) {
            prop_assert_eq!(content, CONTENT);
        }
    }

    #[test]
    fn random_bytes_are_rejected(bytes: Vec<u8>, has_header: bool) {
        let mut file = if has_header { HEADER.to_vec() } else { Vec::new() };
        file.extend(&bytes);
        prop_assert!(FORMAT.content(&file).is_err());
    }
}

#[test]
fn a_file_that_could_not_be_read_is_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let error = FORMAT.write(&path, &vec![0; MAX_FILE_BYTES as usize]).unwrap_err();
    assert_eq!(error.to_string(), "the test file would be longer than 256 MiB");
    assert!(!path.exists());
}
