//! What the policy server sends to a node, and the files of an agent.

use std::net::IpAddr;

use vipgate_node::indices::Indices;
use vipgate_node::policy::Coverage;

use super::cache::{Cache, Cached};
use super::fixtures::policy;
use super::*;
use crate::xds::proto;

#[test]
fn a_node_policy_is_decoded_with_its_references() {
    let decoded = decode::node_policy("node-1", &policy()).unwrap();
    let order: Vec<&str> = decoded.orders[0].iter().map(|name| &**name).collect();
    assert_eq!((decoded.tunnel.address.to_string().as_str(), order), ("192.0.2.101:8473", vec!["gw-b", "gw-a"]));
    let coverage: Vec<Option<Coverage>> = decoded.pods.values().map(|pod| pod.coverage).collect();
    let covered = |order, has_vip| Some(Coverage { policy: 0, order, has_vip });
    assert_eq!(coverage, [covered(Some(0), true), covered(None, false), None]);
}

#[test]
fn invalid_node_policies_are_rejected_with_field_and_reason() {
    let error = |change: fn(&mut proto::NodePolicy)| {
        let mut message = policy();
        change(&mut message);
        decode::node_policy("node-1", &message).unwrap_err().to_string()
    };
    for (change, expected) in [
        ((|it| it.node = "node-2".to_owned()) as fn(&mut proto::NodePolicy), "node: is `node-2`, not `node-1`"),
        (|it| it.address = "0.0.0.0".to_owned(), "address: 0.0.0.0 is no address of a node"),
        (|it| it.address = "x".to_owned(), "address: `x`: invalid IP address"),
        (|it| it.port = 65_536, "port: 65536 is no UDP port"),
        (|it| it.vni = 1 << 24, "vni: 16777216 has more than 24 bits"),
        (|it| it.mac.truncate(5), "mac: has not 6 bytes"),
        (|it| it.mac[0] = 1, "mac: is no unicast MAC address"),
        (|it| it.pod_cidrs.push("10.0.0.0/33".to_owned()), "pod_cidrs[1]: `10.0.0.0/33`: "),
        (|it| it.policies[0].excluded.push(String::new()), "policies[0].excluded[1]: ``: "),
        (|it| it.orders[0].gateways.push(2), "orders[0]: there is no such gateway"),
        (|it| it.gateways[0] = "a\nb".to_owned(), "gateways[0]: has control characters"),
        (|it| it.pods[0].policy = 2, "pods[0].policy: 2: there is no such policy"),
        (|it| it.pods[0].order = 2, "pods[0].order: 2: there is no such order"),
        (|it| it.pods[1].address = "10.244.1.5".to_owned(), "pods[1].address: 10.244.1.5 is a duplicate"),
    ] {
        let error = error(change);
        assert!(error.starts_with(expected), "{error}, not {expected}");
    }
}

#[test]
fn the_cluster_is_prefixes_and_nodes() {
    let message = proto::Cluster {
        pod_cidrs: vec!["10.244.0.0/16".to_owned()],
        service_cidrs: vec!["10.96.0.0/12".to_owned()],
        node_addresses: vec!["192.0.2.101".to_owned()],
        ..proto::Cluster::default()
    };
    let cluster = decode::cluster(&message).unwrap();
    assert_eq!((cluster.prefixes.len(), cluster.nodes), (2, vec![IpAddr::from([192, 0, 2, 101])]));
    let invalid = proto::Cluster { node_addresses: vec!["node".to_owned()], ..message };
    assert!(decode::cluster(&invalid).unwrap_err().to_string().starts_with("node_addresses[0]: `node`: "));
}

#[test]
fn the_cache_gives_back_what_it_was_given_and_nothing_if_it_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("below/node.cache");
    let (cache, decoded) = Cache::open(&path, "node-1");
    assert!(decoded.policy.is_none());
    let view = proto::View { number: 3, ..proto::View::default() };
    cache.update(|cached| *cached = Cached { policy: Some(policy()), cluster: None, view: Some(view) });
    let decoded = Cache::open(&path, "node-1").1;
    assert_eq!((decoded.policy.map(|policy| policy.pods.len()), decoded.view.number), (Some(3), 3));
    // Of another node.
    assert!(Cache::open(&path, "node-2").1.policy.is_none());
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 10, 25, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(Cache::open(&path, "node-1").1.policy.is_none(), "{length}");
    }
    for at in 0..whole.len() {
        let mut other = whole.clone();
        other[at] ^= 1;
        std::fs::write(&path, &other).unwrap();
        assert!(Cache::open(&path, "node-1").1.policy.is_none(), "byte {at}");
    }
    // The next update replaces it.
    let (cache, _) = Cache::open(&path, "node-1");
    cache.update(|cached| cached.policy = Some(policy()));
    assert!(Cache::open(&path, "node-1").1.policy.is_some());
}

#[test]
fn numbers_of_gateways_outlive_the_process_and_lines_that_are_none_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run/node.marks");
    assert_eq!(indices::read(&path), Indices::default());
    let mut numbers = Indices::default();
    for name in ["gw-a", "gw-b"] {
        numbers.allocate(&name.into(), 60);
    }
    indices::write(&path, &numbers);
    assert_eq!(indices::read(&path).iter().collect::<Vec<_>>(), numbers.iter().collect::<Vec<_>>());
    std::fs::write(&path, "0 gw-a\nx gw-b\n3\n2 gw-c\n").unwrap();
    let read: Vec<_> = indices::read(&path).iter().map(|(name, index)| (name.to_string(), index.0)).collect();
    assert_eq!(read, [("gw-c".to_owned(), 2)]);
}
