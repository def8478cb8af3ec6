//! Policy cache: a journal of applied updates on disk, for a start without the policy server.
//!
//! ```text
//!   "vipgate policy cache 1\n"
//!   record*    u32 length of the payload, u64 fingerprint of it (little endian), payload: an update
//! ```
//! An update is written before it is acknowledged, so after a restart a gateway has at least what it acknowledged. A
//! truncated last record (the process died while writing it) was never acknowledged and is dropped. Any other damage
//! invalidates the whole journal, since the missing part is unknown; without policy, the gateway fails closed.
//! The mtime is the last time at which the content was confirmed to be the server's.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use prost::{DecodeError, Message};
use thiserror::Error;
use vipgate_policy::fingerprint::Fingerprint;

use super::resource::{Key, Kind};
use crate::text_file;
use crate::xds::store::StoredResource;

const MAGIC: &[u8] = b"vipgate policy cache 1\n";
/// Length and fingerprint.
const RECORD_HEADER: usize = 12;
/// Bytes; a shorter journal isn't compacted.
const MIN_COMPACTION_LENGTH: u64 = 4 << 20;
/// Maximum wait for the file lock: a killed process may hold it until its exit is complete.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// Why the cache can't be used.
#[derive(Debug, Error)]
pub enum CacheError {
    /// The file can't be opened or written.
    #[error("policy.server.cache: {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// Another process has the file locked.
    #[error("policy.server.cache: {} is in use by another process: each gateway needs its own", .0.display())]
    InUse(PathBuf),
}

/// The content of a cache when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub enum CacheContents {
    /// No file, or an empty one.
    Empty,
    /// A policy, and when it was last confirmed to be the server's.
    Policy(BTreeMap<Key, StoredResource>, SystemTime),
    /// The journal is damaged, and how.
    Damaged(JournalError),
}

/// Damage of a journal.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JournalError {
    /// It doesn't begin with the header.
    #[error("has no policy cache header of this version")]
    NoHeader,
    /// Its first record is incomplete.
    #[error("its first record is truncated")]
    FirstRecordTruncated,
    /// A record, counted from 1, doesn't have the fingerprint that its header says.
    #[error("record {0} is corrupt: wrong fingerprint")]
    WrongFingerprint(usize),
    /// The payload of a record isn't an update.
    #[error("record {record}: {source}")]
    InvalidRecord {
        /// The number of the record, from 1.
        record: usize,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// A record, counted from 1, has a resource of another version's kind.
    #[error("record {0} has an unknown resource kind")]
    UnknownKind(usize),
}

/// The open journal, locked exclusively.
#[derive(Debug)]
pub struct Cache {
    path: PathBuf,
    file: File,
    length: u64,
    /// Its length after the last compaction.
    compacted_length: u64,
}

/// A changed or removed resource.
#[derive(Clone, PartialEq, Message)]
struct JournalEntry {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(bool, tag = "3")]
    removed: bool,
    #[prost(string, tag = "4")]
    version: String,
    #[prost(bytes = "bytes", tag = "5")]
    body: prost::bytes::Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct JournalUpdate {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<JournalEntry>,
}

impl Cache {
    /// Opens or creates the journal and replays it. A damaged one stays unchanged until the first update.
    ///
    /// # Errors
    /// If the file can't be opened or locked.
    pub fn open(path: &Path) -> Result<(Self, CacheContents), CacheError> {
        let failed = |source| CacheError::Io { path: path.to_owned(), source };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let mut file = open_locked(path)?;
        let confirmed_at = file.metadata().and_then(|metadata| metadata.modified()).map_err(failed)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let (contents, length) = match replay(&bytes) {
            Ok(None) => (CacheContents::Empty, 0),
            Ok(Some((resources, length))) => {
                // Remove a truncated last record before new ones are appended.
                file.set_len(length as u64).and_then(|()| file.set_modified(confirmed_at)).map_err(failed)?;
                (CacheContents::Policy(resources, confirmed_at), length)
            }
            Err(error) => (CacheContents::Damaged(error), 0),
        };
        Ok((Self { path: path.to_owned(), file, length: length as u64, compacted_length: length as u64 }, contents))
    }

    /// Appends an applied update; `resources` are all resources after it.
    ///
    /// # Errors
    /// If the write fails. The journal is empty then: no policy is better than one without an acknowledged update.
    pub fn append(
        &mut self,
        changed: Vec<(Key, Option<StoredResource>)>,
        resources: &BTreeMap<Key, StoredResource>,
    ) -> io::Result<()> {
        self.try_append(changed, resources).inspect_err(|_| {
            // If this fails too, the next start reports the damage.
            let _ = self.file.set_len(0);
            self.length = 0;
        })
    }

    fn try_append(
        &mut self,
        changed: Vec<(Key, Option<StoredResource>)>,
        resources: &BTreeMap<Key, StoredResource>,
    ) -> io::Result<()> {
        if self.length == 0 || self.length > MIN_COMPACTION_LENGTH.max(2 * self.compacted_length) {
            return self.rewrite(resources);
        }
        if !changed.is_empty() {
            let record = record(changed.into_iter());
            self.file.seek(SeekFrom::Start(self.length))?;
            self.file.write_all(&record)?;
            self.length += record.len() as u64;
        }
        self.confirm()
    }

