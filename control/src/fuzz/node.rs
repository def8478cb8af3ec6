//! Fuzzing of what a policy server sends to the agent of a node: each valid message leads to a plan and to the scripts that
//! take the kernel there. Whatever the names in it, each line of a script is one command about our table.

use std::collections::BTreeSet;
use std::sync::Arc;

use vipgate_node::agent::View;
use vipgate_node::echo;
use vipgate_node::indices::Indices;
use vipgate_node::marks::MarkMask;
use vipgate_node::nft::script::{Before, Change, change, replacement};
use vipgate_node::nft::table::{TABLE, Table};
use vipgate_node::plan::{Gateway, Inputs, NodePlan, Settings};
use vipgate_node::policy::{Cluster, NodePolicy};

use super::next;
use crate::node::decode;
use crate::xds::proto;

/// Maximum number of steps of one input.
const MAX_STEPS: usize = 16;
/// The node's name.
const NODE: &str = "node-1";
/// What a line of a script may do, and with what.
const VERBS: [&str; 3] = ["add", "delete", "flush"];
const KINDS: [&str; 7] = ["table", "counter", "set", "map", "chain", "rule", "element"];

/// What the agent has received.
#[derive(Default)]
struct Received {
    policy: Option<NodePolicy>,
    cluster: Cluster,
    view: View,
}

/// Executes the input as a sequence of messages, each with a leading kind byte.
pub fn node(mut data: &[u8]) {
    // Any bytes may come from a gateway's address.
    let _ = echo::reply(data);
    let settings = Settings {
        node: NODE.into(),
        mask: MarkMask::default(),
        pod_prefixes: vec!["10.244.0.0/16".parse().expect("a prefix")],
        tunnel_device: "vipgate0".to_owned(),
        hold_device: "vipgate-hold".to_owned(),
    };
    let (mut received, mut indices, mut programmed) = (Received::default(), Indices::default(), None);
    for _ in 0..MAX_STEPS {
        let [kind, rest @ ..] = data else { break };
        data = rest;
        match kind % 3 {
            0 => {
                let Some(message) = next::<proto::NodePolicy>(&mut data) else { break };
                let Ok(policy) = decode::node_policy(NODE, &message) else { continue };
                received.policy = Some(policy);
            }
            1 => {
                let Some(message) = next::<proto::Cluster>(&mut data) else { break };
                let Ok(cluster) = decode::cluster(&message) else { continue };
                received.cluster = cluster;
            }
            _ => {
                let Some(message) = next::<proto::View>(&mut data) else { break };
                let Ok(view) = decode::view(message) else { continue };
                received.view = view;
            }
        }
        programmed = Some(program(&settings, &received, &mut indices, programmed.as_ref()));
    }
}

/// The table of the plan of what was received; checks the scripts from the one before.
fn program(settings: &Settings, received: &Received, indices: &mut Indices, before: Option<&Table>) -> Table {
    let gateway = |member: &vipgate_node::agent::ViewMember| Gateway {
        name: Arc::clone(&member.name),
        is_active: Some(member.is_active),
        is_reachable: true,
        endpoint: member.endpoint,
    };
    let gateways: Vec<Gateway> = received.view.members.iter().map(gateway).collect();
    let inputs = Inputs {
        settings,
        policy: received.policy.as_ref(),
        cluster: &received.cluster,
        gateways: &gateways,
        local_addresses: &BTreeSet::new(),
        mtu: 1450,
    };
    let plan = NodePlan::new(&inputs, indices);
    let before = before.map(|before| change(Before::Exactly(before), &plan.table));
    let changes = before.into_iter().flat_map(|Change { prepare, switch }| [prepare, switch]);
    for text in changes.chain([replacement(&plan.table)]) {
        text.lines().for_each(check_line);
    }
    let none = Change { prepare: String::new(), switch: String::new() };
    assert_eq!(change(Before::Exactly(&plan.table), &plan.table), none, "nothing differs");
    plan.table
}

/// Asserts that a line is one command, about an object of our table.
fn check_line(line: &str) {
    let rest = VERBS.iter().find_map(|verb| line.strip_prefix(verb)?.strip_prefix(' '));
    let rest = rest.and_then(|rest| KINDS.iter().find_map(|kind| rest.strip_prefix(kind)?.strip_prefix(' ')));
    assert!(rest.is_some_and(|rest| rest.starts_with(TABLE)), "{line}");
    assert!(!line.contains(|c: char| c.is_control()) && line.matches('"').count().is_multiple_of(2), "{line:?}");
    // Outside of quotes and braces nothing ends a command.
    let unquoted: String = line.split('"').step_by(2).collect();
    let depth = unquoted.chars().fold(0_i32, |depth, c| {
        assert!(depth > 0 || c != ';', "{line}");
        depth + i32::from(c == '{') - i32::from(c == '}')
    });
    assert_eq!(depth, 0, "{line}");
}
