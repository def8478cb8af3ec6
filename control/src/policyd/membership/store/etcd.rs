//! The record in a key of etcd, which all servers share. Limits: plain http and no passwords, like the policy source.

#[cfg(test)]
mod tests;

use std::time::Duration;

use super::{RecordStore, StoreError, StoredRecord, WriteError, decode, encode};
use crate::config::Etcd;
use crate::membership::authority::Record;
use crate::source::etcd::shared_key::SharedKey;

/// Minimum and maximum timeout of a request; in between, half a TTL.
const TIMEOUT_RANGE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));

/// A record in etcd.
pub(in crate::policyd) struct EtcdStore {
    key: SharedKey,
}

impl EtcdStore {
    /// A store with a prefix beside the policy source's, for leases with this TTL.
    pub(in crate::policyd) fn new(config: &Etcd, ttl: Duration) -> Self {
        let timeout = (ttl / 2).clamp(TIMEOUT_RANGE.0, TIMEOUT_RANGE.1);
        Self { key: SharedKey::new(config, format!("{}record", config.membership_prefix()), timeout) }
    }
}

impl RecordStore for EtcdStore {
    async fn load(&mut self) -> Result<Option<StoredRecord>, StoreError> {
        // A future of a client, which is large.
        let read = Box::pin(self.key.get()).await;
        let pair = read.map_err(|error| StoreError(format!("etcd is unreachable: {error}")))?;
        if pair.revision == 0 {
            return Ok(None);
        }
        let record = decode(&pair.value)
            .map_err(|error| StoreError(format!("etcd key {}: {error}: delete the key", self.key.name())))?;
        Ok(Some(StoredRecord { version: pair.revision.to_string(), record }))
    }

    async fn compare_and_swap(&mut self, version: Option<&str>, record: &Record) -> Result<String, WriteError> {
        // A version is a revision that this store has read.
        let revision = version.and_then(|version| version.parse().ok()).unwrap_or_default();
        let written = Box::pin(self.key.replace(revision, encode(record))).await;
        match written {
            Ok(Ok(revision)) => Ok(revision.to_string()),
            Ok(Err(_)) => Err(WriteError::Conflict),
            Err(error) => Err(StoreError(format!("etcd is unreachable: {error}")).into()),
        }
    }
}
