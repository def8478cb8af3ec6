//! Policy cache: the last acknowledged policy on disk, for a start without the policy server. One file, written whole
//! beside it and renamed into place.
//!
//! ```text
//!   "vipgate policy cache 2\n"   u64 fingerprint of the rest (little endian)
//!   resource*                    a length-delimited message for each resource
//! ```
//! A file that isn't whole, of another version or damaged in any other way is no policy: without one, the gateway fails
//! closed. The mtime is the last time at which the content was confirmed to be the server's.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use prost::{DecodeError, Message};
use thiserror::Error;
use vipgate_policy::fingerprint::Fingerprint;

use super::resource::{Key, Kind};
use crate::replaced_file::replace;
use crate::text_file::{MAX_FILE_BYTES, read_regular};
use crate::xds::store::StoredResource;

const MAGIC: &[u8] = b"vipgate policy cache 2\n";
/// Only the owner reads it: it says which pods there are.
const MODE: u32 = 0o600;
/// Maximum wait for the lock: a killed process may hold it until its exit is complete.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// Why the cache can't be used.
#[derive(Debug, Error)]
pub enum CacheError {
    /// A file can't be opened or read.
    #[error("policy.server.cache: {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// Another process has it locked.
    #[error("policy.server.cache: {} is in use by another process: each gateway needs its own", .0.display())]
    InUse(PathBuf),
}

impl CacheError {
    /// The same without the path.
    fn into_io(self) -> io::Error {
        match self {
            Self::Io { source, .. } => source,
            Self::InUse(_) => {
                let reason = "is in use by another process: each gateway needs its own";
                io::Error::new(ErrorKind::ResourceBusy, reason)
            }
        }
    }
}

/// The content of a cache when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub enum CacheContents {
    /// No file.
    Empty,
    /// A policy, and when it was last confirmed to be the server's.
    Policy(BTreeMap<Key, StoredResource>, SystemTime),
    /// The file is damaged, and how.
    Damaged(CacheDamage),
}

/// Damage of a cache file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CacheDamage {
    /// It doesn't begin with the header.
    #[error("has no policy cache header of this version")]
    NoHeader,
    /// It ends within the header.
    #[error("is truncated")]
    Truncated,
    /// Its content doesn't have the fingerprint that the header says.
    #[error("is truncated or corrupt: wrong fingerprint")]
    WrongFingerprint,
    /// A resource, counted from 1, can't be decoded.
    #[error("resource {number}: {source}")]
    InvalidResource {
        /// The number of the resource, from 1.
        number: usize,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// A resource, counted from 1, is of another version's kind.
    #[error("resource {0} has an unknown kind")]
    UnknownKind(usize),
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
    pub fn open(path: &Path) -> Result<(Self, CacheContents), CacheError> {
        Self::open_within(path, LOCK_TIMEOUT)
    }

    /// Opens a cache that couldn't be opened before, without waiting for the lock. Its content isn't used.
    ///
    /// # Errors
    /// As [`Self::open`], without the path.
    pub(super) fn open_later(path: &Path) -> io::Result<Self> {
        Self::open_within(path, Duration::ZERO).map(|(cache, _)| cache).map_err(CacheError::into_io)
    }

    fn open_within(path: &Path, timeout: Duration) -> Result<(Self, CacheContents), CacheError> {
        let failed = |source| CacheError::Io { path: path.to_owned(), source };
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(failed)?;
        }
        let lock = lock(path, timeout)?;
        let contents = read(path).map_err(failed)?;
        Ok((Self { path: path.to_owned(), _lock: lock }, contents))
    }

    /// Replaces the content by what [`encode`] returned, if it is new, and stores when it was last confirmed.
    ///
    /// # Errors
    /// If that fails. There is no file if the new content can't be written: no policy is better than one without an
    /// acknowledged update.
    pub(super) fn store(&self, content: Option<&[u8]>, confirmed_at: SystemTime) -> io::Result<()> {
        if let Some(content) = content {
            self.write(content).inspect_err(|_| {
                // If this fails too, its mtime says how old it is.
                let _ = fs::remove_file(&self.path);
            })?;
        }
        File::open(&self.path)?.set_modified(confirmed_at)
    }

    fn write(&self, content: &[u8]) -> io::Result<()> {
        if (MAGIC.len() + size_of::<u64>() + content.len()) as u64 > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("the policy is longer than {} MiB", MAX_FILE_BYTES >> 20)));
        }
        replace(&self.path, MODE, &[MAGIC, &Fingerprint::of(content).to_le_bytes(), content])
    }
}

/// Encodes a policy. The resources are encoded already, as the server has sent them.
pub(super) fn encode(resources: &BTreeMap<Key, StoredResource>) -> Vec<u8> {
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
    let bytes = match read_regular(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(CacheContents::Empty),
        bytes => bytes?,
    };
    let confirmed_at = path.metadata()?.modified()?;
    Ok(match decode(&bytes) {
        Ok(resources) => CacheContents::Policy(resources, confirmed_at),
        Err(damage) => CacheContents::Damaged(damage),
    })
}

fn decode(bytes: &[u8]) -> Result<BTreeMap<Key, StoredResource>, CacheDamage> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(CacheDamage::NoHeader)?;
    let (fingerprint, mut content) = rest.split_first_chunk().ok_or(CacheDamage::Truncated)?;
    if Fingerprint::of(content) != u64::from_le_bytes(*fingerprint) {
        return Err(CacheDamage::WrongFingerprint);
    }
    let mut resources = BTreeMap::new();
    while !content.is_empty() {
        let number = resources.len() + 1;
        let CachedResource { kind, name, version, body } = CachedResource::decode_length_delimited(&mut content)
            .map_err(|source| CacheDamage::InvalidResource { number, source })?;
        let kind = Kind::ALL.into_iter().find(|known| u32::from(known.number()) == kind);
        let kind = kind.ok_or(CacheDamage::UnknownKind(number))?;
        resources.insert(Key { kind, name: name.into() }, StoredResource { version, body });
    }
    Ok(resources)
}

/// Locks a cache for this process.
fn lock(path: &Path, timeout: Duration) -> Result<File, CacheError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let failed = |source| CacheError::Io { path: PathBuf::from(&beside), source };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(MODE).open(&beside);
    let file = file.map_err(failed)?;
    let deadline = Instant::now() + timeout;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            Err(TryLockError::WouldBlock) => return Err(CacheError::InUse(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
}

#[cfg(test)]
mod tests;
