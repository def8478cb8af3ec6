//! Updates that come in a crowd. Each makes sessions ask whether it concerns them, so a thousand a second would cost packets
//! dearly: the first takes effect at once, those that come soon after it together.

use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use tokio::time::Instant;

use crate::xds::resource::Kind;

/// From one update's effect to the next one's, at least. A change is to be in force within 100 ms, so this leaves enough.
pub const PACE: Duration = Duration::from_millis(50);

/// Responses that wait until it is time again.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    /// When the last update took effect.
    last: Option<Instant>,
    responses: Vec<DeltaDiscoveryResponse>,
    /// How many of them belong to updates that are there whole, and how many updates these are.
    whole: (usize, u64),
}

/// Responses whose time has come.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) responses: Vec<DeltaDiscoveryResponse>,
    /// Updates that they are; 0 if it is the beginning of one.
    pub(super) updates: u64,
}

impl Crowd {
    pub(super) fn is_empty(&self) -> bool {
        self.responses.is_empty()
    }

    /// An update takes effect now: those that follow it soon gather.
    pub(super) fn begin(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Whether a response has to wait.
    pub(super) fn gathers(&self) -> bool {
        !self.is_empty() || self.last.is_some_and(|last| last.elapsed() < PACE)
    }

    /// Until when those wait that are there.
    pub(super) fn due(&self) -> Option<Instant> {
        self.last.map(|last| last + PACE).filter(|_| !self.is_empty())
    }

    pub(super) fn push(&mut self, response: DeltaDiscoveryResponse) {
        let ends_update = Kind::of_url(&response.type_url) == Some(Kind::Settings);
        self.responses.push(response);
        if ends_update {
            self.whole = (self.responses.len(), self.whole.1 + 1);
        }
    }

    /// Takes the updates that are whole; without one, what there is.
    pub(super) fn take(&mut self) -> Gathered {
        let (count, updates) = std::mem::take(&mut self.whole);
        let rest = if updates > 0 { self.responses.split_off(count) } else { Vec::new() };
        Gathered { responses: std::mem::replace(&mut self.responses, rest), updates }
    }
}
