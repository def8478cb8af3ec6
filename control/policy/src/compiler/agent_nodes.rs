//! Nodes that run the agent, with the addresses of their pods, covered by a policy or not.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use ipnet::IpNet;
use vipgate_dataplane::policy::spec::{EndpointSpec, NodeSpec};

use super::claim::Inputs;
use super::placement::{AgentNode, Table};

/// The nodes with their pods: those with Pod manifests, and covered endpoints of slices without. What is the same as in
/// `previous` is the same allocation.
pub(super) fn compile(
    sources: &Inputs<'_>,
    nodes: &[NodeSpec],
    endpoints: &Table<EndpointSpec>,
    previous: &Arc<[Arc<AgentNode>]>,
) -> Arc<[Arc<AgentNode>]> {
    let indices: HashMap<&str, usize> = nodes.iter().enumerate().map(|(at, node)| (&*node.name, at)).collect();
    let mut pods: Vec<Vec<(IpAddr, Arc<str>)>> = vec![Vec::new(); nodes.len()];
    for (node, address, name) in sources.pods.placed(&sources.inventory.pods) {
        if let Some(at) = indices.get(node).filter(|_| !sources.vips.contains(&address)) {
            pods[*at].push((address, name.clone()));
        }
    }
    for (address, node) in sliced(sources, endpoints, nodes) {
        if let (Some(at), Some(endpoint)) = (indices.get(node), endpoints.get(&address)) {
            pods[*at].push((address, endpoint.name.clone()));
        }
    }
    let mut before = previous.iter().peekable();
    let mut next = |(node, mut pods): (&NodeSpec, Vec<(IpAddr, Arc<str>)>)| {
        pods.sort_unstable();
        while before.next_if(|it| it.tunnel.name < node.name).is_some() {}
        let same = before.next_if(|it| it.tunnel.name == node.name);
        match same.filter(|it| it.tunnel == *node && *it.pods == *pods) {
            Some(same) => same.clone(),
            None => Arc::new(AgentNode { tunnel: node.clone(), pods: pods.into() }),
        }
    };
    let next: Vec<Arc<AgentNode>> = nodes.iter().zip(pods).map(&mut next).collect();
    let is_same = next.len() == previous.len() && next.iter().zip(&**previous).all(|(a, b)| Arc::ptr_eq(a, b));
    if is_same { previous.clone() } else { next.into() }
}

/// The covered endpoints of slices without Pod manifests, each once with its node: that of its slice, or the one whose
/// pod prefix has it.
fn sliced<'a>(
    sources: &Inputs<'a>,
    endpoints: &Table<EndpointSpec>,
    nodes: &'a [NodeSpec],
) -> impl Iterator<Item = (IpAddr, &'a str)> {
    let all = sources.inventory.slices().flat_map(|slice| &slice.body.endpoints);
    let (pods, mut by_address) = (sources.pods, BTreeMap::new());
    let mut others: HashSet<IpAddr> = HashSet::default();
    for endpoint in all.filter(|it| pods.name_of(it.address).is_none() && pods.host_of(it.address).is_none()) {
        match endpoint.node.as_deref() {
            Some(node) => drop(by_address.entry(endpoint.address).or_insert(node)),
            None => drop(others.insert(endpoint.address)),
        }
    }
    if !others.is_empty() {
        let prefixes = Prefixes::of(nodes);
        others.retain(|address| !by_address.contains_key(address));
        by_address.extend(others.into_iter().filter_map(|address| Some((address, prefixes.node_of(address)?))));
    }
    by_address.retain(|address, _| endpoints.get(address).is_some());
    by_address.into_iter()
}

/// Nodes by pod prefix.
struct Prefixes<'a> {
    nodes: HashMap<IpNet, &'a str>,
    /// The lengths of prefixes, the longest first.
    lengths: Vec<u8>,
}

impl<'a> Prefixes<'a> {
    fn of(nodes: &'a [NodeSpec]) -> Self {
        let all = nodes.iter().flat_map(|node| node.prefixes.iter().map(|net| (*net, &*node.name)));
        let nodes: HashMap<IpNet, &str> = all.collect();
        let mut lengths: Vec<u8> = nodes.keys().map(IpNet::prefix_len).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        Self { nodes, lengths }
    }

    /// The node with the longest prefix that has this address.
    fn node_of(&self, address: IpAddr) -> Option<&'a str> {
        let mut nets = self.lengths.iter().filter_map(|length| Some(IpNet::new(address, *length).ok()?.trunc()));
        nets.find_map(|net| self.nodes.get(&net).copied())
    }
}
