//! The handle on the kernel's network: what it looks like now, when it looks different, which next hops didn't answer.

use std::sync::Arc;

use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{NetworkSpec, Role};

use super::error::NetworkError;
use super::model::Model;
use super::socket::Subscription;
use super::watcher::{LinkReport, NeighbourFailed, Published, Watcher, read_everything};

/// Failed next hops that may wait for a slow reader; the oldest are lost.
const FAILURES: usize = 4096;

/// An interface as configured.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its number.
    pub id: InterfaceId,
    /// Its name.
    pub name: String,
    /// Which side of the gateway it is.
    pub role: Role,
}

/// The kernel's network as it concerns the gateway. Dropping it ends the listening.
#[derive(Debug)]
pub struct Network {
    published: watch::Receiver<Arc<NetworkSpec>>,
    links: watch::Receiver<LinkReport>,
    failures: broadcast::Sender<NeighbourFailed>,
    task: JoinHandle<()>,
}

impl Network {
    /// Reads the network of this thread's namespace and begins to listen for changes, in a task of the current runtime.
    ///
    /// # Errors
    /// An interface is missing or unsuitable, or netlink can't be used. Later failures are logged and retried.
    pub async fn open(wanted: Vec<Wanted>) -> Result<Self, NetworkError> {
        // Subscribed first: what changes during the dump is heard after it.
        let subscription =
            Subscription::open().map_err(|source| NetworkError::new("listening to the kernel's network", source))?;
        let dump =
            read_everything().await.map_err(|source| NetworkError::new("reading the kernel's network", source))?;
        let model = Model::new(&wanted, dump)?;
        let (failures, _) = broadcast::channel(FAILURES);
        let (watcher, Published { network: published, links }) = Watcher::new(subscription, model, failures.clone());
        Ok(Self { published, links, failures, task: tokio::spawn(watcher.run()) })
    }

    /// What the network looks like now.
    pub fn current(&self) -> Arc<NetworkSpec> {
        self.published.borrow().clone()
    }

    /// Waits until the network looks different from what was last returned here, or at the opening. A burst of changes
    /// ends it once. Nothing is lost when the future is dropped.
    ///
    /// # Errors
    /// The task that listens has ended, which only a bug can make it do.
    pub async fn changed(&mut self) -> Result<Arc<NetworkSpec>, NetworkError> {
        self.published.changed().await.map_err(|_| NetworkError::Ended)?;
        Ok(self.published.borrow_and_update().clone())
    }

    /// How the interfaces stand, for those who follow it on their own: at once, where the network waits for the end of a burst.
    pub fn links(&self) -> watch::Receiver<LinkReport> {
        self.links.clone()
    }

    /// The next hops that don't answer, from now on. Each reader hears of all.
    pub fn failures(&self) -> broadcast::Receiver<NeighbourFailed> {
        self.failures.subscribe()
    }

    /// The network, for those who follow it on their own.
    pub(super) fn follow(&self) -> watch::Receiver<Arc<NetworkSpec>> {
        self.published.clone()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.task.abort();
    }
}
