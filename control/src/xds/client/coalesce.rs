//! Coalescing of updates. Sessions are revalidated after each update, so a thousand updates a second would slow down
//! the packet path: the first update takes effect at once, those within [`COALESCE_INTERVAL`] after it together.

use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use tokio::time::Instant;

use crate::xds::resource::Kind;

/// Minimum interval between updates. A change must be in force within 100 ms: this leaves half of it.
pub const COALESCE_INTERVAL: Duration = Duration::from_millis(50);

/// Responses deferred until the interval is over.
#[derive(Debug, Default)]
pub(super) struct Coalescer {
    /// When the last update took effect.
    last: Option<Instant>,
    responses: Vec<DeltaDiscoveryResponse>,
    /// Number of responses that form complete updates, and the number of these updates.
    complete: (usize, u64),
}

/// Responses to apply as one update.
#[derive(Debug, Default)]
pub(super) struct CoalescedUpdates {
    pub(super) responses: Vec<DeltaDiscoveryResponse>,
    /// Number of complete updates; 0: the responses are the beginning of one.
    pub(super) update_count: u64,
}

impl Coalescer {
    pub(super) fn is_empty(&self) -> bool {
        self.responses.is_empty()
    }

    /// Starts the interval: an update takes effect now.
    pub(super) fn start_interval(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Whether a response must be deferred.
    pub(super) fn should_defer(&self) -> bool {
        !self.is_empty() || self.last.is_some_and(|last| last.elapsed() < COALESCE_INTERVAL)
    }

    /// When the deferred responses are due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.last.map(|last| last + COALESCE_INTERVAL).filter(|_| !self.is_empty())
    }

    pub(super) fn push(&mut self, response: DeltaDiscoveryResponse) {
        let ends_update = Kind::from_type_url(&response.type_url) == Some(Kind::Settings);
        self.responses.push(response);
        if ends_update {
            self.complete = (self.responses.len(), self.complete.1 + 1);
        }
    }

    /// Takes all complete updates; if there is none, the beginning of the first.
    pub(super) fn take_complete(&mut self) -> CoalescedUpdates {
        let (count, updates) = std::mem::take(&mut self.complete);
        let rest = if updates > 0 { self.responses.split_off(count) } else { Vec::new() };
        CoalescedUpdates { responses: std::mem::replace(&mut self.responses, rest), update_count: updates }
    }
}
