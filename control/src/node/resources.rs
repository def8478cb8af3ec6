//! What the agent keeps of the policy server's resources: the policy of its node, what is inside the cluster, and the
//! membership view. Each is subscribed to by name, takes effect when it has arrived, and is acknowledged then.

use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;

use super::cache::Cache;
use super::{Published, decode};
use crate::xds::client::{OpenStream, Pending, StreamEnd, Subscriber};
use crate::xds::proto;
use crate::xds::resource::{CLUSTER, Key, Kind, VIEW, printable};

/// The resources; each of them is published and cached.
pub(super) struct NodeResources {
    node: Arc<str>,
    published: Published,
    cache: Cache,
}

impl Subscriber for NodeResources {
    fn subscriptions(&self) -> Vec<DeltaDiscoveryRequest> {
        let subscription = |(kind, name): (Kind, &str)| DeltaDiscoveryRequest {
            type_url: kind.type_url().to_owned(),
            resource_names_subscribe: vec![name.to_owned()],
            ..DeltaDiscoveryRequest::default()
        };
        [(Kind::View, VIEW), (Kind::Cluster, CLUSTER), (Kind::NodePolicy, &*self.node)].map(subscription).into()
    }

    async fn follow(&mut self, stream: &mut OpenStream) -> StreamEnd {
        loop {
            match stream.next().await {
                Ok(response) => stream.reply(Pending::of(&response), self.receive(&response).err()),
                Err(end) => return end,
            }
        }
    }
}

impl NodeResources {
    pub(super) fn new(node: &str, published: Published, cache: Cache) -> Self {
        Self { node: node.into(), published, cache }
    }

    /// Applies a response: each of the resources is the only one of its kind. The error is why it is rejected.
    pub(super) fn receive(&mut self, response: &DeltaDiscoveryResponse) -> Result<(), String> {
        let Some(kind) = Kind::from_type_url(&response.type_url) else { return Ok(()) };
        let Some((resource, body)) = response.resources.first().and_then(|it| Some((it, it.resource.as_ref()?))) else {
            if !response.removed_resources.is_empty() {
                self.remove(kind);
            }
            return Ok(());
        };
        self.apply(kind, &body.value).map_err(|error| {
            let key = Key { kind, name: resource.name.as_str().into() };
            let reason = format!("{key}: {}", printable(&error));
            tracing::warn!(event = "policy_update_rejected", reason, "an update of the policy was rejected");
            reason
        })
    }

    fn apply(&mut self, kind: Kind, body: &[u8]) -> Result<(), String> {
        match kind {
            Kind::NodePolicy => {
                let message = proto::NodePolicy::decode(body).map_err(|error| error.to_string())?;
                let policy = decode::node_policy(&self.node, &message).map_err(|error| error.to_string())?;
                self.cache.update(|cached| cached.policy = Some(message));
                self.published.policy.send_replace(Some(Arc::new(policy)));
            }
            Kind::Cluster => {
                let message = proto::Cluster::decode(body).map_err(|error| error.to_string())?;
                let cluster = decode::cluster(&message).map_err(|error| error.to_string())?;
                self.cache.update(|cached| cached.cluster = Some(message));
                self.published.cluster.send_replace(Arc::new(cluster));
            }
            Kind::View => {
                let message = proto::View::decode(body).map_err(|error| error.to_string())?;
                let view = Arc::new(decode::view(message.clone()).map_err(|error| error.to_string())?);
                // Servers may send views in another order: the highest number counts.
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
            }
            _ => {}
        }
        Ok(())
    }

    fn remove(&mut self, kind: Kind) {
        match kind {
            // A node that isn't known any more keeps its policy: it may be one that is about to be registered again.
            Kind::NodePolicy => tracing::warn!(
                event = "node_unknown",
                node = &*self.node,
                "the policy server doesn't know this node: there is no Node object with its name and address, or policyd.yaml \
                 lacks `node_agents`"
            ),
            Kind::Cluster => {
                self.cache.update(|cached| cached.cluster = None);
                self.published.cluster.send_replace(Arc::default());
            }
            // The last view stays.
            _ => {}
        }
    }
}
