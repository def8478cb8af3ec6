//! One key of etcd that servers share. The first write decides: another one compares the key's revision in vain, and its
//! server goes on with what is there.

use std::fmt;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, ResponseHeader, Txn, TxnOp, TxnOpResponse, TxnResponse};
use tokio::time::timeout;

use super::member::{EtcdError, KeyRange, Member};
use crate::config::Etcd;

/// Timeout of the connection to a member.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A value, and the revision of its write; 0: the key doesn't exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Revised {
    pub(crate) revision: i64,
    pub(crate) value: Vec<u8>,
}

/// A key.
pub(crate) struct SharedKey {
    endpoints: Vec<String>,
    name: String,
    /// Timeout of a request to a member.
    timeout: Duration,
    /// The member in use.
    member: Option<Member>,
}

impl fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoints, name, timeout, member: _ } = self;
        let mut debug = f.debug_struct("SharedKey");
        debug.field("endpoints", endpoints).field("name", name).field("timeout", timeout).finish_non_exhaustive()
    }
}

impl SharedKey {
    pub(crate) fn new(config: &Etcd, name: String, timeout: Duration) -> Self {
        Self { endpoints: config.endpoints.clone(), name, timeout, member: None }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Reads it with a quorum.
    pub(crate) async fn get(&mut self) -> Result<Revised, EtcdError> {
        let response = self.execute(Txn::new().and_then([self.read()])).await?;
        Ok(revised(&response))
    }

    /// Writes a value that follows from the one of a revision; returns its revision. The inner error: what is there instead.
    pub(crate) async fn replace(&mut self, revision: i64, value: Vec<u8>) -> Result<Result<i64, Revised>, EtcdError> {
        let is_last = Compare::mod_revision(self.name.as_str(), CompareOp::Equal, revision);
        let put = TxnOp::put(self.name.as_str(), value, None);
        let response = self.execute(Txn::new().when([is_last]).and_then([put]).or_else([self.read()])).await?;
        if !response.succeeded() {
            return Ok(Err(revised(&response)));
        }
        Ok(Ok(response.header().map_or(0, ResponseHeader::revision)))
    }

    fn read(&self) -> TxnOp {
        TxnOp::get(self.name.as_str(), None)
    }

    async fn execute(&mut self, transaction: Txn) -> Result<TxnResponse, EtcdError> {
        let mut member = if let Some(member) = self.member.take() {
            member
        } else {
            let keys = KeyRange::with_prefix(&self.name);
            within(CONNECT_TIMEOUT, Member::connect_any(&self.endpoints, &keys)).await?
        };
        let response = within(self.timeout, member.execute(transaction)).await;
        let response = response.map_err(|error| error.at_member(&member))?;
        self.member = Some(member);
        Ok(response)
    }
}

async fn within<T>(duration: Duration, attempt: impl Future<Output = Result<T, EtcdError>>) -> Result<T, EtcdError> {
    timeout(duration, attempt).await.unwrap_or(Err(EtcdError::Timeout(duration)))
}

/// The value that a response has.
fn revised(response: &TxnResponse) -> Revised {
    let responses = response.op_responses();
    let pair = responses.iter().find_map(|response| match response {
        TxnOpResponse::Get(get) => get.kvs().first(),
        TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
    });
    pair.map(|pair| Revised { revision: pair.mod_revision(), value: pair.value().to_vec() }).unwrap_or_default()
}
