//! Streams of node agents, which subscribe by name.

use std::net::IpAddr;

use vipgate_dataplane::policy::spec::NodeSpec;
use vipgate_policy::compiler::{AgentNode, Cluster};

use super::*;

/// A placement of nodes with one pod each: `(name, last byte of its address)`.
fn nodes(nodes: &[(&str, u8)], last: u8) -> Arc<Placement> {
    let agent = |(name, pod): &(&str, u8)| {
        let prefixes = vec!["10.0.0.0/24".parse().unwrap()];
        let (address, mac) = (([192, 0, 2, 1], 8473).into(), [2; 6]);
        let tunnel = NodeSpec {
            name: (*name).into(),
            address,
            vni: 7,
            mac,
            verify_mac: false,
            sends_covered_only: false,
            prefixes,
        };
        Arc::new(AgentNode { tunnel, pods: [(IpAddr::from([10, 0, 0, *pod]), "a/p".into())].into() })
    };
    let cluster = Cluster { nodes: [format!("10.{last}.0.0/16").parse().unwrap()].into(), ..Cluster::default() };
    Arc::new(Placement {
        agents: nodes.iter().map(agent).collect(),
        cluster: cluster.non_empty(),
        endpoints: vec![endpoint(last)].into(),
        ..Placement::default()
    })
}

fn endpoint(last: u8) -> EndpointSpec {
    EndpointSpec {
        address: [10, 9, 0, last].into(),
        name: "".into(),
        policy: "".into(),
        vips: vec![],
        gateway: None,
        slot: None,
        remarks: vec![],
    }
}

fn agent() -> Client {
    Client { stream: DeltaStream::new(Audience::Node("n1".into())), ..Client::default() }
}

#[test]
fn a_node_gets_its_own_policy_and_the_cluster_and_what_differs_of_them() {
    let first = Arc::new(Publication::default().next(nodes(&[("n1", 1), ("n2", 2)], 1)).unwrap());
    let mut client = agent();
    client.subscribe(Kind::NodePolicy, &["n1"], &first);
    client.subscribe(Kind::Cluster, &["cluster"], &first);
    assert_eq!(client.received, ["+n1", "+cluster"]);
    client.accept_all(&first);
    assert_eq!(client.stream.in_force(), 1);
    // Of another node: nothing to send, and nothing to acknowledge.
    let second = Arc::new(first.next(nodes(&[("n1", 1), ("n2", 3)], 1)).unwrap());
    client.publish(&second);
    assert_eq!((&*client.received, client.stream.in_force()), (&[][..], 2));
    let third = Arc::new(second.next(nodes(&[("n1", 4), ("n2", 3)], 2)).unwrap());
    let fourth = Arc::new(third.next(nodes(&[("n2", 3)], 2)).unwrap());
    let mut late = agent();
    late.subscribe(Kind::NodePolicy, &["n1"], &second);
    client.publish(&third);
    assert_eq!(client.received, ["+cluster", "+n1"]);
    client.publish(&fourth);
    assert_eq!(client.received, ["-n1"]);
    late.publish(&fourth);
    assert_eq!(late.received, ["-n1"], "it missed one");
}

#[test]
fn a_node_gets_no_resources_of_others_and_no_wildcard_but_of_the_cluster() {
    let first = Arc::new(Publication::default().next(nodes(&[("n1", 1), ("n2", 2)], 1)).unwrap());
    let mut client = agent();
    for kind in Kind::ALL {
        client.subscribe(kind, &[], &first);
    }
    assert_eq!((&*client.received, client.unacked.len()), (&["+cluster".to_owned()][..], Kind::ALL.len()));
    client.received.clear();
    client.subscribe(Kind::NodePolicy, &["n2"], &first);
    client.subscribe(Kind::Endpoint, &["10.9.0.1"], &first);
    assert_eq!(client.received, ["-n2", "-10.9.0.1"]);
    client.accept_all(&first);
    let second = Arc::new(first.next(nodes(&[("n1", 5), ("n2", 6)], 2)).unwrap());
    client.publish(&second);
    assert_eq!(client.received, ["+cluster"]);
}

#[test]
fn a_gateway_gets_no_policies_of_nodes_and_has_changes_of_them_in_force_at_once() {
    let first = Arc::new(Publication::default().next(nodes(&[("n1", 1)], 1)).unwrap());
    let mut client = Client::default();
    client.subscribe_all(&first);
    client.subscribe(Kind::NodePolicy, &[], &first);
    client.subscribe(Kind::NodePolicy, &["n1"], &first);
    assert_eq!(client.received.pop().unwrap(), "-n1");
    client.assert_holds(&first);
    client.accept_all(&first);
    let second = Arc::new(first.next(nodes(&[("n1", 2)], 1)).unwrap());
    client.publish(&second);
    assert_eq!((&*client.received, client.stream.in_force()), (&[][..], 2));
    // Without an acknowledgment of an earlier one, it isn't.
    let third = Arc::new(second.next(nodes(&[("n1", 2)], 2)).unwrap());
    client.publish(&third);
    let fourth = Arc::new(third.next(nodes(&[("n1", 3)], 2)).unwrap());
    let kept = std::mem::take(&mut client.received);
    client.publish(&fourth);
    assert_eq!((kept.is_empty(), client.received.is_empty(), client.stream.in_force()), (false, true, 2));
    client.accept_all(&fourth);
    assert_eq!(client.stream.in_force(), 4);
    client.assert_holds(&fourth);
}
