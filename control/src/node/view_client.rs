//! View client of a node: follows the membership view. Servers may send views in another order, so the highest number
//! counts; and while none is reachable, the last one stays.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::Published;
use super::attempts::{Attempts, RetryDelay};
use super::cache::Cache;
use super::decode;
use crate::config::{NodePolicyServer, PolicyServer};
use crate::xds::client::{Target, describe_status, open_channel};
use crate::xds::proto;
use crate::xds::proto::membership_client::MembershipClient;

/// Maximum size of a view, bytes.
const MAX_VIEW_BYTES: usize = 1 << 20;
/// Timeout for the server to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay between attempts: first and maximum. A view that is late delays a failover.
const RETRY_DELAY: RetryDelay = (Duration::from_millis(50), Duration::from_secs(1));

pub(super) struct ViewClient {
    node: String,
    server: PolicyServer,
    attempts: Attempts,
    published: Published,
    cache: Arc<Cache>,
}

impl ViewClient {
    pub(super) fn new(node: &str, server: &NodePolicyServer, published: Published, cache: Arc<Cache>) -> Self {
        let (attempts, server) = (Attempts::new(server, RETRY_DELAY), server.connection());
        Self { node: node.to_owned(), server, attempts, published, cache }
    }

    /// Follows the view for as long as the agent runs.
    pub(super) async fn run(mut self) {
        loop {
            let target = self.attempts.next().await;
            let reason = self.run_stream(&target).await;
            if self.attempts.is_new(&reason) {
                let server = target.to_string();
                tracing::warn!(event = "membership_lost", server, reason, "no membership view from the policy server");
            }
            self.attempts.wait().await;
        }
    }

    async fn run_stream(&mut self, target: &Target) -> String {
        let (channel, root_cause) = match open_channel(&self.server, target).await {
            Ok(connection) => connection,
            Err(error) => return error.to_string(),
        };
        let mut service = MembershipClient::new(channel).max_decoding_message_size(MAX_VIEW_BYTES);
        let request = match self.attempts.request(proto::WatchRequest { node: self.node.clone() }) {
            Ok(request) => request,
            Err(reason) => return reason,
        };
        let mut updates = match timeout(OPEN_TIMEOUT, service.watch(request)).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return root_cause.explain(describe_status(&status)),
            Err(_) => return format!("connected, but no response within {} s", OPEN_TIMEOUT.as_secs()),
        };
        self.attempts.connected(target);
        loop {
            match updates.message().await {
                Ok(Some(update)) => {
                    if let Some(view) = update.view
                        && let Err(error) = self.receive(view)
                    {
                        return format!("the server has sent an invalid view: {error}");
                    }
                }
                Ok(None) => return "the server closed the stream".to_owned(),
                Err(status) => return root_cause.explain(describe_status(&status)),
            }
        }
    }

    fn receive(&self, message: proto::View) -> Result<(), crate::xds::membership_message::InvalidMessage> {
        let view = Arc::new(decode::view(message.clone())?);
        let is_new = self.published.view.send_if_modified(|current| {
            let is_new = view.number > current.number;
            if is_new {
                *current = view;
            }
            is_new
        });
        if is_new {
            self.cache.update(|cached| cached.view = Some(message));
        }
        Ok(())
    }
}
