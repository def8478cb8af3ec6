//! Policy cache: the last acknowledged policy on disk, for a start without the policy server. One file that is replaced
//! whole (`replaced_file.rs`); its content is a length-delimited message for each resource.
//!
//! A file that isn't whole, of another version or damaged in any other way is no policy: without one, the gateway fails
//! closed. The mtime is the last time at which the content was confirmed to be the server's.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use prost::Message;

use super::resource::{Key, Kind};
use crate::replaced_file::{Damage, Format};
use crate::xds::store::StoredResource;

/// Only the owner reads it: it says which pods there are.
const FORMAT: Format = Format { name: "policy cache", version: 2, mode: 0o600 };
/// Maximum wait for the lock: a killed process may hold it until its exit is complete.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// The content of a cache when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub enum CacheContents {
    /// No file.
    Empty,
    /// A policy, and when it was last confirmed to be the server's.
    Policy(BTreeMap<Key, StoredResource>, SystemTime),
    /// The file is damaged, and how.
    Damaged(Damage),
}

/// The cache of this process, which nobody else writes.
#[derive(Debug)]
pub struct Cache {
    path: PathBuf,
    /// Of a file beside the cache, which itself is replaced.
    _lock: File,
}

/// A resource in the file.
#[derive(Clone, PartialEq, Message)]
struct CachedResource {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    version: String,
    #[prost(bytes = "bytes", tag = "4")]
    body: prost::bytes::Bytes,
}

impl Cache {
    /// Locks the cache and reads it. A damaged file stays unchanged until the first update.
    ///
    /// # Errors
    /// If it can't be locked or read.
    pub fn open(path: &Path) -> io::Result<(Self, CacheContents)> {
        Self::open_within(path, LOCK_TIMEOUT)
    }

    /// Opens a cache that couldn't be opened before, without waiting for the lock. Its content isn't used.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn open_later(path: &Path) -> io::Result<Self> {
        Self::open_within(path, Duration::ZERO).map(|(cache, _)| cache)
    }

    fn open_within(path: &Path, timeout: Duration) -> io::Result<(Self, CacheContents)> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let lock = lock(path, timeout)?;
        Ok((Self { path: path.to_owned(), _lock: lock }, read(path)?))
    }

    /// Replaces the content by what [`encode`] returned, if it is new, and stores when it was last confirmed.
    ///
    /// # Errors
    /// If that fails. There is no file if the new content can't be written: no policy is better than one without an
    /// acknowledged update.
    pub(super) fn store(&self, content: Option<&[u8]>, confirmed_at: SystemTime) -> io::Result<()> {
        if let Some(content) = content {
            FORMAT.write(&self.path, content).inspect_err(|_| {
                // If this fails too, its mtime says how old it is.
                let _ = fs::remove_file(&self.path);
            })?;
        }
        File::open(&self.path)?.set_modified(confirmed_at)
    }
}

/// Encodes a policy. The resources are encoded already, as the server has sent them.
pub(crate) fn encode(resources: &BTreeMap<Key, StoredResource>) -> Vec<u8> {
    let mut content = Vec::new();
    for (Key { kind, name }, StoredResource { version, body }) in resources {
        let resource = CachedResource {
            kind: kind.number().into(),
            name: name.to_string(),
            version: version.clone(),
            body: body.clone(),
        };
        // Can't fail: a vector grows.
        let _ = resource.encode_length_delimited(&mut content);
    }
    content
}

/// Reads a cache, also while a process has it locked.
pub(super) fn read(path: &Path) -> io::Result<CacheContents> {
    let content = match FORMAT.read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(CacheContents::Empty),
        content => content?,
    };
    let confirmed_at = path.metadata()?.modified()?;
    Ok(match content.and_then(|content| decode(&content)) {
        Ok(resources) => CacheContents::Policy(resources, confirmed_at),
        Err(damage) => CacheContents::Damaged(damage),
    })
}

/// The resources of a content that [`encode`] has returned.
///
/// # Errors
/// If it is of another version.
pub(crate) fn decode(mut content: &[u8]) -> Result<BTreeMap<Key, StoredResource>, Damage> {
    let mut resources = BTreeMap::new();
    while !content.is_empty() {
        let number = resources.len() + 1;
        let CachedResource { kind, name, version, body } = CachedResource::decode_length_delimited(&mut content)
            .map_err(|error| Damage::Content(format!("resource {number}: {error}")))?;
        let kind = Kind::ALL.into_iter().find(|known| u32::from(known.number()) == kind);
        let kind = kind.ok_or_else(|| Damage::Content(format!("resource {number} has an unknown kind")))?;
        resources.insert(Key { kind, name: name.into() }, StoredResource { version, body });
    }
    Ok(resources)
}

/// Locks a cache for this process.
fn lock(path: &Path, timeout: Duration) -> io::Result<File> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(FORMAT.mode).open(&beside)?;
    let deadline = Instant::now() + timeout;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            Err(TryLockError::WouldBlock) => {
                let reason = "is in use by another process: each gateway needs its own";
                return Err(io::Error::new(ErrorKind::ResourceBusy, reason));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
