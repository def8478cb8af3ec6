//! What the policy server sends to a node, and the files of an agent.

use std::net::IpAddr;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::Message;
use tempfile::TempDir;
use tokio::time::timeout;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use vipgate_node::indices::Indices;
use vipgate_node::policy::Coverage;

use super::fixtures::policy;
use super::*;
use crate::config::PolicyServer;
use crate::membership::MembershipView;
use crate::policyd::service::{AggregatedDiscoveryServiceServer, DiscoveryService};
use crate::xds::cache::encode;
use crate::xds::client::Confirmation;
use crate::xds::fixtures::{placement_with_pod, policy_server, response};
use crate::xds::proto;
use crate::xds::publication::Publication;
use crate::xds::resource::{CLUSTER, Key, Kind, VIEW};
use crate::xds::store::StoredResource;

/// Timeout of each step, with a margin for slow machines.
const TIMEOUT: Duration = Duration::from_secs(20);

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
    assert!(cache::read(&path, "node-1").is_none());
    let view = proto::View { number: 3, ..proto::View::default() };
    let cached: Cached = [of_node(policy().encode_to_vec()), of_view(view.encode_to_vec())].into();
    cache::FORMAT.write(&path, &encode(&cached)).unwrap();
    let (read, decoded) = cache::read(&path, "node-1").unwrap();
    assert_eq!((read, decoded.policy.map(|policy| policy.pods.len())), (cached, Some(3)));
    assert_eq!(decoded.view.map(|view| view.number), Some(3));
    // Of another node.
    assert!(cache::read(&path, "node-2").is_none());
    let mut damaged = std::fs::read(&path).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    for bytes in [&*damaged, b""] {
        std::fs::write(&path, bytes).unwrap();
        assert!(cache::read(&path, "node-1").is_none());
    }
    // Whole, but no policy.
    cache::FORMAT.write(&path, &encode(&[of_node(vec![0xff])].into())).unwrap();
    assert!(cache::read(&path, "node-1").is_none());
}

fn of_node(body: Vec<u8>) -> (Key, StoredResource) {
    let key = Key { kind: Kind::NodePolicy, name: "node-1".into() };
    (key, StoredResource { version: "1".to_owned(), body: body.into() })
}

fn of_view(body: Vec<u8>) -> (Key, StoredResource) {
    let key = Key { kind: Kind::View, name: VIEW.into() };
    (key, StoredResource { version: "1".to_owned(), body: body.into() })
}

async fn wait_until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, wait).await.expect("in time");
}

/// Without a cache, the next process would hold all packets of pods until the server is reached.
#[tokio::test]
async fn the_last_cache_stays_while_it_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let (path, obstacle) = (folder.path().join("node.cache"), folder.path().join("node.cache.draft"));
    let (confirmations, received) = mpsc::unbounded_channel();
    let status = ServerStatus::initial(None);
    // A damaged file is replaced.
    std::fs::write(&path, "damaged").unwrap();
    let writer = tokio::spawn(cache::write(path.clone(), None, status.clone(), received));
    let confirm = |(key, stored)| {
        confirmations
            .send(Confirmation { changed: vec![(key, Some(stored))], at: std::time::SystemTime::now() })
            .unwrap();
    };
    let has_view = || cache::read(&path, "node-1").map(|(_, decoded)| decoded.view.is_some());
    confirm(of_node(policy().encode_to_vec()));
    wait_until(|| has_view() == Some(false)).await;
    std::fs::create_dir(&obstacle).unwrap();
    confirm(of_view(proto::View { number: 3, ..proto::View::default() }.encode_to_vec()));
    wait_until(|| status.load().cache_error.is_some()).await;
    assert_eq!(has_view(), Some(false));
    // At the end it is tried once more.
    std::fs::remove_dir(&obstacle).unwrap();
    drop(confirmations);
    timeout(TIMEOUT, writer).await.expect("it ends").unwrap();
    assert_eq!(has_view(), Some(true));
}

