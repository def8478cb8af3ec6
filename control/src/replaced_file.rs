//! Files that are replaced whole: a concurrent reader, and the next process after a crash, sees the old or the new content.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Replaces a file by these parts, one after the other; its directory is created. The draft beside it, which a crash may
/// leave, has the file's whole name, so that files in one directory have different ones.
///
/// # Errors
/// If it can't be written; the file is as it was then.
pub(crate) fn replace(path: &Path, mode: u32, parts: &[&[u8]]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    // Not opened: it may have another mode, or be a link to somewhere else.
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write_synced(Path::new(&draft), mode, parts).and_then(|()| fs::rename(&draft, path)).inspect_err(|_| {
        // It may be what has filled the disk.
        let _ = fs::remove_file(&draft);
    })?;
    // After a power failure the name refers to the new file. A file system that can't do that has it a little later.
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let _ = File::open(directory.unwrap_or(Path::new("."))).and_then(|directory| directory.sync_all());
    Ok(())
}

fn write_synced(path: &Path, mode: u32, parts: &[&[u8]]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    // After a power failure the name must not refer to an incomplete file.
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

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
}
