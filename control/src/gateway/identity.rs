//! The secret of this process, handed to the next one on this host beside the sessions (`sessions.state`): so a gateway that is started
//! again has its name at once, while a process elsewhere waits until the lease is over.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::kept;
use crate::config::Config;
use crate::members::Secret;
use crate::text_file::read_regular;

/// Only root reads it.
const MODE: u32 = 0o600;

/// Leaves this process's secret to the next one; returns that of the process before. Without a place for it, or where the kernel
/// refuses, the next one waits.
pub(super) fn exchange(config: &Config, own: &Secret) -> Option<Secret> {
    let path = path(config)?;
    let before = read_regular(&path).ok().and_then(|bytes| Secret::from_slice(&bytes));
    if let Err(error) = leave(&path, own) {
        let file = path.display();
        tracing::warn!(event = "state_lost", %file, %error, "after a restart this gateway may wait for its name until a lease is over");
    }
    before
}

/// Nobody comes after this process.
pub(super) fn forget(config: &Config) -> io::Result<()> {
    match path(config).map_or(Ok(()), fs::remove_file) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Beside the folder of the sessions, in which all files are workers'.
fn path(config: &Config) -> Option<PathBuf> {
    let mut path = kept::folder(config)?.into_os_string();
    path.push(".secret");
    Some(path.into())
}

/// In one step: a process that reads it meanwhile finds the old or the new one.
fn leave(path: &Path, secret: &Secret) -> io::Result<()> {
    let mut draft: OsString = path.into();
    draft.push("~");
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(&draft)?;
    file.write_all(secret.bytes())?;
    fs::rename(&draft, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_next_process_on_this_host_learns_the_secret_and_nobody_else_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gw-a.secret");
        let (one, next) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        for secret in [&one, &next] {
            leave(&path, secret).unwrap();
            assert_eq!(Secret::from_slice(&read_regular(&path).unwrap()).as_ref(), Some(secret));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
    }
}
