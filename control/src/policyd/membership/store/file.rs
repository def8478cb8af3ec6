//! The record in a file of a single server. The process that has the lock beside it decides: another one with the same
//! directory waits until that one has ended.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vipgate_common::spawn_blocking;

use super::{RecordError, RecordStore, StoreError, StoredRecord, WriteError, decode, encode};
use crate::membership::authority::Record;
use crate::replaced_file::{Damage, Format};

const FORMAT: Format = Format { name: "membership record", version: 1, mode: 0o600 };
/// What an operator may do with a file that can't be used.
const HINT: &str = "remove it, and the server goes on above what gateways know";

/// Why the file can't be used.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("{path}: another policy server has it locked: stop that one, or give each a `state` of its own")]
    Locked { path: PathBuf },
    #[error("{path}: can't be locked: {source}: check the directory")]
    Unlockable { path: PathBuf, source: io::Error },
    #[error("{path}: can't be read: {source}: make it readable, or {HINT}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path}: {source}: {HINT}")]
    Damaged { path: PathBuf, source: Damage },
    #[error("{path}: {source}: {HINT}")]
    Invalid { path: PathBuf, source: RecordError },
    #[error("{path}: can't be written: {source}: check the directory, and the space there")]
    Unwritable { path: PathBuf, source: io::Error },
}

impl From<FileError> for StoreError {
    fn from(error: FileError) -> Self {
        Self(error.to_string())
    }
}

/// A record in a file.
pub(in crate::policyd) struct FileStore {
    path: PathBuf,
    /// Locked as long as it is open.
    lock: Option<Arc<File>>,
}

impl FileStore {
    /// The record in the directory of a server's state.
    pub(in crate::policyd) fn new(directory: &Path) -> Self {
        Self { path: directory.join("membership"), lock: None }
    }
}

impl RecordStore for FileStore {
    async fn load(&mut self) -> Result<Option<StoredRecord>, StoreError> {
        let (path, held) = (self.path.clone(), self.lock.take());
        let (lock, stored) = spawn_blocking(move || {
            let lock = held.map_or_else(|| lock(&path), Ok)?;
            Ok::<_, FileError>((lock, read(&path)?))
        })
        .await?;
        self.lock = Some(lock);
        Ok(stored)
    }

    async fn compare_and_swap(&mut self, version: Option<&str>, record: &Record) -> Result<String, WriteError> {
        let (path, record, version) = (self.path.clone(), record.clone(), version.map(str::to_owned));
        if self.lock.is_none() {
            return Err(WriteError::Conflict);
        }
        spawn_blocking(move || {
            // Somebody may have replaced the file in spite of the lock.
            if read(&path).map_err(StoreError::from)?.map(|stored| stored.version) != version {
                return Err(WriteError::Conflict);
            }
            let written = FORMAT.write(&path, &encode(&record));
            written.map_err(|source| StoreError::from(FileError::Unwritable { path, source }))?;
            Ok(version_of(&record))
        })
        .await
    }
}

/// Terms aren't used twice, nor numbers in a term.
fn version_of(record: &Record) -> String {
    format!("{}/{}", record.term, record.view.number)
}

fn lock(path: &Path) -> Result<Arc<File>, FileError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let unlockable = |source| FileError::Unlockable { path: path.to_owned(), source };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(unlockable)?;
    }
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&beside);
    let file = opened.map_err(unlockable)?;
    match file.try_lock() {
        Ok(()) => Ok(Arc::new(file)),
        Err(TryLockError::WouldBlock) => Err(FileError::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => Err(unlockable(source)),
    }
}

fn read(path: &Path) -> Result<Option<StoredRecord>, FileError> {
    let content = match FORMAT.read(path) {
        Ok(content) => content.map_err(|source| FileError::Damaged { path: path.to_owned(), source })?,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(FileError::Unreadable { path: path.to_owned(), source }),
    };
    let record = decode(&content).map_err(|source| FileError::Invalid { path: path.to_owned(), source })?;
    Ok(Some(StoredRecord { version: version_of(&record), record }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::MembershipView;

    fn record(term: u64, number: u64) -> Record {
        Record { term, view: Arc::new(MembershipView { number, ..MembershipView::default() }) }
    }

    #[tokio::test]
    async fn what_is_written_is_there_for_the_next_process_and_for_no_other_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("new");
        let mut store = FileStore::new(&state);
        assert!(store.load().await.unwrap().is_none());
        let version = store.compare_and_swap(None, &record(1, 0)).await.unwrap();
        let second = record(1, 1_000_001);
        let version = store.compare_and_swap(Some(&version), &second).await.unwrap();
        assert_eq!(store.compare_and_swap(None, &second).await, Err(WriteError::Conflict));
        let mut other = FileStore::new(&state);
        let StoreError(reason) = other.load().await.unwrap_err();
        assert!(reason.contains("another policy server has it locked"), "{reason}");
        assert_eq!(other.compare_and_swap(Some(&version), &second).await, Err(WriteError::Conflict));
        drop(store);
        let stored = other.load().await.unwrap().unwrap();
        assert_eq!((stored.version, stored.record), (version, second));
    }

    #[tokio::test]
    async fn a_file_that_is_no_record_is_named_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("membership");
        for bytes in [b"nonsense".to_vec(), FORMAT.file(&[255])] {
            fs::write(&path, &bytes).unwrap();
            let mut store = FileStore::new(folder.path());
            let StoreError(reason) = store.load().await.unwrap_err();
            assert!(reason.starts_with(&path.display().to_string()) && reason.ends_with(HINT), "{reason}");
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
    }
}
