//! Neighbor requests: workers queue next hops without a MAC address, the control thread passes them to the resolver.

use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use tokio::sync::Notify;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;

use crate::kernel::Resolver;

/// Maximum number of neighbor requests that wait for the control thread.
const MAX_REQUESTS: usize = 1024;

/// Wakes the control thread.
#[derive(Debug, Default)]
struct ControlDoorbell(Notify);

impl Wake for ControlDoorbell {
    fn wake(&self) {
        self.0.notify_one();
    }
}

/// The queue between the workers and the control thread.
#[derive(Debug)]
pub(super) struct NeighborRequests {
    requests: ResolutionRequests,
    doorbell: Arc<ControlDoorbell>,
}

impl NeighborRequests {
    /// An empty queue.
    pub(super) fn new() -> Self {
        let doorbell = Arc::new(ControlDoorbell::default());
        let requests = ResolutionRequests { queue: Arc::new(ArrayQueue::new(MAX_REQUESTS)), waker: doorbell.clone() };
        Self { requests, doorbell }
    }

    /// The workers' side.
    pub(super) fn sender(&self) -> &ResolutionRequests {
        &self.requests
    }

    /// Waits for requests. Cancel-safe.
    pub(super) async fn queued(&self) {
        self.doorbell.0.notified().await;
    }

    /// Starts the resolution of all requested neighbors.
    pub(super) fn resolve(&self, resolver: &Resolver) {
        while let Some(request) = self.requests.queue.pop() {
            // Fails when too many are in progress; workers repeat the request.
            resolver.resolve(request.interface, request.address);
        }
    }
}
