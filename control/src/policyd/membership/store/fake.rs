//! A record in memory that compares versions, and loses or delays what tests say.

use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::writer::RecordWriter;
use super::{RecordStore, StoreError, StoredRecord, WriteError};
use crate::membership::authority::Record;

/// What happens to the next write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
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
    readers: Vec<mpsc::Sender<Option<StoredRecord>>>,
}

impl Contents {
    fn stored_version(&self) -> Option<String> {
        self.record.as_ref().map(|_| self.version.to_string())
    }

    fn stored(&self) -> Option<StoredRecord> {
        let (version, record) = self.stored_version().zip(self.record.clone())?;
        Some(StoredRecord { version, record })
    }

    fn send_to_readers(&self) {
        for reader in &self.readers {
            // One that is slow reads the record after it.
            let _ = reader.try_send(self.stored());
        }
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
            self.send_to_readers();
        }
        Ok(self.version.to_string())
    }
}

/// A connection to it.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeStore(Arc<Mutex<Contents>>);

impl FakeStore {
    /// The store of one more server.
    pub(in crate::policyd) fn writer(&self) -> RecordWriter<Self> {
        let (sender, receiver) = mpsc::channel(64);
        self.0.lock().unwrap().readers.push(sender);
        RecordWriter::new(self.clone(), receiver, None)
    }

    pub(crate) fn fail_next_write(&self, fault: Fault) {
        self.0.lock().unwrap().fault = fault;
    }

    /// Whether the next write is still to fail.
    pub(crate) fn has_fault(&self) -> bool {
        self.0.lock().unwrap().fault != Fault::None
    }

    /// Delivers a delayed write; whether it has changed anything.
    pub(crate) fn deliver_delayed(&self) -> Option<Record> {
        let mut contents = self.0.lock().unwrap();
        let (version, record) = contents.delayed.pop()?;
        contents.apply(version.as_deref(), &record).ok().map(|_| record)
    }

    /// Deletes the object.
    pub(crate) fn delete(&self) {
        self.0.lock().unwrap().record = None;
    }

    /// All servers read it, as each does from time to time.
    pub(crate) fn read_by_all(&self) {
        self.0.lock().unwrap().send_to_readers();
    }

    pub(crate) fn record(&self) -> Option<Record> {
        self.0.lock().unwrap().record.clone()
    }

    /// Number of writes that have changed something.
    pub(crate) fn writes(&self) -> u64 {
        self.0.lock().unwrap().writes
    }
}

impl RecordStore for FakeStore {
    async fn load(&mut self) -> Result<Option<StoredRecord>, StoreError> {
        Ok(self.0.lock().unwrap().stored())
    }

    async fn compare_and_swap(&mut self, version: Option<&str>, record: &Record) -> Result<String, WriteError> {
        let mut contents = self.0.lock().unwrap();
        let unavailable = || Err(WriteError::Unavailable(StoreError("no response".to_owned())));
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
