//! The membership view on the stream of a node's agent: a resource beside the publications, since a failover waits for no
//! policy. At most one response is unanswered, so a client that is slow gets the latest view only.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use tokio::sync::watch;

use super::Acknowledgment;
use super::acknowledgment::truncated;
use crate::membership::MembershipView;
use crate::policyd::codec::Response;
use crate::xds::publication::{PublishedResource, encode_responses};
use crate::xds::resource::{Content, Kind, encode};

/// The membership view on a stream.
#[derive(Debug)]
pub struct ViewStream {
    view: watch::Receiver<Arc<MembershipView>>,
    is_subscribed: bool,
    /// Number of the view that was sent last; 0: none.
    sent: u64,
    /// Whether the client hasn't answered it.
    is_unanswered: bool,
}

impl ViewStream {
    /// For a client that isn't subscribed.
    pub fn new(view: watch::Receiver<Arc<MembershipView>>) -> Self {
        Self { view, is_subscribed: false, sent: 0, is_unanswered: false }
    }

    /// Handles a request for this kind. The first one subscribes, whatever its names: there is one view. A view that the
    /// client rejects isn't sent again; the next one will be another.
    pub fn handle_request(&mut self, request: &DeltaDiscoveryRequest) -> Acknowledgment {
        self.is_subscribed = true;
        if !self.is_unanswered || request.response_nonce != nonce(self.sent) {
            return Acknowledgment::None;
        }
        self.is_unanswered = false;
        match &request.error_detail {
            None => Acknowledgment::Ack,
            Some(error) => Acknowledgment::Nack { reason: truncated(&error.message), refused: None },
        }
    }

    /// Waits for another view; forever if the client isn't subscribed. Cancel-safe.
    ///
    /// # Errors
    /// When there will be none any more: the stream ends.
    pub async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        if !self.is_subscribed {
            return std::future::pending().await;
        }
        self.view.changed().await
    }

    /// The response with the current view, if the client is to get it now.
    pub fn next_response(&mut self) -> Option<Response> {
        if !self.is_subscribed || self.is_unanswered {
            return None;
        }
        let view = self.view.borrow_and_update().clone();
        // Number 0 is no view yet.
        if view.number == self.sent {
            return None;
        }
        let (key, content) = encode::view(&view);
        let version = Content::version_text(content.version);
        let resource = PublishedResource { key, content, changed_in: 0 };
        let responses = encode_responses(&version, Kind::View, std::iter::once(&resource), Vec::new());
        (self.sent, self.is_unanswered) = (view.number, true);
        responses.into_iter().next().map(|it| Response { bytes: it.bytes, nonce: nonce(view.number), charge: None })
    }
}

/// The nonce of the response with a view; those of publications are numbers.
fn nonce(view: u64) -> String {
    format!("view-{view}")
}
