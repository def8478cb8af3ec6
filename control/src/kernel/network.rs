//! Handle of the network monitor: the current state, its changes, and failed neighbors.

use std::sync::Arc;

use tokio::sync::{broadcast, watch};
use vipgate_common::Task;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{NetworkSpec, Role};
use vipgate_netlink::Subscription;

use super::error::NetworkError;
use super::model::Model;
use super::watcher::{LinkReport, NeighborFailed, Published, Watcher, read_everything};

/// Failed neighbors buffered for a slow receiver; the oldest are lost.
const MAX_QUEUED_FAILURES: usize = 4096;

/// An interface as configured.
#[derive(Clone, Debug)]
pub struct InterfaceConfig {
    pub id: InterfaceId,
    pub name: String,
    /// Its role: inside, outside or both.
    pub role: Role,
}

/// The kernel's network state as far as the gateway uses it. Dropping it ends the monitoring task.
#[derive(Debug)]
pub struct Network {
    published: watch::Receiver<Arc<NetworkSpec>>,
    links: watch::Receiver<LinkReport>,
    failed_neighbors: broadcast::Sender<NeighborFailed>,
    _task: Task,
}

impl Network {
    /// Dumps the network state of this thread's namespace and starts a task in the current runtime that follows
    /// changes.
    ///
    /// # Errors
    /// An interface is missing or unsuitable, or netlink can't be used. Later failures are logged and retried.
    pub async fn open(wanted: Vec<InterfaceConfig>) -> Result<Self, NetworkError> {
        // Subscribed before the dump: changes during the dump are received after it.
        let subscription =
            Subscription::network().map_err(|source| NetworkError::new("subscribing to rtnetlink groups", source))?;
        let dump = read_everything()
            .await
            .map_err(|source| NetworkError::new("dumping the kernel's network state", source))?;
        let model = Model::new(&wanted, dump)?;
        let (failures, _) = broadcast::channel(MAX_QUEUED_FAILURES);
        let (watcher, Published { network: published, links }) = Watcher::new(subscription, model, failures.clone());
        Ok(Self { published, links, failed_neighbors: failures, _task: Task::spawn(watcher.run()) })
    }

    /// The current state.
    pub fn current(&self) -> Arc<NetworkSpec> {
        self.published.borrow().clone()
    }

    /// Waits until the state differs from the one last returned here, or from the initial one. A burst of changes
    /// counts as one. Cancel-safe.
    ///
    /// # Errors
    /// The monitoring task has ended, which is a bug.
    pub async fn changed(&mut self) -> Result<Arc<NetworkSpec>, NetworkError> {
        self.published.changed().await.map_err(|_| NetworkError::Ended)?;
        Ok(self.published.borrow_and_update().clone())
    }

    /// Subscribes to the link states of the interfaces, which are published at once, not at the end of a burst.
    pub fn links(&self) -> watch::Receiver<LinkReport> {
        self.links.clone()
    }

    /// Subscribes to neighbors whose resolution fails from now on. Every receiver gets all of them.
    pub fn failed_neighbors(&self) -> broadcast::Receiver<NeighborFailed> {
        self.failed_neighbors.subscribe()
    }

    /// Subscribes to the network state.
    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<NetworkSpec>> {
        self.published.clone()
    }
}
