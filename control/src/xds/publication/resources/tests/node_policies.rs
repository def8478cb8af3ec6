//! The policies of nodes in successive publications.

use std::net::IpAddr;
use std::time::Instant;

use vipgate_dataplane::flow::ids::Owner;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::{EndpointSpec, NodeSpec};
use vipgate_policy::compiler::{AgentNode, GatewayLocality};

use super::*;
use crate::xds::fixtures::whole_policy;
use crate::xds::proto;
use crate::xds::resource::encode::node_policy;
use crate::xds::store::tests::builder;
use prost::Message as _;

/// Addresses of pods, covered by some placements or by none.
const PODS: [&str; 9] =
    ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.9.9.9", "fd00::1", "fd00::2", "fd00::3"];
const NODES: [&str; 2] = ["n1", "n2"];

fn tunnel(name: &str) -> NodeSpec {
    let last = name.as_bytes()[name.len() - 1];
    let prefixes = vec![format!("10.244.{last}.0/24").parse().unwrap()];
    NodeSpec {
        name: name.into(),
        address: ([192, 0, 2, last], 8473).into(),
        vni: 7,
        mac: [2; 6],
        verify_mac: false,
        sends_covered_only: false,
        prefixes,
    }
}

fn agent(name: &str, pods: impl IntoIterator<Item = (IpAddr, Arc<str>)>) -> Arc<AgentNode> {
    let mut pods: Vec<_> = pods.into_iter().collect();
    pods.sort_unstable();
    Arc::new(AgentNode { tunnel: tunnel(name), pods: pods.into() })
}

/// The placement with the nodes that exist, and with these pods on them; those that are the same as before are the same
/// allocation.
fn with_agents(placement: Placement, nodes: &[bool], places: &[usize], before: &Placement) -> Placement {
    let node = |(at, name): (usize, &&str)| {
        let on_node = PODS.iter().zip(places).filter(|(_, place)| **place == at);
        let next = agent(name, on_node.map(|(address, _)| (address.parse().unwrap(), "a/p".into())));
        before.agents.iter().find(|old| **old == next).cloned().unwrap_or(next)
    };
    let agents = NODES.iter().enumerate().filter(|(at, _)| nodes[*at]).map(node).collect();
    Placement { agents, ..placement }
}

/// The policies of all nodes, encoded from nothing.
fn encoded_nodes(placement: &Placement) -> BTreeMap<Key, Content> {
    placement.agents.iter().map(|agent| node_policy(placement, agent).0).collect()
}

#[test]
fn the_policies_of_nodes_equal_those_that_are_encoded_from_nothing() {
    let places = prop::collection::vec(0..3_usize, PODS.len());
    let nodes = prop::collection::vec(prop::bool::weighted(0.9), NODES.len());
    let step = (prop::option::weighted(0.5, any_placement()), nodes, prop::option::weighted(0.5, places));
    let classes = [
        "nothing differs",
        "only nodes differ",
        "only gateways' resources differ",
        "node kept",
        "node added",
        "node removed",
    ];
    let steps = prop::collection::vec(step, 1..8);
    property(ProptestConfig::with_cases(192), &steps, &classes, |steps, coverage| {
        let (mut last, mut places) = (Publication::default(), vec![2; PODS.len()]);
        for (placement, nodes, moved) in steps {
            places = moved.unwrap_or(places);
            let placement = placement.map_or_else(|| (*last.placement).clone(), |new| sharing(&last.placement, &new));
            let placement = Arc::new(with_agents(placement, &nodes, &places, &last.placement));
            let (before, expected) = (encoded_nodes(&last.placement), encoded_nodes(&placement));
            let gateways_differ = !differing(&last.placement, &placement).is_empty() || last.number == 0;
            let Some(next) = last.next(placement) else {
                prop_assert!(before == expected && !gateways_differ);
                coverage.count("nothing differs");
                continue;
            };
            let published = next.of_kind(Kind::NodePolicy).map(|it| (it.key.clone(), it.content.clone()));
            prop_assert_eq!(&published.collect::<BTreeMap<_, _>>(), &expected);
            prop_assert_eq!(next.count(Kind::NodePolicy), expected.len());
            for (key, content) in &expected {
                let published = next.get(key).unwrap();
                prop_assert_eq!(&published.content, content);
                prop_assert_eq!(published.changed_in == next.number, before.get(key) != Some(content));
                coverage.add("node kept", u64::from(before.get(key) == Some(content)));
                coverage.add("node added", u64::from(!before.contains_key(key)));
            }
            coverage.add("node removed", before.keys().filter(|key| next.get(key).is_none()).count() as u64);
            prop_assert!(next.changed_keys.iter().all(|key| key.kind != Kind::NodePolicy));
            prop_assert_eq!(next.changed_keys.is_empty(), !gateways_differ);
            if !gateways_differ {
                coverage.count("only nodes differ");
                prop_assert_eq!(&next.version, &last.version);
            } else if before == expected {
                coverage.count("only gateways' resources differ");
            }
            last = next;
        }
        Ok(())
    });
}

