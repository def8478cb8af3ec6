//! The last policy on disk, for a start without the server: a journal of what came into force, read as a whole or not at all.
//!
//! ```text
//!   "vipgate policy cache 1\n"
//!   record*    u32 length of the payload, u64 fingerprint of it (little endian), payload: an update
//! ```
//! An update is in the journal before it is acknowledged, so no gateway comes back with less than what its server knows to be
//! in force. A last record that was cut short, by a process that died while it wrote, was never acknowledged: it is dropped.
//! Anything else that is wrong makes the whole journal worthless: nobody knows what is missing, and a gateway without policy is
//! closed. The time of the file's last modification is when its content was last known to be the server's.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use prost::Message;
use thiserror::Error;

use super::book::Held;
use super::resource::{Key, Kind};
use crate::policy::Fingerprint;
use crate::text_file;

const MAGIC: &[u8] = b"vipgate policy cache 1\n";
/// Length and fingerprint.
const RECORD_HEAD: usize = 12;
/// Below this the journal isn't written anew, however little of it still counts.
const SMALL: u64 = 4 << 20;
/// A process that was killed a moment ago may still be going: its lock goes last.
const PATIENCE: Duration = Duration::from_secs(3);

/// The cache can't be used at all.
#[derive(Debug, Error)]
pub enum CacheError {
    /// The file can't be opened or written.
    #[error("policy.server.cache: {}: {error}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// Another gateway has it.
    #[error("policy.server.cache: {} is in use by another process: each gateway needs its own", .0.display())]
    InUse(PathBuf),
}

/// What was found in it.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing: there was no file, or an empty one.
    Nothing,
    /// A policy, and when it was last known to be the server's.
    Policy(BTreeMap<Key, Held>, SystemTime),
    /// Something that can't be relied on, and why.
    Damaged(String),
}

/// The open journal; nobody else writes it.
#[derive(Debug)]
pub struct Cache {
    path: PathBuf,
    file: File,
    length: u64,
    /// Its length when it was last written anew.
    compact: u64,
}

/// One change: what a resource is now, or that it is no more.
#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(bool, tag = "3")]
    gone: bool,
    #[prost(string, tag = "4")]
    version: String,
    #[prost(bytes = "bytes", tag = "5")]
    body: prost::bytes::Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Update {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Entry>,
}

impl Cache {
    /// Opens the journal, or makes it, and reads what is in it. What is damaged is left as it is until the first update.
    ///
    /// # Errors
    /// When the file can't be had.
    pub fn open(path: &Path) -> Result<(Self, Found), CacheError> {
        let failed = |error| CacheError::Io { path: path.to_owned(), error };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let mut file = open_locked(path)?;
        let known_at = file.metadata().and_then(|metadata| metadata.modified()).map_err(failed)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let (found, length) = match read(&bytes) {
            Ok(None) => (Found::Nothing, 0),
            Ok(Some((held, length))) => {
                // What was cut short must not stand behind what comes next.
                file.set_len(length as u64).and_then(|()| file.set_modified(known_at)).map_err(failed)?;
                (Found::Policy(held, known_at), length)
            }
            Err(reason) => (Found::Damaged(reason), 0),
        };
        Ok((Self { path: path.to_owned(), file, length: length as u64, compact: length as u64 }, found))
    }

    /// Adds an update that is in force now; `held` is everything that is, with it.
    ///
    /// # Errors
    /// When it can't be written. Then the journal is empty: better no policy than one that lacks what was acknowledged.
    pub fn append(&mut self, changed: Vec<(Key, Option<Held>)>, held: &BTreeMap<Key, Held>) -> io::Result<()> {
        self.try_append(changed, held).inspect_err(|_| {
            // If this fails as well, the disk is gone, and the next start says what it finds.
            let _ = self.file.set_len(0);
            self.length = 0;
        })
    }

    fn try_append(&mut self, changed: Vec<(Key, Option<Held>)>, held: &BTreeMap<Key, Held>) -> io::Result<()> {
        if self.length == 0 || self.length > SMALL.max(2 * self.compact) {
            return self.rewrite(held);
        }
        if !changed.is_empty() {
            let record = record(changed.into_iter());
            self.file.seek(SeekFrom::Start(self.length))?;
            self.file.write_all(&record)?;
            self.length += record.len() as u64;
        }
        self.confirm()
    }

