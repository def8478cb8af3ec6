//! The record as one server writes it, when views change. Heartbeats are not stored: those that a server has received are
//! of no use to the next one.
//!
//! Every write names the version that it follows from. A server begins with a write of its own: from there on, no write of
//! the server before can succeed, however late it arrives. A write without a response is resolved in the same way. So
//! leases are granted only under the last view that any gateway can know.

#[cfg(test)]
mod tests;

use std::future::pending;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;
use vipgate_common::Task;

use super::{RecordStore, StoreError, StoredRecord, WriteError};
use crate::membership::authority::Record;

/// How often a server reads what the one that decides has written.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Attempts to take over while somebody else writes.
const MAX_ATTEMPTS: usize = 4;

/// What the last write of this server was.
#[derive(Clone, Debug)]
struct Position {
    version: String,
    term: u64,
}

/// A store, and what is known of it.
pub(in crate::policyd) struct RecordWriter<S> {
    store: S,
    /// `None`: this server doesn't write, or doesn't know what its last write has done.
    position: Option<Position>,
    /// The highest number of a view that was read or written.
    number: u64,
    /// The record, each time it is read; `None`: there is none.
    remote: mpsc::Receiver<Option<StoredRecord>>,
    /// The version that was read last in place of the one that this server has written last.
    unexpected: Option<Unexpected>,
    /// Reads the record of a shared store.
    _poll: Option<Task>,
}

/// A version that was read, if there was a record, and the one that this server had written by then.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unexpected {
    read: Option<String>,
    written: String,
}

/// How a term has begun.
#[derive(Debug)]
pub(in crate::policyd) struct TermStart {
    /// The term of the record that was there; 0: there was none.
    pub(in crate::policyd) previous_term: u64,
    /// The record that is there now.
    pub(in crate::policyd) record: Record,
}

impl<S: RecordStore> RecordWriter<S> {
    /// A store that other servers don't share.
    pub(in crate::policyd) fn of_single_server(store: S) -> Self {
        Self::new(store, mpsc::channel(1).1, None)
    }

    /// A shared store. Starts to read what other servers write, by a second connection.
    pub(in crate::policyd) fn shared(store: S, reader: S) -> Self {
        let (sender, remote) = mpsc::channel(1);
        Self::new(store, remote, Some(Task::spawn(poll(reader, sender))))
    }

    pub(super) fn new(store: S, remote: mpsc::Receiver<Option<StoredRecord>>, poll: Option<Task>) -> Self {
        Self { store, position: None, number: 0, remote, unexpected: None, _poll: poll }
    }

    /// Whether this server may write: since it took over, no other one has, and the outcome of all its writes is known.
    pub(in crate::policyd) fn is_in_term(&self) -> bool {
        self.position.is_some()
    }

    /// Begins to write in place of another server: writes the record of the next term.
    pub(in crate::policyd) async fn take_over(&mut self) -> Result<TermStart, StoreError> {
        self.position = None;
        for _ in 0..MAX_ATTEMPTS {
            let stored = self.store.load().await?;
            let (version, last) = stored.map_or((None, Record::default()), |it| (Some(it.version), it.record));
            let next = last.next_term();
            match self.store.compare_and_swap(version.as_deref(), &next).await {
                Ok(version) => {
                    self.written(version, &next);
                    return Ok(TermStart { previous_term: last.term, record: next });
                }
                Err(WriteError::Conflict) => {}
                Err(WriteError::Unavailable(error)) => return Err(error),
            }
        }
        Err(StoreError(format!("{MAX_ATTEMPTS} attempts to write failed because somebody else wrote")))
    }

    /// Writes the record. After an error this server has to take over again.
    pub(in crate::policyd) async fn commit(&mut self, record: &Record) -> Result<(), WriteError> {
        // Without its position from here on: a cancelled or failed write may have been done.
        let Some(Position { version, .. }) = self.position.take() else { return Err(WriteError::Conflict) };
        let version = self.store.compare_and_swap(Some(&version), record).await?;
        self.written(version, record);
        Ok(())
    }

    /// This server has written a record.
    fn written(&mut self, version: String, record: &Record) {
        self.position = Some(Position { version, term: record.term });
        self.number = self.number.max(record.view.number);
        // Readings from before say nothing any more; one more may be on its way.
        while self.remote.try_recv().is_ok() {}
    }

    /// Waits for the next record of another server with a later view. Cancel-safe.
    pub(in crate::policyd) async fn next_remote_record(&mut self) -> Record {
        while let Some(stored) = self.remote.recv().await {
            self.check_position(stored.as_ref());
            let Some(StoredRecord { record, .. }) = stored else { continue };
            if record.view.number > self.number {
                self.number = record.view.number;
                return record;
            }
        }
        pending().await
    }

    /// Ends the term if another server has taken over, so that this one can't know what gateways know; or if the record was
    /// lost or restored from a backup: then two readings in a row show the same in place of what was written last. One
    /// alone may be from before the last write.
    fn check_position(&mut self, stored: Option<&StoredRecord>) {
        let Some(Position { version, term }) = &self.position else { return };
        let read = stored.map(|stored| stored.version.clone());
        let unexpected = Unexpected { read, written: version.clone() };
        let unexpected = Some(unexpected).filter(|it| it.read.as_ref() != Some(&it.written));
        let is_lost = unexpected.is_some() && self.unexpected == unexpected;
        if is_lost || stored.is_some_and(|stored| stored.record.term > *term) {
            self.position = None;
        }
        self.unexpected = unexpected;
    }
}

/// Reads the record again and again. Errors are reported by the writer.
async fn poll(mut store: impl RecordStore, records: mpsc::Sender<Option<StoredRecord>>) {
    loop {
        if let Ok(stored) = store.load().await
            && records.send(stored).await.is_err()
        {
            return;
        }
        sleep(POLL_INTERVAL).await;
    }
}
