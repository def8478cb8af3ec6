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
        self.retired.push(self.current.swap(Arc::new(snapshot)));
        self.collect();
    }

    /// Frees the snapshots that no worker reads any more; says how many are left.
    pub fn collect(&mut self) -> usize {
        self.retired.retain(|snapshot| Arc::strong_count(snapshot) > 1);
        self.retired.len()
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
