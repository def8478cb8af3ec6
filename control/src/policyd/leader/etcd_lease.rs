//! The lease as a key of etcd: its value is the holder, its revision changes with each renewal.

use std::time::Duration;

use super::LeaseStore;
use super::election::{LEASE_DURATION, LeaseState};
use crate::config::Etcd;
use crate::source::etcd::shared_key::SharedKey;

/// Timeout of a request about the lease.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// A key.
pub(in crate::policyd) struct EtcdLease {
    key: SharedKey,
    /// Revision that was read or written last; 0: the key doesn't exist.
    revision: i64,
}

impl EtcdLease {
    pub(in crate::policyd) fn new(config: &Etcd) -> Self {
        let name = format!("{}leader", config.membership_prefix());
        Self { key: SharedKey::new(config, name, REQUEST_TIMEOUT), revision: 0 }
    }
}

impl LeaseStore for EtcdLease {
    fn name(&self) -> String {
        self.key.name().to_owned()
    }

    fn hint(&self) -> &'static str {
        "check that etcd runs, has a leader and matches `source.etcd.endpoints`"
    }

    async fn read(&mut self) -> Result<Option<LeaseState>, String> {
        // A future of a client, which is large.
        let pair = Box::pin(self.key.get()).await.map_err(|error| error.to_string())?;
        self.revision = pair.revision;
        let holder = String::from_utf8_lossy(&pair.value).into_owned();
        let lease = LeaseState { holder, version: pair.revision.to_string(), duration: LEASE_DURATION };
        Ok((pair.revision > 0).then_some(lease))
    }

    async fn write(&mut self, holder: &str) -> Result<Option<LeaseState>, String> {
        let written = Box::pin(self.key.replace(self.revision, holder.into())).await;
        let Ok(revision) = written.map_err(|error| error.to_string())? else { return Ok(None) };
        self.revision = revision;
        let version = revision.to_string();
        Ok(Some(LeaseState { holder: holder.to_owned(), version, duration: LEASE_DURATION }))
    }
}
