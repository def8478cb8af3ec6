//! Membership store: the view and the last heartbeat of each gateway. It outlives a server and is shared by all
//! servers.

mod etcd;
pub(super) mod kubernetes;
mod memory;

use std::sync::Arc;

pub use self::etcd::EtcdStore;
pub use self::memory::MemoryStore;
use crate::membership::{Heartbeat, MembershipView};

/// A transaction: all of it is written, or nothing.
#[derive(Clone, Copy, Debug)]
pub struct Transaction<'a> {
    /// Accepted heartbeats, at most one per gateway.
    pub heartbeats: &'a [&'a Heartbeat],
    /// The next view.
    pub view: Option<&'a MembershipView>,
    /// Gateways whose heartbeats in the store must not have changed: the transaction deactivates or replaces them.
    pub unchanged: &'a [Arc<str>],
    /// Gateways whose heartbeats are deleted.
    pub removed: &'a [Arc<str>],
}

/// Outcome of a transaction.
#[derive(Clone, Debug)]
pub enum CommitOutcome {
    /// It was written.
    Committed,
    /// Nothing was written: the store has changed since it was last read. Its contents.
    Conflict(StoreContents),
}

/// Contents of the store.
#[derive(Clone, Debug, Default)]
pub struct StoreContents {
    /// The view, if there is one.
    pub view: Option<Arc<MembershipView>>,
    /// Heartbeats that were new to this server.
    pub heartbeats: Vec<Heartbeat>,
}

/// A write of another server.
#[derive(Clone, Debug)]
pub enum RemoteWrite {
    View(Arc<MembershipView>),
    Heartbeat(Box<Heartbeat>),
}

/// Error of a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It is unavailable, with the reason.
    #[error("{0}")]
    Unavailable(String),
}

pub trait Store: Send + 'static {
    /// Commits a transaction if the store hasn't changed since this server last read it.
    fn commit(&mut self, change: Transaction<'_>) -> impl Future<Output = Result<CommitOutcome, StoreError>> + Send;

    /// Begins to write in place of another server: whatever that one still has under way fails from here on. Returns the
    /// contents. Only where servers elect one that writes.
    fn take_over(&mut self) -> impl Future<Output = Result<StoreContents, StoreError>> + Send {
        std::future::ready(Ok(StoreContents::default()))
    }

    /// Waits for the next write of another server. Cancel-safe.
    fn next_remote_write(&mut self) -> impl Future<Output = RemoteWrite> + Send;
}