/// What an agent of node-1 keeps: as it comes from the server, and as the agent sees it.
struct Received {
    resources: NodeResources,
    sources: Sources,
    confirmations: mpsc::UnboundedReceiver<Confirmation>,
    cached: Cached,
    folder: TempDir,
}

impl Received {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (published, sources) = Published::new(Decoded::default());
        let (sender, confirmations) = mpsc::unbounded_channel();
        let resources = NodeResources::new("node-1", published, sender);
        Self { resources, sources, confirmations, cached: Cached::new(), folder }
    }

    /// Receives a resource; `None`: that there is none. The error is that of the NACK.
    fn receive(&mut self, kind: Kind, name: &str, body: Option<Vec<u8>>) -> Result<(), String> {
        let stored = body.map(|body| StoredResource { version: "1".to_owned(), body: body.into() });
        self.resources.receive(&response(kind, &[(Key { kind, name: name.into() }, stored)]))
    }

    fn receive_view(&mut self, number: u64) {
        let view = proto::View { number, ..proto::View::default() };
        self.receive(Kind::View, VIEW, Some(view.encode_to_vec())).unwrap();
    }

    /// Number of pods, number of nodes, number of the view.
    fn counts(&self) -> (Option<usize>, usize, u64) {
        let pods = self.sources.policy.borrow().as_ref().map(|policy| policy.pods.len());
        (pods, self.sources.cluster.borrow().nodes.len(), self.sources.view.borrow().number)
    }

    /// The same, as the next process begins.
    fn cached(&mut self) -> (Option<usize>, usize, u64) {
        while let Ok(Confirmation { changed, .. }) = self.confirmations.try_recv() {
            for (key, stored) in changed {
                match stored {
                    Some(stored) => drop(self.cached.insert(key, stored)),
                    None => drop(self.cached.remove(&key)),
                }
            }
        }
        let path = self.folder.path().join("node.cache");
        cache::FORMAT.write(&path, &encode(&self.cached)).unwrap();
        let Decoded { policy, cluster, view } = cache::read(&path, "node-1").unwrap().1;
        let (cluster, view) = (cluster.unwrap_or_default(), view.unwrap_or_default());
        (policy.map(|policy| policy.pods.len()), cluster.nodes.len(), view.number)
    }
}

#[test]
fn each_resource_takes_effect_by_itself_and_is_cached() {
    let mut received = Received::new();
    let cluster = proto::Cluster { node_addresses: vec!["192.0.2.101".to_owned()], ..proto::Cluster::default() };
    received.receive_view(3);
    assert_eq!(received.counts(), (None, 0, 3));
    received.receive(Kind::NodePolicy, "node-1", Some(policy().encode_to_vec())).unwrap();
    received.receive(Kind::Cluster, CLUSTER, Some(cluster.encode_to_vec())).unwrap();
    assert_eq!((received.counts(), received.cached()), ((Some(3), 1, 3), (Some(3), 1, 3)));
    // A node that the server doesn't know keeps its policy and its view.
    for (kind, name) in [(Kind::NodePolicy, "node-1"), (Kind::Cluster, CLUSTER), (Kind::View, VIEW)] {
        received.receive(kind, name, None).unwrap();
    }
    assert_eq!((received.counts(), received.cached()), ((Some(3), 0, 3), (Some(3), 0, 3)));
    // What it isn't subscribed to, and nothing at all.
    received.receive(Kind::Vip, "203.0.113.1", Some(Vec::new())).unwrap();
    received.resources.receive(&DeltaDiscoveryResponse::default()).unwrap();
}

#[test]
fn the_highest_view_counts() {
    let mut received = Received::new();
    for (sent, expected) in [(5, 5), (4, 5), (5, 5), (6, 6)] {
        received.receive_view(sent);
        assert_eq!((received.counts().2, received.cached().2), (expected, expected));
    }
}

