//! The record in a key of etcd, which all servers share. The first write decides: another one compares the key's revision
//! in vain, and its server goes on with what is there. Nothing is watched: who needs another address writes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, ResponseHeader, Txn, TxnOp, TxnOpResponse, TxnResponse};
use tokio::time::timeout;
use vipgate_policy::address_record::AddressRecord;

use super::{RecordError, parse};
use crate::config::Etcd;
use crate::source::etcd::member::{EtcdError, KeyRange, Member};

/// Timeout of an attempt, with the connection to a member.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A record in etcd.
pub(crate) struct EtcdRecord {
    endpoints: Vec<String>,
    key: String,
    /// The member in use.
    member: Option<Member>,
    /// Revision of the last known write of the key; 0: there is none. `None`: it isn't known.
    revision: Option<i64>,
}

impl fmt::Debug for EtcdRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoints, key, member: _, revision } = self;
        let mut debug = f.debug_struct("EtcdRecord");
        debug.field("endpoints", endpoints).field("key", key).field("revision", revision).finish_non_exhaustive()
    }
}

impl EtcdRecord {
    pub(super) fn new(config: &Etcd) -> Self {
        Self { endpoints: config.endpoints.clone(), key: config.record_key(), member: None, revision: None }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.revision.is_some()
    }

    pub(super) async fn load(&mut self) -> Result<Arc<AddressRecord>, RecordError> {
        let response = self.execute(Txn::new().and_then([self.get()])).await?;
        self.read(&response)
    }

    /// Writes a record that follows from the last known one; returns that of another server if it has written meanwhile.
    pub(super) async fn save(&mut self, next: &Arc<AddressRecord>) -> Result<Arc<AddressRecord>, RecordError> {
        let is_last = Compare::mod_revision(self.key.as_str(), CompareOp::Equal, self.revision.unwrap_or_default());
        let put = TxnOp::put(self.key.as_str(), next.to_string(), None);
        let response = self.execute(Txn::new().when([is_last]).and_then([put]).or_else([self.get()])).await?;
        if !response.succeeded() {
            return self.read(&response);
        }
        self.revision = response.header().map(ResponseHeader::revision);
        Ok(next.clone())
    }

    fn get(&self) -> TxnOp {
        TxnOp::get(self.key.as_str(), None)
    }

    async fn execute(&mut self, transaction: Txn) -> Result<TxnResponse, EtcdError> {
        let attempt = async {
            let mut member = match self.member.take() {
                Some(member) => member,
                None => Member::connect_any(&self.endpoints, &KeyRange::with_prefix(&self.key)).await?,
            };
            let response = member.execute(transaction).await.map_err(|error| error.at_member(&member))?;
            self.member = Some(member);
            Ok(response)
        };
        timeout(TIMEOUT, attempt).await.unwrap_or(Err(EtcdError::Timeout(TIMEOUT)))
    }

    /// The record that a response has.
    fn read(&mut self, response: &TxnResponse) -> Result<Arc<AddressRecord>, RecordError> {
        self.revision = None;
        let responses = response.op_responses();
        let pair = responses.iter().find_map(|response| match response {
            TxnOpResponse::Get(get) => get.kvs().first(),
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
        });
        let (revision, value) = pair.map_or((0, &[][..]), |pair| (pair.mod_revision(), pair.value()));
        let damaged = |reason: String, what| {
            RecordError::Damaged(format!("etcd key {}: {reason}: mend the {what}, or delete the key", self.key))
        };
        let text = str::from_utf8(value).map_err(|error| damaged(error.to_string(), "value"))?;
        let record = parse(text).map_err(|reason| damaged(reason, "line"))?;
        self.revision = Some(revision);
        Ok(record.into())
    }
}
