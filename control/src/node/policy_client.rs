//! Policy client of a node: a delta xDS stream with two resources by name, the node's policy and what is inside the
//! cluster. Each takes effect when it has arrived, and is acknowledged then.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use envoy_types::pb::google::rpc::Status;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Code;

use super::attempts::{Attempts, RetryDelay};
use super::cache::Cache;
use super::{Published, ServerConnection, decode};
use crate::config::{NodePolicyServer, PolicyServer};
use crate::xds::client::{Target, describe_status, open_channel};
use crate::xds::proto;
use crate::xds::resource::{CLUSTER, INCARNATION, Kind, NODE_ROLE, ROLE};

/// Maximum size of a response, bytes.
const MAX_RESPONSE_BYTES: usize = 16 << 20;
/// Timeout for the server to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay between attempts: first and maximum.
const RETRY_DELAY: RetryDelay = (Duration::from_millis(100), Duration::from_secs(5));

/// The kinds that a node subscribes to.
const KINDS: [Kind; 2] = [Kind::Cluster, Kind::NodePolicy];

pub(super) struct PolicyClient {
    node: Arc<str>,
    server: PolicyServer,
    attempts: Attempts,
    published: Published,
    cache: Arc<Cache>,
    incarnation: u64,
}

/// Why a stream has ended: for the log.
type StreamEnd = String;

impl PolicyClient {
    pub(super) fn new(node: &str, server: &NodePolicyServer, published: Published, cache: Arc<Cache>) -> Self {
        let (attempts, server) = (Attempts::new(server, RETRY_DELAY), server.connection());
        // Without a random source the server tells processes apart by their addresses.
        let incarnation = getrandom::u64().unwrap_or_default();
        Self { node: node.into(), server, attempts, published, cache, incarnation }
    }

    /// Follows the server's policy for as long as the agent runs.
    pub(super) async fn run(mut self) {
        loop {
            let target = self.attempts.next().await;
            let reason = self.run_stream(&target).await;
            let error = Some(reason.clone());
            self.published.connection.send_replace(ServerConnection { is_connected: false, error });
            if self.attempts.is_new(&reason) {
                let server = target.to_string();
                tracing::warn!(event = "policy_server_lost", server, reason, "no connection to the policy server");
            }
            self.attempts.wait().await;
        }
    }

    async fn run_stream(&mut self, target: &Target) -> StreamEnd {
        let (channel, root_cause) = match open_channel(&self.server, target).await {
            Ok(connection) => connection,
            Err(error) => return error.to_string(),
        };
        let (requests, outgoing) = mpsc::unbounded_channel();
        for kind in KINDS {
            // Can't fail: this function owns the receiver.
            let _ = requests.send(self.subscription(kind));
        }
        let mut service = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES);
        let request = match self.attempts.request(UnboundedReceiverStream::new(outgoing)) {
            Ok(request) => request,
            Err(reason) => return reason,
        };
        let opened = timeout(OPEN_TIMEOUT, service.delta_aggregated_resources(request)).await;
        let mut responses = match opened {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return root_cause.explain(describe_status(&status)),
            Err(_) => return format!("connected, but no response within {} s", OPEN_TIMEOUT.as_secs()),
        };
        self.attempts.connected(target);
        self.published.connection.send_replace(ServerConnection { is_connected: true, error: None });
        tracing::info!(event = "policy_server_connected", server = %target, "policy server connected");
        loop {
            match responses.message().await {
                Ok(Some(response)) => {
                    let reply = self.receive(&response);
                    // Fails if the stream has ended meanwhile.
                    let _ = requests.send(reply);
                }
                Ok(None) => return "the server closed the stream".to_owned(),
                Err(status) => return root_cause.explain(describe_status(&status)),
            }
        }
    }

    fn subscription(&self, kind: Kind) -> DeltaDiscoveryRequest {
        let text = |text: String| Value { kind: Some(ValueKind::StringValue(text)) };
        let incarnation = (INCARNATION.to_owned(), text(format!("{:016x}", self.incarnation)));
        let role = (ROLE.to_owned(), text(NODE_ROLE.to_owned()));
        let node = Node {
            id: self.node.to_string(),
            metadata: Some(Struct { fields: [incarnation, role].into() }),
            user_agent_name: "vipgate".to_owned(),
            user_agent_version_type: Some(UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").to_owned())),
            ..Node::default()
        };
        let name = if kind == Kind::Cluster { CLUSTER.to_owned() } else { self.node.to_string() };
        DeltaDiscoveryRequest {
            node: Some(node),
            type_url: kind.type_url().to_owned(),
            resource_names_subscribe: vec![name],
            initial_resource_versions: HashMap::new(),
            ..DeltaDiscoveryRequest::default()
        }
    }

    /// Applies a response; the ACK or NACK.
    fn receive(&self, response: &DeltaDiscoveryResponse) -> DeltaDiscoveryRequest {
        let outcome = self.apply(response);
        let error_detail = outcome.err().map(|message| {
            tracing::warn!(event = "policy_update_rejected", reason = message, "an update of the policy was rejected");
            Status { code: Code::InvalidArgument.into(), message, details: Vec::new() }
        });
        DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce.clone(),
            error_detail,
            ..DeltaDiscoveryRequest::default()
        }
    }

    fn apply(&self, response: &DeltaDiscoveryResponse) -> Result<(), String> {
        let kind = Kind::from_type_url(&response.type_url);
        let body = response.resources.first().and_then(|resource| resource.resource.as_ref());
        match (kind, body) {
            (Some(Kind::NodePolicy), Some(body)) => {
                let message = proto::NodePolicy::decode(body.value.as_slice());
                let message = message.map_err(|error| format!("NodePolicy {}: {error}", self.node))?;
                let policy = decode::node_policy(&self.node, &message);
                let policy = policy.map_err(|error| format!("NodePolicy {}: {error}", self.node))?;
                self.cache.update(|cached| cached.policy = Some(message));
                self.published.policy.send_replace(Some(Arc::new(policy)));
            }
            (Some(Kind::Cluster), Some(body)) => {
                let message = proto::Cluster::decode(body.value.as_slice());
                let message = message.map_err(|error| format!("Cluster {CLUSTER}: {error}"))?;
                let cluster = decode::cluster(&message).map_err(|error| format!("Cluster {CLUSTER}: {error}"))?;
                self.cache.update(|cached| cached.cluster = Some(message));
                self.published.cluster.send_replace(Arc::new(cluster));
            }
            // A node that isn't known any more keeps its policy: it may be one that is about to be registered again.
            (Some(Kind::NodePolicy), None) if !response.removed_resources.is_empty() => tracing::warn!(
                event = "node_unknown",
                node = &*self.node,
                "the policy server doesn't know this node: there is no Node object with its name and address, or policyd.yaml \
                 lacks `node_agents`"
            ),
            (Some(Kind::Cluster), None) if !response.removed_resources.is_empty() => {
                self.cache.update(|cached| cached.cluster = None);
                self.published.cluster.send_replace(Arc::default());
            }
            _ => {}
        }
        Ok(())
    }
}