#[test]
fn what_is_invalid_is_rejected_and_the_last_one_stays() {
    let mut received = Received::new();
    received.receive_view(3);
    received.receive(Kind::NodePolicy, "node-1", Some(policy().encode_to_vec())).unwrap();
    let member = proto::Member { name: "a\nb".to_owned(), ..proto::Member::default() };
    let view = proto::View { number: 4, members: vec![member], ..proto::View::default() };
    for (kind, name, body, expected) in [
        (Kind::NodePolicy, "node-1", vec![0xff], "NodePolicy node-1: failed to decode"),
        (
            Kind::NodePolicy,
            "node-1",
            proto::NodePolicy { node: "node-2".to_owned(), ..policy() }.encode_to_vec(),
            "NodePolicy node-1: node: is `node-2`, not `node-1`",
        ),
        (Kind::Cluster, CLUSTER, vec![0xff], "Cluster cluster: failed to decode"),
        (Kind::View, VIEW, view.encode_to_vec(), "View view: `a\u{fffd}b` is not a valid gateway name"),
    ] {
        let error = received.receive(kind, name, Some(body)).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
    assert_eq!((received.counts(), received.cached()), ((Some(3), 0, 3), (Some(3), 0, 3)));
}

#[tokio::test]
async fn the_client_follows_policy_and_view_of_a_policy_server_over_one_stream() {
    let (_policies, published) =
        watch::channel(Publication::default().next(Arc::new(placement_with_pod("node-1", 1))).map(Arc::new));
    let (views, view) = watch::channel(Arc::default());
    let service = DiscoveryService {
        published,
        view,
        registry: Arc::default(),
        nodes: Arc::default(),
        stats: Arc::default(),
        rejections: Arc::default(),
        budget: Arc::default(),
    };
    let (nodes, stats) = (service.nodes.clone(), service.stats.clone());
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let url = format!("http://{}", incoming.local_addr().unwrap());
    let service = AggregatedDiscoveryServiceServer::new(service);
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));

    let Received { resources, mut sources, confirmations, folder, .. } = Received::new();
    let path = folder.path().join("node.cache");
    let server = PolicyServer { cache: path.clone(), ..policy_server(&[&url]) };
    let status = ServerStatus::initial(None);
    tokio::spawn(cache::write(path.clone(), None, status.clone(), confirmations));
    let client = DeltaClient::new(Identity::agent("node-1"), server, RETRY_DELAY, status.clone(), resources);
    tokio::spawn(client.run());
    timeout(TIMEOUT, sources.policy.wait_for(Option::is_some)).await.expect("a policy").unwrap();
    for number in 1..4 {
        views.send_replace(Arc::new(MembershipView { number, ..MembershipView::default() }));
        timeout(TIMEOUT, sources.view.wait_for(|view| view.number == number)).await.expect("a view").unwrap();
    }
    assert_eq!((status.load().connected, nodes.list()["node-1"].streams), (true, 1));
    // Each resource is acknowledged and cached.
    wait_until(|| stats.acks.get() >= 5).await;
    wait_until(|| {
        let cached = cache::read(&path, "node-1").map(|(_, Decoded { policy, view, .. })| (policy.is_some(), view));
        matches!(cached, Some((true, Some(view))) if view.number == 3)
    })
    .await;
}

#[test]
fn numbers_of_gateways_outlive_the_process_and_a_file_that_is_not_whole_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run/node.marks");
    assert_eq!(indices::read(&path), Indices::default());
    let mut numbers = Indices::default();
    for name in ["gw-a", "gw-b"] {
        numbers.allocate(&name.into(), 60);
    }
    indices::write(&path, &numbers);
    assert_eq!(indices::read(&path).iter().collect::<Vec<_>>(), numbers.iter().collect::<Vec<_>>());
    let whole = std::fs::read(&path).unwrap();
    for damaged in [&whole[..whole.len() - 1], b"2 gw-c\n", b""] {
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(indices::read(&path), Indices::default());
    }
    // Numbers that no gateway can have.
    indices::FORMAT.write(&path, b"0 gw-a\nx gw-b\n3\n2 gw-c\n").unwrap();
    let read: Vec<_> = indices::read(&path).iter().map(|(name, index)| (name.to_string(), index.0)).collect();
    assert_eq!(read, [("gw-c".to_owned(), 2)]);
}
