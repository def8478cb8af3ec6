//! Where views outlive a server, and where several servers find the same: a view and the last beat of each gateway.

mod etcd;
mod memory;

pub use self::etcd::Etcd;
pub use self::memory::Memory;

use std::sync::Arc;

use crate::members::{Beat, View};

/// What is to be written: all of it, or nothing.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// Beats that are to count, one of each gateway at most.
    pub beats: &'a [&'a Beat],
    /// The next view.
    pub view: Option<&'a View>,
    /// Gateways of which nothing new may be there, for the next view, or a beat of another process, is about that.
    pub silent: &'a [Arc<str>],
    /// Gateways that are gone for good.
    pub gone: &'a [Arc<str>],
}

/// What became of it.
#[derive(Clone, Debug)]
pub enum Committed {
    /// It is written, and the view was the one that was known.
    Done,
    /// Nothing is written: other things are there than were known. These.
    Outdated(Snapshot),
}

/// What is there.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The view, if there is one.
    pub view: Option<Arc<View>>,
    /// Beats that weren't known.
    pub beats: Vec<Beat>,
}

/// What another server has written.
#[derive(Clone, Debug)]
pub enum News {
    /// A view.
    View(Arc<View>),
    /// A beat.
    Beat(Beat),
}

/// Why a store can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// What it says itself.
    #[error("{0}")]
    Unusable(String),
}

/// A store.
pub trait Store: Send + 'static {
    /// Writes, if nothing else was written since this server last looked.
    fn commit(&mut self, change: Change<'_>) -> impl Future<Output = Result<Committed, StoreError>> + Send;

    /// Waits for what another server writes. Whoever stops to wait loses nothing.
    fn news(&mut self) -> impl Future<Output = News> + Send;
}
