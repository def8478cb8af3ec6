//! Kubernetes store: the view in one ConfigMap beside the Lease of the leader, who alone writes it, and only when it
//! changes. Heartbeats are not stored: those that a leader has received are of no use to the next one.
//!
//! A ConfigMap needs no definition that somebody could delete or downgrade together with the decisions in it.
//!
//! Every write names the resource version that it follows from. A leader begins with a write of its own: from there on,
//! no write of the leader before can succeed, however late it arrives. A write without a response is resolved in the same
//! way. So leases are granted only under the last view that any gateway can know.

#[cfg(test)]
pub(in crate::policyd::membership) mod fake;
mod object;
#[cfg(test)]
mod tests;

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;

use self::object::ViewObject;
use super::{CommitOutcome, RemoteWrite, Store, StoreContents, StoreError, Transaction};
use crate::config::KubernetesSource;
use crate::membership::MembershipView;

/// How often a server reads what the leader has decided.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Attempts to take over while somebody else writes.
const MAX_ATTEMPTS: usize = 4;

/// What is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::policyd::membership) struct Record {
    /// Counts how often a server took over: so each time the write changes the object.
    pub(in crate::policyd::membership) term: u64,
    pub(in crate::policyd::membership) view: Option<Arc<MembershipView>>,
}

/// A record as it was read.
#[derive(Clone, Debug)]
pub(in crate::policyd::membership) struct StoredRecord {
    /// Resource version of the object.
    version: String,
    record: Record,
}

/// Why a write has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::policyd::membership) enum WriteError {
    /// The object isn't the one that was read.
    Conflict,
    /// It was refused, or there was no response: it may have been done.
    Unavailable(StoreError),
}

/// Where the record is.
pub(in crate::policyd::membership) trait RecordStore: Send + 'static {
    /// Reads it with a quorum; `None`: there is none.
    fn read(&mut self) -> impl Future<Output = Result<Option<StoredRecord>, StoreError>> + Send;

    /// Replaces the record of a version, or creates it; returns its version.
    fn write(
        &mut self,
        version: Option<&str>,
        record: &Record,
    ) -> impl Future<Output = Result<String, WriteError>> + Send;
}

/// What the last write of this server was.
#[derive(Clone, Debug)]
struct Position {
    version: String,
    term: u64,
}

/// A store in the Kubernetes API.
pub(in crate::policyd::membership) type KubernetesStore = ViewStore<ViewObject>;

impl KubernetesStore {
    /// A store beside the Lease of this source. Starts to read what other servers write.
    pub(in crate::policyd::membership) fn open(source: &KubernetesSource) -> Self {
        let (sender, remote) = mpsc::channel(1);
        tokio::spawn(poll(ViewObject::new(source.clone()), sender));
        Self::new(ViewObject::new(source.clone()), remote)
    }
}

/// A store of the view in a record that is replaced as a whole.
pub(in crate::policyd::membership) struct ViewStore<R> {
    records: R,
    /// `None`: this server doesn't write, or doesn't know what its last write has done.
    position: Option<Position>,
    /// The highest number of a view that was read or written.
    number: u64,
    /// Records of other servers, as they are read.
    remote: mpsc::Receiver<Record>,
}

impl<R: RecordStore> ViewStore<R> {
    pub(in crate::policyd::membership) fn new(records: R, remote: mpsc::Receiver<Record>) -> Self {
        Self { records, position: None, number: 0, remote }
    }
}

impl<R: RecordStore> Store for ViewStore<R> {
    /// Writes the next term.
    async fn take_over(&mut self) -> Result<StoreContents, StoreError> {
        self.position = None;
        for _ in 0..MAX_ATTEMPTS {
            let stored = self.records.read().await?;
            let (version, last) = stored.map_or((None, Record::default()), |it| (Some(it.version), it.record));
            let next = Record { term: last.term + 1, view: last.view };
            match self.records.write(version.as_deref(), &next).await {
                Ok(version) => {
                    self.position = Some(Position { version, term: next.term });
                    self.number = self.number.max(number_of(&next));
                    return Ok(StoreContents { view: next.view, heartbeats: Vec::new() });
                }
                Err(WriteError::Conflict) => {}
                Err(WriteError::Unavailable(error)) => return Err(error),
            }
        }
        Err(StoreError::Unavailable(format!("{MAX_ATTEMPTS} attempts to write failed because somebody else wrote")))
    }

    async fn commit(&mut self, transaction: Transaction<'_>) -> Result<CommitOutcome, StoreError> {
        let Some(position) = self.position.take() else { return self.take_over().await.map(CommitOutcome::Conflict) };
        let Some(view) = transaction.view else {
            self.position = Some(position);
            return Ok(CommitOutcome::Committed);
        };
        let next = Record { term: position.term, view: Some(Arc::new(view.clone())) };
        // Without its position from here on: a cancelled or failed write may have been done.
        match self.records.write(Some(&position.version), &next).await {
            Ok(version) => {
                self.position = Some(Position { version, term: position.term });
                self.number = self.number.max(view.number);
                Ok(CommitOutcome::Committed)
            }
            // The next attempt takes over again, if this server still leads.
            Err(WriteError::Conflict) => {
                let view = self.records.read().await?.and_then(|stored| stored.record.view);
                Ok(CommitOutcome::Conflict(StoreContents { view, heartbeats: Vec::new() }))
            }
            Err(WriteError::Unavailable(error)) => Err(error),
        }
    }

    async fn next_remote_write(&mut self) -> RemoteWrite {
        while let Some(record) = self.remote.recv().await {
            if self.position.as_ref().is_some_and(|position| position.term < record.term) {
                // Another server has taken over, so this one can't know what gateways know.
                self.position = None;
            }
            // A record may have been read before the last write. A lost view is found at the next write.
            if number_of(&record) > self.number
                && let Some(view) = record.view
            {
                self.number = view.number;
                return RemoteWrite::View(view);
            }
        }
        pending().await
    }
}

fn number_of(record: &Record) -> u64 {
    record.view.as_ref().map_or(0, |view| view.number)
}

/// Sends the record whenever it has changed, until the receiver is dropped. Errors are reported by the writer.
async fn poll(mut object: ViewObject, records: mpsc::Sender<Record>) {
    let mut last = None;
    loop {
        if let Ok(Some(stored)) = object.read().await
            && last.as_ref() != Some(&stored.version)
        {
            last = Some(stored.version);
            if records.send(stored.record).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            () = records.closed() => return,
        }
    }
}
