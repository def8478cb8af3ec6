//! Publication of snapshots from control to the workers, through an atomic pointer (RCU style).
//!
//! A worker loads the snapshot once per batch, after it has received it, at the cost of one atomic load if nothing has
//! changed. It never frees a snapshot: the publisher keeps each one until no worker references it.

use std::sync::Arc;

use arc_swap::ArcSwap;
use arc_swap::cache::Cache;

use super::Snapshot;

/// Write side, of the control thread.
#[derive(Debug)]
pub struct Publisher {
    current: Arc<ArcSwap<Snapshot>>,
    retired: Vec<Arc<Snapshot>>,
}

impl Publisher {
    /// A publisher with its first snapshot.
    pub fn new(first: Snapshot) -> Self {
        Self { current: Arc::new(ArcSwap::from_pointee(first)), retired: Vec::new() }
    }

    /// Publishes a snapshot and frees those that no worker references any more.
    pub fn publish(&mut self, snapshot: Snapshot) {
        self.replace(snapshot);
        drop(self.take_unreferenced());
    }

    /// Publishes a snapshot without freeing any.
    pub fn replace(&mut self, snapshot: Snapshot) {
        self.retired.push(self.current.swap(Arc::new(snapshot)));
    }

    /// Takes the snapshots that no worker references any more, to be freed off the control thread: for a large policy
    /// that takes time.
    pub fn take_unreferenced(&mut self) -> Vec<Arc<Snapshot>> {
        self.retired.extract_if(.., |snapshot| Arc::strong_count(snapshot) == 1).collect()
    }

    /// Retired snapshots that a worker may still reference.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Frees the snapshots that no worker references any more; returns how many are left.
    pub fn collect(&mut self) -> usize {
        drop(self.take_unreferenced());
        self.retired()
    }

    /// A read side, for a worker.
    pub fn reader(&self) -> Reader {
        Reader(Cache::new(self.current.clone()))
    }
}

/// Read side, of a worker.
#[derive(Debug)]
pub struct Reader(Cache<Arc<ArcSwap<Snapshot>>, Arc<Snapshot>>);

impl Reader {
    /// The current snapshot.
    #[inline]
    pub fn read(&mut self) -> &Arc<Snapshot> {
        self.0.load()
    }
}