#[test]
fn the_order_of_an_endpoint_is_that_of_its_owners_at_gateways() {
    let strategy = (any_placement(), prop::collection::vec(any::<bool>(), 4));
    let classes = ["slot", "home", "any gateway", "owned", "unowned"];
    property(ProptestConfig::default(), &strategy, &classes, |(placement, active), coverage| {
        let names = ["g1", "g2", "g3", "g9"];
        let member = |(name, active): (&str, &bool)| MemberSpec {
            name: name.into(),
            tunnel: None,
            active: *active,
            connected: false,
            may_open: true,
            policy_release: PolicyRelease::default(),
            authentication: Authentication::None,
        };
        // Another gateway's view: it owns nothing itself.
        let gateways = names.into_iter().zip(&active).map(member).collect();
        let members = MembersSpec { this: Some("g0".into()), gateways, ..MembersSpec::default() };
        let mut builder = builder();
        builder.with_members(&members);
        let whole = whole_policy(&placement, &GatewayLocality::named("g0"), "");
        let policy = builder.with_change(&whole).unwrap().policy;
        for (address, endpoint) in policy.endpoints() {
            let spec = placement.endpoints.get(&address).unwrap();
            // The compiler gives an endpoint a slot without a map only where all of its distributed VIPs have the same one.
            let vips = || spec.vips.iter().filter_map(|vip| placement.vips.get(vip));
            let is_listed = vips().any(|vip| vip.shards.iter().any(|shard| shard.blocks.is_some()));
            if is_listed && spec.slot.as_ref().is_some_and(|slot| slot.map.is_none()) {
                continue;
            }
            coverage.add("slot", u64::from(spec.slot.is_some()));
            coverage.add("home", u64::from(spec.slot.is_none() && spec.gateway.is_some()));
            let Some(order) = placement.order_of(spec) else {
                prop_assert!(spec.gateway.is_none() && policy.shard_of(endpoint).is_none());
                coverage.count("any gateway");
                continue;
            };
            let is_active = |name: &Arc<str>| names.iter().zip(&active).any(|(it, active)| **it == **name && *active);
            // Where gateways derive no shard, none has the packets, and a home alone says so as well as any.
            let Some(shard) = policy.shard_of(endpoint) else { continue };
            let expected = order.into_iter().find(|name| is_active(name));
            let owner = match shard.owner {
                Owner::Other(id) => Some(policy.members().name(id)),
                Owner::This | Owner::Unowned => None,
            };
            coverage.count(if owner.is_some() { "owned" } else { "unowned" });
            prop_assert_eq!(owner, expected);
        }
        Ok(())
    });
}

/// A placement of 1000 nodes with 100 pods each, all covered.
fn large() -> Placement {
    let base = crate::xds::fixtures::sample_placement(1);
    let endpoint = base.endpoints[0].clone();
    let address = |node: u32, pod: u32| IpAddr::from((0x0a00_0000 + (node << 8) + pod).to_be_bytes());
    let pods = || (0..1000).flat_map(|node| (1..=100).map(move |pod| address(node, pod)));
    let endpoints = pods().map(|address| EndpointSpec { address, name: "a/pod".into(), ..endpoint.clone() }).collect();
    let node = |n: u32| {
        let pods = (1..=100).map(|pod| (address(n, pod), Arc::from("a/pod")));
        Arc::new(AgentNode {
            tunnel: NodeSpec { name: format!("node-{n:04}").into(), ..tunnel("n1") },
            pods: pods.collect(),
        })
    };
    Placement { endpoints, agents: (0..1000).map(node).collect(), ..base }
}

#[test]
fn a_changed_endpoint_among_a_hundred_thousand_has_the_policy_of_one_node_encoded() {
    let placement = large();
    let started = Instant::now();
    let first = Publication::default().next(Arc::new(placement.clone())).unwrap();
    println!("1000 nodes encoded with 100 000 endpoints in {:?}", started.elapsed());
    assert_eq!(first.encoded_nodes(), 1000);
    let mut changed = placement.endpoints[70_000].clone();
    changed.vips = Vec::new();
    let endpoints = placement.endpoints.edit(&[], vec![changed.clone()]);
    let next = Arc::new(Placement { endpoints, ..placement.clone() });
    let started = Instant::now();
    let second = first.next(next).unwrap();
    println!("one endpoint differs: {:?}", started.elapsed());
    assert_eq!(second.encoded_nodes(), 1);
    let key = Key { kind: Kind::NodePolicy, name: "node-0700".into() };
    let message = proto::NodePolicy::decode(&*second.get(&key).unwrap().content.body).unwrap();
    let pod = message.pods.iter().find(|pod| pod.address == changed.address.to_string()).unwrap();
    assert_eq!((pod.policy, pod.order, pod.has_vip), (1, 0, false));
    assert_eq!((message.pods.len(), message.policies.len(), message.gateways.len()), (100, 1, 1));
    // A pod that no policy covers concerns its node alone, and no gateway.
    let mut agents = placement.agents.to_vec();
    let pods = agents[3].pods.iter().cloned().chain([("10.200.0.1".parse().unwrap(), "b/q".into())]).collect();
    agents[3] = Arc::new(AgentNode { pods, ..(*agents[3]).clone() });
    let third = second.next(Arc::new(Placement { agents: agents.into(), ..(*second.placement).clone() })).unwrap();
    assert_eq!((third.encoded_nodes(), third.changed_keys.len()), (1, 0));
    assert_eq!(third.version, second.version);
}
