//! Process secret, left to the next process on this host beside the session tables (`sessions.state`). With it, a
//! restarted gateway takes over its name at once, while a process on another host waits until the lease expires.

use std::path::Path;

use crate::command_error::CommandError;
use crate::config::Config;
use crate::gateway::session_store::{SECRET, path_beside, read_left};
use crate::membership::Secret;
use crate::replaced_file::Format;

/// Readable by root only.
const FORMAT: Format = Format { name: "process secret", version: 1, mode: 0o600 };

/// Generates the secret of this process.
///
/// # Errors
/// When the kernel provides no random numbers.
pub(super) fn generate() -> Result<Secret, getrandom::Error> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(Secret::new(bytes))
}

/// Writes the secret of this process for the next one, and returns that of the previous process. If it can't be
/// written, the next process has to wait for the lease to expire.
///
/// # Errors
/// When that of the previous process can't be read for the moment.
pub(super) fn exchange(config: &Config, own: &Secret) -> Result<Option<Secret>, CommandError> {
    path_beside(config, SECRET).map_or(Ok(None), |path| exchange_at(&path, own))
}

fn exchange_at(path: &Path, own: &Secret) -> Result<Option<Secret>, CommandError> {
    let previous = read_left(path, &FORMAT)?.and_then(|bytes| Secret::from_slice(&bytes));
    if let Err(error) = FORMAT.write(path, own.bytes()) {
        let file = path.display();
        tracing::warn!(
            event = "state_lost",
            %file,
            %error,
            "cannot store the process secret: after a restart this gateway may wait until its lease expires"
        );
    }
    Ok(previous)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn only_a_secret_that_cannot_be_read_for_the_moment_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw-a.secret");
        let secrets = [(); 3].map(|()| generate().unwrap());
        assert_eq!(exchange_at(&path, &secrets[0]).unwrap(), None);
        assert_eq!(exchange_at(&path, &secrets[1]).unwrap().as_ref(), Some(&secrets[0]));
        // Neither is one that isn't as it was written.
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        for damaged in [b"something else".as_slice(), &bytes, secrets[0].bytes()] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(exchange_at(&path, &secrets[2]).unwrap(), None);
        }
        fs::remove_file(&path).unwrap();
        // Nothing is mapped at address 0: reading fails with EIO.
        symlink("/proc/self/mem", &path).unwrap();
        exchange_at(&path, &secrets[0]).unwrap_err();
        assert!(fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[test]
    fn the_next_process_can_read_the_secret_and_only_root_has_permission() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw-a.secret");
        let (first, second) = (generate().unwrap(), generate().unwrap());
        for secret in [&first, &second] {
            exchange_at(&path, secret).unwrap();
            assert_eq!(Secret::from_slice(&FORMAT.read(&path).unwrap().unwrap()).as_ref(), Some(secret));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, FORMAT.mode);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    }
}