    /// Notes that what is in it is still what the server has.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn confirm(&self) -> io::Result<()> {
        self.file.set_modified(SystemTime::now())
    }

    /// What is in it counts no more: the next update writes it anew.
    pub fn forget(&mut self) {
        self.length = 0;
    }

    /// Writes the journal anew beside the old one, and takes its place in one step.
    fn rewrite(&mut self, held: &BTreeMap<Key, Held>) -> io::Result<()> {
        // Another name than any journal's beside it has.
        let mut draft = self.path.clone().into_os_string();
        draft.push(".draft");
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.try_lock().map_err(io::Error::from)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(record(held.iter().map(|(key, held)| (key.clone(), Some(held.clone())))));
        file.write_all(&bytes)?;
        // Behind the name there must be the content, also after a power failure.
        file.sync_data()?;
        fs::rename(&draft, &self.path)?;
        self.file = file;
        self.length = bytes.len() as u64;
        self.compact = self.length;
        Ok(())
    }
}

/// The file at a place, once nobody else has it.
fn open_locked(path: &Path) -> Result<File, CacheError> {
    let failed = |error| CacheError::Io { path: path.to_owned(), error };
    let until = Instant::now() + PATIENCE;
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        // A pipe or a device would be read without end.
        options.custom_flags((rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits().cast_signed());
        let file = options.open(path).map_err(failed)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        text_file::require_regular(kind).map_err(failed)?;
        match file.try_lock() {
            // Whoever had it may have put another file in its place meanwhile, and have that one.
            Ok(()) if is_at(&file, path).map_err(failed)? => return Ok(file),
            Ok(()) | Err(TryLockError::WouldBlock) if Instant::now() < until => {
                thread::sleep(Duration::from_millis(20));
            }
            Ok(()) | Err(TryLockError::WouldBlock) => return Err(CacheError::InUse(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    Ok(fs::metadata(path).is_ok_and(|there| (own.dev(), own.ino()) == (there.dev(), there.ino())))
}

fn record(changed: impl Iterator<Item = (Key, Option<Held>)>) -> Vec<u8> {
    let entry = |(key, held): (Key, Option<Held>)| {
        let (gone, Held { version, body }) = match held {
            Some(held) => (false, held),
            None => (true, Held { version: String::new(), body: prost::bytes::Bytes::new() }),
        };
        Entry { kind: key.kind.number().into(), name: key.name.to_string(), gone, version, body }
    };
    let payload = Update { entries: changed.map(entry).collect() }.encode_to_vec();
    let mut record = Vec::with_capacity(RECORD_HEAD + payload.len());
    record.extend((payload.len() as u32).to_le_bytes());
    record.extend(Fingerprint::of(&payload).to_le_bytes());
    record.extend(payload);
    record
}

type Content = Option<(BTreeMap<Key, Held>, usize)>;

/// The resources, and how much of the bytes they take.
fn read(bytes: &[u8]) -> Result<Content, String> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut rest = bytes.strip_prefix(MAGIC).ok_or("it doesn't begin like a policy cache of this version")?;
    let mut held = BTreeMap::new();
    let mut records = 0;
    while let Some((head, behind)) = rest.split_at_checked(RECORD_HEAD) {
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let mut print = [0; 8];
        print.copy_from_slice(&head[4..]);
        let print = u64::from_le_bytes(print);
        let payload = behind.split_at_checked(length);
        if payload.is_none() && !begins_with(behind, print) {
            break;
        }
        records += 1;
        let Some((payload, behind)) = payload.filter(|(payload, _)| Fingerprint::of(payload) == print) else {
            return Err(format!("record {records} isn't what was written"));
        };
        let update = Update::decode(payload).map_err(|error| format!("record {records}: {error}"))?;
        for Entry { kind, name, gone, version, body } in update.entries {
            let kind = Kind::ALL.into_iter().find(|known| u32::from(known.number()) == kind);
            let kind = kind.ok_or_else(|| format!("record {records} has a kind that this version doesn't know"))?;
            let key = Key { kind, name: name.into() };
            if gone {
                held.remove(&key);
            } else {
                held.insert(key, Held { version, body });
            }
        }
        rest = behind;
    }
    if records == 0 {
        return Err("its first record is cut short".to_owned());
    }
    Ok(Some((held, bytes.len() - rest.len())))
}

/// Whether something with this fingerprint is there, however long: then nothing was cut short, the length is wrong.
fn begins_with(bytes: &[u8], print: u64) -> bool {
    let mut begun = Fingerprint::default();
    let mut longer = bytes.iter().map(|byte| {
        begun.add(&[*byte]);
        begun.finish()
    });
    print == Fingerprint::of(&[]) || longer.any(|longer| longer == print)
}

#[cfg(test)]
mod tests;
