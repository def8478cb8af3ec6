//! The membership view on the stream of a node's agent: it waits neither for a publication nor for memory.

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use tokio::time::Instant;

use super::admission::Role;
use super::{End, StreamTask};
use crate::policyd::budget::Purpose;
use crate::xds::resource::Kind;

impl StreamTask {
    /// Handles a request of an agent for the view. False: it is about something else. Gateways get views in reply to their
    /// heartbeats.
    pub(super) fn receive_view(&mut self, request: &DeltaDiscoveryRequest) -> bool {
        let is_agent = self.client.as_ref().is_some_and(|client| client.role == Role::Node);
        if !is_agent || request.type_url != Kind::View.type_url() {
            return false;
        }
        let acknowledgment = self.view.handle_request(request);
        self.record(acknowledgment, None);
        true
    }

    /// Sends the view if the client is to get it now.
    pub(super) async fn send_view(&mut self) -> Result<(), End> {
        let Some(response) = self.view.next_response() else { return Ok(()) };
        let charge = self.service.budget.charge(self.identity.address, Purpose::Responses);
        self.send(response, charge, Instant::now() + self.service.budget.stall_timeout()).await
    }
}
