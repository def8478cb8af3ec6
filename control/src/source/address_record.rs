//! Storage of the record of addresses of pools, where sources don't have it: a file beside files, a key beside those of
//! etcd. What is given is in force once it is stored, so that a restart and other servers give it to nobody else.

mod etcd;
mod file;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;
use vipgate_common::{Backoff, LoggedErrors, jittered};
use vipgate_policy::address_record::AddressRecord;

use self::etcd::EtcdRecord;
use self::file::RecordFile;
use crate::config::Etcd;
use crate::source::etcd::member::EtcdError;

/// Where a record is stored.
#[derive(Debug)]
pub(crate) enum RecordStorage {
    File(RecordFile),
    Etcd(Box<EtcdRecord>),
}

/// Why a record can't be read or stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// The file can't be read.
    #[error("{path}: can't be read: {source}: make it readable, or remove it and begin a new record")]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file can't be written.
    #[error("{path}: can't be written: {source}: check the directory, and the space there")]
    Unwritable { path: PathBuf, source: io::Error },
    /// No member of etcd executes transactions.
    #[error("etcd: {0}: check that it runs, has a leader and matches `source.etcd.endpoints`")]
    Unavailable(#[from] EtcdError),
    /// Somebody has to mend what is stored; where it is, what is wrong with it, and how.
    #[error("{0} and begin a new record")]
    Damaged(String),
}

/// The record of a text, or which line isn't one of a record.
fn parse(text: &str) -> Result<AddressRecord, String> {
    text.parse().map_err(|error| {
        let is_faulty = |line| AddressRecord::from_lines([line]).is_err();
        let line = text.lines().position(is_faulty).map_or(0, |index| index + 1);
        format!("line {line}: {error}")
    })
}

impl RecordStorage {
    /// Reads a file; one that is missing is an empty record.
    ///
    /// # Errors
    /// If it can't be read, or has another content.
    pub(crate) fn file(path: PathBuf) -> Result<Self, RecordError> {
        RecordFile::open(path).map(Self::File)
    }

    /// A key of etcd, which isn't read yet.
    pub(crate) fn etcd(config: &Etcd) -> Self {
        Self::Etcd(Box::new(EtcdRecord::new(config)))
    }

    /// Whether the last record is known: nothing may be stored before.
    fn is_loaded(&self) -> bool {
        match self {
            Self::File(file) => file.is_loaded(),
            Self::Etcd(record) => record.is_loaded(),
        }
    }

    async fn load(&mut self) -> Result<Arc<AddressRecord>, RecordError> {
        Ok(match self {
            Self::File(file) => file.load(),
            // A future of a client, which is large.
            Self::Etcd(record) => Box::pin(record.load()).await?,
        })
    }

    /// Stores a record that follows from the last one; returns the one that is stored then, which may be another
    /// server's.
    async fn save(&mut self, next: &Arc<AddressRecord>) -> Result<Arc<AddressRecord>, RecordError> {
        match self {
            Self::File(file) => file.save(next.clone()).await?,
            Self::Etcd(record) => return Box::pin(record.save(next)).await,
        }
        Ok(next.clone())
    }
}

/// Stores records, and tries again later what fails.
#[derive(Debug)]
pub(super) struct Recorder {
    storage: RecordStorage,
    backoff: Backoff,
    /// When to try again.
    retry_at: Option<Instant>,
    /// Failures that were logged since the last success.
    reported: LoggedErrors,
}

impl Recorder {
    pub(super) fn new(storage: RecordStorage) -> Self {
        let (backoff, reported) = (Backoff::default(), LoggedErrors::default());
        Self { storage, backoff, retry_at: None, reported }
    }

    /// Whether the stored record is known.
    pub(super) fn is_loaded(&self) -> bool {
        self.storage.is_loaded()
    }

    /// Whether other servers write the record, too.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.storage, RecordStorage::Etcd(_))
    }

    /// When to try again what has failed.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// The stored record, once it is read; then `None`, until another one is there that has to be read.
    pub(super) async fn load(&mut self) -> Option<Arc<AddressRecord>> {
        if self.storage.is_loaded() || !self.is_due() {
            return None;
        }
        let loaded = self.storage.load().await;
        self.note(loaded)
    }

    /// Stores a record that follows from the last one; returns the one that is stored then. `None`: not yet.
    pub(super) async fn save(&mut self, next: &Arc<AddressRecord>) -> Option<Arc<AddressRecord>> {
        if !self.storage.is_loaded() || !self.is_due() {
            return None;
        }
        let saved = self.storage.save(next).await;
        self.note(saved)
    }

    /// There is nothing to store.
    pub(super) fn rest(&mut self) {
        if self.storage.is_loaded() {
            self.backoff.reset();
            self.retry_at = None;
        }
    }

    /// Tries again later.
    pub(super) fn postpone(&mut self) {
        self.retry_at = Some(Instant::now() + jittered(self.backoff.next_delay(), getrandom::u32()));
    }

    fn is_due(&self) -> bool {
        self.retry_at.is_none_or(|at| at <= Instant::now())
    }

    fn note<T>(&mut self, result: Result<T, RecordError>) -> Option<T> {
        let error = match result {
            Ok(value) => {
                self.retry_at = None;
                self.reported.clear();
                return Some(value);
            }
            Err(error) => error,
        };
        self.postpone();
        let reason = error.to_string();
        if !self.reported.is_new(&reason) {
            return None;
        }
        let effect = "policies get no new addresses of AddressPools until it is recorded who has them";
        // A file that isn't a record is an error at the start already.
        if matches!(error, RecordError::Damaged(_)) {
            tracing::error!(event = "record_failed", reason, "{effect}");
        } else {
            tracing::warn!(event = "record_failed", reason, "{effect}");
        }
        None
    }
}
