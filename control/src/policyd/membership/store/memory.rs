//! In-memory store of a single server: nothing outlives it, and the next server recovers from the gateways' reports.

use std::future::pending;

use super::{CommitOutcome, RemoteWrite, Store, StoreError, Transaction};

/// A store without any data beside the membership state.
#[derive(Debug, Default)]
pub struct MemoryStore;

impl Store for MemoryStore {
    async fn commit(&mut self, _: Transaction<'_>) -> Result<CommitOutcome, StoreError> {
        Ok(CommitOutcome::Committed)
    }

    async fn next_remote_write(&mut self) -> RemoteWrite {
        pending().await
    }
}