    /// Sets the mtime to now: the content is still the server's.
    ///
    /// # Errors
    /// If the mtime can't be set.
    pub fn confirm(&self) -> io::Result<()> {
        self.file.set_modified(SystemTime::now())
    }

    /// Invalidates the content: the next update rewrites the journal.
    pub fn invalidate(&mut self) {
        self.length = 0;
    }

    /// Compaction: writes all resources to a temporary file and renames it over the journal.
    fn rewrite(&mut self, resources: &BTreeMap<Key, StoredResource>) -> io::Result<()> {
        // Appended to the whole name: journals in one directory have different drafts.
        let mut draft = self.path.clone().into_os_string();
        draft.push(".draft");
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.try_lock().map_err(io::Error::from)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(record(resources.iter().map(|(key, resource)| (key.clone(), Some(resource.clone())))));
        file.write_all(&bytes)?;
        // Sync before the rename: after a power failure the name must not refer to an incomplete file.
        file.sync_data()?;
        fs::rename(&draft, &self.path)?;
        self.file = file;
        self.length = bytes.len() as u64;
        self.compacted_length = self.length;
        Ok(())
    }
}

/// Opens the file at a path and locks it, waiting up to [`LOCK_TIMEOUT`].
fn open_locked(path: &Path) -> Result<File, CacheError> {
    let failed = |source| CacheError::Io { path: path.to_owned(), source };
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        // Opening a FIFO or device must not block; it is rejected below, since reading it might never end.
        options.custom_flags((rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits().cast_signed());
        let file = options.open(path).map_err(failed)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        text_file::require_regular(kind).map_err(failed)?;
        match file.try_lock() {
            // The previous owner may have replaced the file (compaction) and hold the lock of the new one.
            Ok(()) if is_at(&file, path).map_err(failed)? => return Ok(file),
            Ok(()) | Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            Ok(()) | Err(TryLockError::WouldBlock) => return Err(CacheError::InUse(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    Ok(fs::metadata(path).is_ok_and(|current| (opened.dev(), opened.ino()) == (current.dev(), current.ino())))
}

fn record(changed: impl Iterator<Item = (Key, Option<StoredResource>)>) -> Vec<u8> {
    let entry = |(key, resource): (Key, Option<StoredResource>)| {
        let (gone, StoredResource { version, body }) = match resource {
            Some(resource) => (false, resource),
            None => (true, StoredResource { version: String::new(), body: prost::bytes::Bytes::new() }),
        };
        JournalEntry { kind: key.kind.number().into(), name: key.name.to_string(), removed: gone, version, body }
    };
    let payload = JournalUpdate { entries: changed.map(entry).collect() }.encode_to_vec();
    let mut record = Vec::with_capacity(RECORD_HEADER + payload.len());
    record.extend((payload.len() as u32).to_le_bytes());
    record.extend(Fingerprint::of(&payload).to_le_bytes());
    record.extend(payload);
    record
}

type Replayed = Option<(BTreeMap<Key, StoredResource>, usize)>;

/// Replays a journal: the resources, and the length of its complete records. `None`: an empty file.
fn replay(bytes: &[u8]) -> Result<Replayed, JournalError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut rest = bytes.strip_prefix(MAGIC).ok_or(JournalError::NoHeader)?;
    let mut resources = BTreeMap::new();
    let mut records = 0;
    while let Some((header, tail)) = rest.split_at_checked(RECORD_HEADER) {
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let mut fingerprint = [0; 8];
        fingerprint.copy_from_slice(&header[4..]);
        let fingerprint = u64::from_le_bytes(fingerprint);
        let payload = tail.split_at_checked(length);
        if payload.is_none() && !has_prefix_with(tail, fingerprint) {
            break;
        }
        records += 1;
        let Some((payload, tail)) = payload.filter(|(payload, _)| Fingerprint::of(payload) == fingerprint) else {
            return Err(JournalError::WrongFingerprint(records));
        };
        let update =
            JournalUpdate::decode(payload).map_err(|source| JournalError::InvalidRecord { record: records, source })?;
        for JournalEntry { kind, name, removed: gone, version, body } in update.entries {
            let kind = Kind::ALL.into_iter().find(|known| u32::from(known.number()) == kind);
            let kind = kind.ok_or(JournalError::UnknownKind(records))?;
            let key = Key { kind, name: name.into() };
            if gone {
                resources.remove(&key);
            } else {
                resources.insert(key, StoredResource { version, body });
            }
        }
        rest = tail;
    }
    if records == 0 {
        return Err(JournalError::FirstRecordTruncated);
    }
    Ok(Some((resources, bytes.len() - rest.len())))
}

/// Whether a prefix of any length has this fingerprint: then the length field is wrong, and the record isn't truncated.
fn has_prefix_with(bytes: &[u8], fingerprint: u64) -> bool {
    let mut state = Fingerprint::default();
    let mut prefixes = bytes.iter().map(|byte| {
        state.add(&[*byte]);
        state.finish()
    });
    fingerprint == Fingerprint::of(&[]) || prefixes.any(|prefix| prefix == fingerprint)
}

#[cfg(test)]
mod tests;
