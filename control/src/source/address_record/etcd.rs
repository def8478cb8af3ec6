//! The record in a key of etcd, which all servers share. The first write decides: another one compares the key's revision
//! in vain, and its server goes on with what is there. Nothing is watched: who needs another address writes.

use std::sync::Arc;
use std::time::Duration;

use vipgate_policy::address_record::AddressRecord;

use super::{RecordError, parse};
use crate::config::Etcd;
use crate::source::etcd::shared_key::{Revised, SharedKey};

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A record in etcd.
#[derive(Debug)]
pub(crate) struct EtcdRecord {
    key: SharedKey,
    /// Revision of the last known write of the key; 0: there is none. `None`: it isn't known.
    revision: Option<i64>,
}

impl EtcdRecord {
    pub(super) fn new(config: &Etcd) -> Self {
        Self { key: SharedKey::new(config, config.record_key(), TIMEOUT), revision: None }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.revision.is_some()
    }

    pub(super) async fn load(&mut self) -> Result<Arc<AddressRecord>, RecordError> {
        let stored = self.key.get().await?;
        self.read(&stored)
    }

    /// Writes a record that follows from the last known one; returns that of another server if it has written meanwhile.
    pub(super) async fn save(&mut self, next: &Arc<AddressRecord>) -> Result<Arc<AddressRecord>, RecordError> {
        let written = self.key.replace(self.revision.unwrap_or_default(), next.to_string().into_bytes()).await?;
        match written {
            Ok(revision) => self.revision = Some(revision),
            Err(stored) => return self.read(&stored),
        }
        Ok(next.clone())
    }

    fn read(&mut self, stored: &Revised) -> Result<Arc<AddressRecord>, RecordError> {
        self.revision = None;
        let damaged = |reason: String, what| {
            RecordError::Damaged(format!("etcd key {}: {reason}: mend the {what}, or delete the key", self.key.name()))
        };
        let text = str::from_utf8(&stored.value).map_err(|error| damaged(error.to_string(), "value"))?;
        let record = parse(text).map_err(|reason| damaged(reason, "line"))?;
        self.revision = Some(stored.revision);
        Ok(record.into())
    }
}
