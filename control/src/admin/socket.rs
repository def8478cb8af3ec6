//! Socket file of an admin API. The file is created atomically with its final mode, replaces a stale
//! socket but never one in use or any other file, and is removed when the gateway stops.

use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use tokio::net::{UnixListener, UnixStream};

use super::client::Client;

/// Access for root and the socket's group only.
const MODE: u32 = 0o660;
const DIRECTORY_MODE: u32 = 0o755;
/// Timeout for the greeting of a gateway that has the socket already.
const IDENTIFY_TIMEOUT: Duration = Duration::from_secs(1);

/// The listening socket. Dropping the file removes it.
#[derive(Debug)]
pub struct Socket {
    /// Accepts connections, see [`super::serve`].
    pub listener: UnixListener,
    /// The socket in the file system.
    pub file: SocketFile,
}

/// The socket in the file system, removed when dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode: another process may have replaced the file meanwhile.
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // It may be removed already.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens the socket; replaces a stale one.
///
/// # Errors
/// When the socket is in use, the path is another kind of file, or a system call fails.
pub async fn bind(path: &Path) -> io::Result<Socket> {
    let io_error = |action, error| failed(action, path, &error);
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        let created = fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory);
        created.map_err(|error| io_error("create the directory of", error))?;
    }
    check_unused(path).await?;
    // Created under a temporary name: it never appears with a wrong mode, and replaces a stale socket atomically.
    let mut draft = path.as_os_str().to_owned();
    draft.push("~");
    let draft = PathBuf::from(draft);
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(io_error("remove the stale draft beside", error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&draft).map_err(|error| io_error("open", error))?;
    let found = fs::symlink_metadata(&draft).map_err(|error| io_error("stat", error))?;
    // From here on, an error removes the draft.
    let mut file = SocketFile { path: draft.clone(), identity: (found.dev(), found.ino()) };
    let mode = fs::Permissions::from_mode(MODE);
    fs::set_permissions(&draft, mode).map_err(|error| io_error("set the mode of", error))?;
    fs::rename(&draft, path).map_err(|error| io_error("rename to", error))?;
    path.clone_into(&mut file.path);
    Ok(Socket { listener, file })
}

/// Whether a connection failed because nobody listens: reset is what one gets that a process hasn't accepted when it ends.
fn has_ended(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound};
    matches!(error.kind(), ConnectionRefused | ConnectionReset | NotFound)
}

fn failed(action: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("admin.socket: cannot {action} {}: {error}", path.display()))
}

/// The error for a socket on which a process listens.
fn in_use(path: &Path, owner: &str) -> io::Error {
    let text = format!("admin.socket: {owner} answers on {} already; give each gateway its own socket", path.display());
    io::Error::new(io::ErrorKind::AddrInUse, text)
}

/// Fails unless the path is free or a stale socket.
async fn check_unused(path: &Path) -> io::Result<()> {
    let io_error = |action, error| failed(action, path, &error);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("stat", error)),
        Ok(found) if !found.file_type().is_socket() => {
            let text = format!("admin.socket: {} exists and is no socket; choose another path", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Err(error) if has_ended(&error) => Ok(()),
        // Its backlog is full: the process is overloaded but alive.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(in_use(path, "an overloaded process")),
        Err(error) => Err(io_error("connect to", error)),
        Ok(stream) => {
            let other = tokio::time::timeout(IDENTIFY_TIMEOUT, Client::identify(path, stream)).await;
            let owner = match other {
                Ok(Ok(other)) => format!("the {} {} (pid {})", other.service, other.name, other.pid),
                _ if UnixStream::connect(path).await.is_err_and(|error| has_ended(&error)) => return Ok(()),
                _ => "another process".to_owned(),
            };
            Err(in_use(path, &owner))
        }
    }
}
