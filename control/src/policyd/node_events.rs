//! Events of Nodes: the agent of a node with pods isn't connected, or is again. Only the leader records them, since agents connect to
//! it; and only after a while, since agents look for another server when the leader has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_common::MinInterval;
use vipgate_policy::manifest::Kind;

use super::events::ObjectEvent;
use super::kubernetes::writer::ObjectReference;
use super::registry::Registry;
use crate::xds::publication::Publication;

/// How often nodes are compared with connections.
const INTERVAL: Duration = Duration::from_secs(10);
/// How long an agent is missing before that is an Event.
const MISSING_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum number of Events at a time: a policy server may have been unreachable for all nodes.
const MAX_EVENTS: usize = 20;

/// What has become of a node's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Missing,
    Connected,
}

/// Which agents are missing.
#[derive(Debug, Default)]
pub(super) struct Agents {
    observed: MinInterval,
    /// Since when.
    missing: BTreeMap<Arc<str>, Instant>,
    /// For which there was an Event.
    reported: BTreeSet<Arc<str>>,
}

impl Agents {
    /// The Events of what has changed, once in a while.
    pub(super) fn events(&mut self, agents: &Registry, published: &Publication, now: Instant) -> Vec<ObjectEvent> {
        if self.observed.due(INTERVAL, now).is_none() {
            return Vec::new();
        }
        let with_pods = published.placement.agents.iter().filter(|node| !node.pods.is_empty());
        let nodes = with_pods.map(|node| node.tunnel.name.clone()).collect();
        let connected = agents.list().into_iter().filter(|(_, agent)| agent.streams > 0);
        let connected = connected.map(|(name, _)| name).collect();
        let changes = self.observe(&nodes, &connected, now);
        changes.into_iter().map(|(node, change)| event(&node, change)).collect()
    }

    /// The changes that get Events, of some nodes at a time.
    fn observe(
        &mut self,
        nodes: &BTreeSet<Arc<str>>,
        connected: &BTreeSet<String>,
        now: Instant,
    ) -> Vec<(Arc<str>, Change)> {
        let is_missing = |node: &Arc<str>| !connected.contains(&**node);
        self.missing.retain(|node, _| nodes.contains(node) && is_missing(node));
        for node in nodes.iter().filter(|node| is_missing(node)) {
            self.missing.entry(node.clone()).or_insert(now);
        }
        // A node that is gone has no Events.
        self.reported.retain(|node| nodes.contains(node));
        let back = self.reported.iter().filter(|node| !self.missing.contains_key(*node));
        let mut changes: Vec<_> = back.map(|node| (node.clone(), Change::Connected)).collect();
        let is_due = |(node, since): &(&Arc<str>, &Instant)| {
            now.duration_since(**since) >= MISSING_TIMEOUT && !self.reported.contains(*node)
        };
        changes.extend(self.missing.iter().filter(is_due).map(|(node, _)| (node.clone(), Change::Missing)));
        changes.truncate(MAX_EVENTS);
        for (node, change) in &changes {
            match change {
                Change::Missing => self.reported.insert(node.clone()),
                Change::Connected => self.reported.remove(node),
            };
        }
        changes
    }
}

fn event(node: &str, change: Change) -> ObjectEvent {
    // kubelet's Events of Nodes have the name as uid, and kubectl looks for it.
    let object =
        ObjectReference { kind: Kind::Node, namespace: String::new(), name: node.to_owned(), uid: node.into() };
    match change {
        Change::Missing => {
            let message = "the vipgate agent of this node isn't connected to the policy server: its pods' packets go \
                           where they went before, and new pods get none out";
            ObjectEvent::warning(object, "AgentMissing", message)
        }
        Change::Connected => ObjectEvent::normal(object, "AgentConnected", "the vipgate agent is connected again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
        names.iter().map(|name| Arc::from(*name)).collect()
    }

    fn connected(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_agent_that_stays_away_has_one_event_and_another_one_when_it_is_back() {
        let (mut agents, start) = (Agents::default(), Instant::now());
        let mut observe = |nodes: &[&str], there: &[&str], seconds| {
            let now = start + Duration::from_secs(seconds);
            let changes = agents.observe(&names(nodes), &connected(there), now);
            changes.iter().map(|(node, change)| format!("{node} {change:?}")).collect::<Vec<_>>()
        };
        assert_eq!(observe(&["a", "b"], &["a"], 0), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a"], 59), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a"], 60), ["b Missing"]);
        assert_eq!(observe(&["a", "b"], &["a"], 600), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a", "b"], 610), ["b Connected"]);
        // Away for a moment, and again: each time it starts anew.
        assert_eq!(observe(&["a", "b"], &["a"], 620), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a", "b"], 630), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a"], 689), Vec::<String>::new());
        // A node that is gone, and one that is there again later.
        assert_eq!(observe(&["a"], &["a"], 800), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a"], 810), Vec::<String>::new());
        assert_eq!(observe(&["a", "b"], &["a"], 870), ["b Missing"]);
    }

    #[test]
    fn when_all_are_missing_some_at_a_time_have_events() {
        let (mut agents, start) = (Agents::default(), Instant::now());
        let nodes: BTreeSet<Arc<str>> = (0..50).map(|n| format!("node-{n}").into()).collect();
        agents.observe(&nodes, &connected(&[]), start);
        let late = start + MISSING_TIMEOUT;
        let counts: Vec<usize> = (0..4).map(|_| agents.observe(&nodes, &connected(&[]), late).len()).collect();
        assert_eq!(counts, [20, 20, 10, 0]);
    }

    #[test]
    fn kubectl_finds_the_events_of_a_node() {
        let text = event("node-1", Change::Missing).text();
        assert!(text.starts_with("Warning AgentMissing Node/node-1: the vipgate agent"), "{text}");
        assert!(event("node-1", Change::Connected).text().starts_with("Normal AgentConnected Node/node-1: "));
    }
}
