//! What the agent keeps of the policy server's resources: the policy of its node, what is inside the cluster, and the
//! membership view. Each is subscribed to by name, takes effect when it has arrived, and is acknowledged then.

use std::sync::Arc;
use std::time::SystemTime;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use tokio::sync::mpsc;
use vipgate_node::agent::View;

use super::Published;
use super::cache::Decoded;
use crate::xds::client::{Confirmation, OpenStream, Pending, StreamEnd, Subscriber};
use crate::xds::resource::{CLUSTER, Key, Kind, VIEW, printable};
use crate::xds::store::StoredResource;

/// The resources; each of them is published and cached.
pub(super) struct NodeResources {
    node: Arc<str>,
    published: Published,
    /// To the writer of the cache.
    confirmations: mpsc::UnboundedSender<Confirmation>,
}

impl Subscriber for NodeResources {
    fn subscriptions(&self) -> Vec<DeltaDiscoveryRequest> {
        let subscription = |kind: Kind| {
            Some(DeltaDiscoveryRequest {
                type_url: kind.type_url().to_owned(),
                resource_names_subscribe: vec![self.name(kind)?.to_owned()],
                ..DeltaDiscoveryRequest::default()
            })
        };
        [Kind::View, Kind::Cluster, Kind::NodePolicy].into_iter().filter_map(subscription).collect()
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
    pub(super) fn new(node: &str, published: Published, confirmations: mpsc::UnboundedSender<Confirmation>) -> Self {
        Self { node: node.into(), published, confirmations }
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
        let stored = StoredResource { version: resource.version.clone(), body: body.value.clone().into() };
        self.apply(kind, stored).map_err(|error| {
            let key = Key { kind, name: resource.name.as_str().into() };
            let reason = format!("{key}: {}", printable(&error));
            tracing::warn!(event = "policy_update_rejected", reason, "an update of the policy was rejected");
            reason
        })
    }

    fn apply(&mut self, kind: Kind, stored: StoredResource) -> Result<(), String> {
        let mut decoded = Decoded::default();
        decoded.add(&self.node, kind, &stored.body)?;
        if let Some(policy) = decoded.policy {
            self.published.policy.send_replace(Some(Arc::new(policy)));
        }
        if let Some(cluster) = decoded.cluster {
            self.published.cluster.send_replace(Arc::new(cluster));
        }
        if decoded.view.is_none_or(|view| self.publish_view(view)) {
            self.cache(kind, Some(stored));
        }
        Ok(())
    }

    /// Servers may send views in another order: the highest number counts. Returns whether this one does.
    fn publish_view(&self, view: View) -> bool {
        self.published.view.send_if_modified(|current| {
            let is_new = view.number > current.number;
            if is_new {
                *current = Arc::new(view);
            }
            is_new
        })
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
                self.cache(kind, None);
                self.published.cluster.send_replace(Arc::default());
            }
            // The last view stays.
            _ => {}
        }
    }

    /// The name of the resource of a kind: there is one of each. Agents use no other kinds.
    fn name(&self, kind: Kind) -> Option<&str> {
        match kind {
            Kind::NodePolicy => Some(&self.node),
            Kind::Cluster => Some(CLUSTER),
            Kind::View => Some(VIEW),
            _ => None,
        }
    }

    /// Stores the resource of a kind.
    fn cache(&self, kind: Kind, stored: Option<StoredResource>) {
        let Some(name) = self.name(kind) else { return };
        let changed = vec![(Key { kind, name: name.into() }, stored)];
        // Fails if the writer has ended.
        let _ = self.confirmations.send(Confirmation { changed, at: SystemTime::now() });
    }
}
