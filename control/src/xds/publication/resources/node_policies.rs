//! The policies of nodes that run the agent. One is encoded again only when something that it follows from has changed.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashSet;
use vipgate_policy::compiler::{AgentNode, Placement};

use crate::xds::publication::PublishedResource;
use crate::xds::resource::encode::{References, node_policy};
use crate::xds::resource::{Key, Kind};

/// The policies of nodes, in the order of the placement's nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct NodePolicies {
    list: Arc<[Arc<NodeResource>]>,
    /// How many were encoded for this publication.
    pub(super) encoded: usize,
}

/// The policy of a node.
#[derive(Debug)]
struct NodeResource {
    published: PublishedResource,
    references: References,
}

/// What has changed since the previous publication.
struct Changes<'a> {
    endpoints: HashSet<IpAddr>,
    policies: HashSet<&'a str>,
    vips: HashSet<IpAddr>,
    shard_maps: HashSet<&'a str>,
    /// Whether there are other gateways.
    has_gateways: bool,
}

impl<'a> Changes<'a> {
    fn of(old: &Placement, new: &Placement, changed_keys: &'a [Key]) -> Self {
        let of_kind = |kind| changed_keys.iter().filter(move |key| key.kind == kind).map(|key| &*key.name);
        let addresses = |kind| of_kind(kind).filter_map(|name| name.parse().ok()).collect();
        Self {
            endpoints: addresses(Kind::Endpoint),
            policies: of_kind(Kind::EgressPolicy).collect(),
            vips: addresses(Kind::Vip),
            shard_maps: of_kind(Kind::ShardMap).collect(),
            has_gateways: !old.peers.iter().map(|peer| &peer.name).eq(new.peers.iter().map(|peer| &peer.name)),
        }
    }

    /// Whether the policy of a node may differ although the node is the same.
    fn concern(&self, agent: &AgentNode, references: &References) -> bool {
        self.has_gateways
            || self.endpoints_of(agent)
            || !self.policies.is_empty() && references.policies.iter().any(|name| self.policies.contains(&**name))
            || !self.vips.is_empty() && references.vips.iter().any(|vip| self.vips.contains(vip))
            || !self.shard_maps.is_empty() && references.shard_maps.iter().any(|name| self.shard_maps.contains(&**name))
    }

    /// Whether an endpoint of a node has changed.
    fn endpoints_of(&self, agent: &AgentNode) -> bool {
        if self.endpoints.len() < agent.pods.len() {
            let has = |address: &IpAddr| agent.pods.binary_search_by_key(address, |(pod, _)| *pod).is_ok();
            return self.endpoints.iter().any(has);
        }
        agent.pods.iter().any(|(address, _)| self.endpoints.contains(address))
    }
}

impl NodePolicies {
    /// The policies of the second placement's nodes, and whether any differs from those of the first one, which these
    /// are. `changed_keys`: the other resources that differ.
    pub(super) fn next(&self, (old, new): (&Placement, &Placement), changed_keys: &[Key], number: u64) -> (Self, bool) {
        if new.agents.is_empty() {
            return (Self::default(), !self.list.is_empty());
        }
        let changes = Changes::of(old, new, changed_keys);
        let mut before = old.agents.iter().zip(&*self.list).peekable();
        let (mut encoded, mut differs) = (0, self.list.len() != new.agents.len());
        let mut next = |agent: &Arc<AgentNode>| {
            while before.next_if(|(old, _)| old.tunnel.name < agent.tunnel.name).is_some() {}
            let same = before.next_if(|(old, _)| old.tunnel.name == agent.tunnel.name);
            if let Some((old, resource)) = same
                && (Arc::ptr_eq(old, agent) || old == agent)
                && !changes.concern(agent, &resource.references)
            {
                return resource.clone();
            }
            encoded += 1;
            let ((key, content), references) = node_policy(new, agent);
            let same = same.filter(|(_, resource)| resource.published.content == content);
            differs |= same.is_none();
            let published = same.map_or_else(
                || PublishedResource { key, content, changed_in: number },
                |(_, resource)| resource.published.clone(),
            );
            Arc::new(NodeResource { published, references })
        };
        let list = new.agents.iter().map(&mut next).collect();
        (Self { list, encoded }, differs)
    }

    /// The policy of the node with this name.
    pub(super) fn get(&self, name: &str) -> Option<&PublishedResource> {
        let at = self.list.binary_search_by(|resource| (*resource.published.key.name).cmp(name)).ok()?;
        self.list.get(at).map(|resource| &resource.published)
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PublishedResource> + Clone {
        self.list.iter().map(|resource| &resource.published)
    }
}
