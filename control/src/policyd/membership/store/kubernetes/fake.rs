//! An API server in memory that compares versions, and loses or delays what tests say.

use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::{Record, RecordStore, StoreError, StoredRecord, ViewStore, WriteError};

/// What happens to the next write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::policyd::membership) enum Fault {
    #[default]
    None,
    /// It doesn't arrive.
    RequestLost,
    /// It is done, without a response.
    ResponseLost,
    /// There is no response, and it arrives later, if ever.
    Delayed,
}

#[derive(Debug, Default)]
struct Contents {
    version: u64,
    record: Option<Record>,
    fault: Fault,
    delayed: Vec<(Option<String>, Record)>,
    writes: u64,
    watchers: Vec<mpsc::Sender<Record>>,
}

impl Contents {
    fn stored_version(&self) -> Option<String> {
        self.record.as_ref().map(|_| self.version.to_string())
    }

    fn apply(&mut self, version: Option<&str>, record: &Record) -> Result<String, WriteError> {
        if self.stored_version().as_deref() != version {
            return Err(WriteError::Conflict);
        }
        // A write without a change makes no version.
        if self.record.as_ref() != Some(record) {
            self.version += 1;
            self.writes += 1;
            self.record = Some(record.clone());
            for watcher in &self.watchers {
                // A watcher that is slow reads the record after it.
                let _ = watcher.try_send(record.clone());
            }
        }
        Ok(self.version.to_string())
    }
}

/// A connection to it.
#[derive(Clone, Debug, Default)]
pub(in crate::policyd::membership) struct FakeApi(Arc<Mutex<Contents>>);

impl FakeApi {
    /// The store of one more server.
    pub(in crate::policyd::membership) fn store(&self) -> ViewStore<Self> {
        let (sender, receiver) = mpsc::channel(64);
        self.0.lock().unwrap().watchers.push(sender);
        ViewStore::new(self.clone(), receiver)
    }

    pub(in crate::policyd::membership) fn fail_next_write(&self, fault: Fault) {
        self.0.lock().unwrap().fault = fault;
    }

    /// Whether the next write is still to fail.
    pub(in crate::policyd::membership) fn has_fault(&self) -> bool {
        self.0.lock().unwrap().fault != Fault::None
    }

    /// Delivers a delayed write; whether it has changed anything.
    pub(in crate::policyd::membership) fn deliver_delayed(&self) -> Option<Record> {
        let mut contents = self.0.lock().unwrap();
        let (version, record) = contents.delayed.pop()?;
        contents.apply(version.as_deref(), &record).ok().map(|_| record)
    }

    /// Deletes the object.
    pub(in crate::policyd::membership) fn delete(&self) {
        self.0.lock().unwrap().record = None;
    }

    pub(in crate::policyd::membership) fn record(&self) -> Option<Record> {
        self.0.lock().unwrap().record.clone()
    }

    /// Number of writes that have changed something.
    pub(in crate::policyd::membership) fn writes(&self) -> u64 {
        self.0.lock().unwrap().writes
    }
}

impl RecordStore for FakeApi {
    async fn read(&mut self) -> Result<Option<StoredRecord>, StoreError> {
        let contents = self.0.lock().unwrap();
        let version = contents.stored_version();
        Ok(contents.record.clone().zip(version).map(|(record, version)| StoredRecord { version, record }))
    }

    async fn write(&mut self, version: Option<&str>, record: &Record) -> Result<String, WriteError> {
        let mut contents = self.0.lock().unwrap();
        let unavailable = || Err(WriteError::Unavailable(StoreError::Unavailable("no response".to_owned())));
        match std::mem::take(&mut contents.fault) {
            Fault::None => contents.apply(version, record),
            Fault::RequestLost => unavailable(),
            Fault::ResponseLost => {
                let _ = contents.apply(version, record);
                unavailable()
            }
            Fault::Delayed => {
                contents.delayed.push((version.map(str::to_owned), record.clone()));
                unavailable()
            }
        }
    }
}
