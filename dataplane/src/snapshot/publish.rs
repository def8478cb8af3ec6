//! The one crossing between control and workers: a cell with the current snapshot.
//!
//! A worker looks once a batch, at the price of one atomic load when nothing changed. It never frees a snapshot: the
//! publisher keeps each one until no worker holds it.

use std::sync::Arc;

use arc_swap::ArcSwap;
use arc_swap::cache::Cache;

use super::Snapshot;

/// The control thread's side.
#[derive(Debug)]
pub struct Publisher {
    current: Arc<ArcSwap<Snapshot>>,
    retired: Vec<Arc<Snapshot>>,
}

impl Publisher {
    /// A cell with its first snapshot.
    pub fn new(first: Snapshot) -> Self {
        Self { current: Arc::new(ArcSwap::from_pointee(first)), retired: Vec::new() }
    }

    /// Puts a snapshot in force and frees those that no worker reads any more.
    pub fn publish(&mut self, snapshot: Snapshot) {
        self.put(snapshot);
        drop(self.take_unread());
    }

    /// Puts a snapshot in force, and frees none.
    pub fn put(&mut self, snapshot: Snapshot) {
        self.retired.push(self.current.swap(Arc::new(snapshot)));
    }

    /// The snapshots that no worker reads any more, to be freed by whoever has the time: of a large policy, that takes some.
    pub fn take_unread(&mut self) -> Vec<Arc<Snapshot>> {
        self.retired.extract_if(.., |snapshot| Arc::strong_count(snapshot) == 1).collect()
    }

    /// Snapshots that a worker may still read, but for the one in force.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Frees the snapshots that no worker reads any more; says how many are left.
    pub fn collect(&mut self) -> usize {
        drop(self.take_unread());
        self.retired()
    }

    /// A worker's side.
    pub fn reader(&self) -> Reader {
        Reader(Cache::new(self.current.clone()))
    }
}

/// A worker's side.
#[derive(Debug)]
pub struct Reader(Cache<Arc<ArcSwap<Snapshot>>, Arc<Snapshot>>);

impl Reader {
    /// The snapshot in force.
    #[inline]
    pub fn read(&mut self) -> &Arc<Snapshot> {
        self.0.load()
    }
}
