//! Record store: the record of terms and views, which outlives a server and is shared by all. It is replaced whole, by
//! compare-and-swap: a file under a lock, a key of etcd, or a ConfigMap.

pub(super) mod config_map;
pub(super) mod etcd;
#[cfg(test)]
pub(in crate::policyd) mod fake;
pub(super) mod file;
pub(super) mod writer;

use std::sync::Arc;

use prost::{DecodeError, Message};

use crate::membership::MembershipView;
use crate::membership::authority::Record;
use crate::xds::membership_message::InvalidMessage;
use crate::xds::proto;

/// A record as it was read.
#[derive(Clone, Debug)]
pub(in crate::policyd) struct StoredRecord {
    /// Changes with each write.
    version: String,
    record: Record,
}

/// A store is unavailable, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(in crate::policyd) struct StoreError(String);

/// Why a write has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::policyd) enum WriteError {
    /// The record isn't the one that was read.
    #[error("somebody else has written the record")]
    Conflict,
    /// It was refused, or there was no response: it may have been done.
    #[error(transparent)]
    Unavailable(#[from] StoreError),
}

/// Where the record is.
pub(in crate::policyd) trait RecordStore: Send + 'static {
    /// Reads it with a quorum; `None`: there is none.
    fn load(&mut self) -> impl Future<Output = Result<Option<StoredRecord>, StoreError>> + Send;

    /// Replaces the record of a version, or creates it; returns its version.
    fn compare_and_swap(
        &mut self,
        version: Option<&str>,
        record: &Record,
    ) -> impl Future<Output = Result<String, WriteError>> + Send;
}

/// Why bytes aren't a record.
#[derive(Debug, thiserror::Error)]
enum RecordError {
    #[error("not a record of membership ({0})")]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Invalid(#[from] InvalidMessage),
}

fn encode(record: &Record) -> Vec<u8> {
    let view = (record.view.number > 0).then(|| proto::View::from(&*record.view));
    proto::MembershipRecord { term: record.term, view }.encode_to_vec()
}

fn decode(bytes: &[u8]) -> Result<Record, RecordError> {
    let proto::MembershipRecord { term, view } = proto::MembershipRecord::decode(bytes)?;
    let view = view.map(MembershipView::try_from).transpose()?.unwrap_or_default();
    Ok(Record { term, view: Arc::new(view) })
}
