//! Client tests against a scripted server in the same process.

mod coalescing;
mod connection_errors;
mod held;
mod large;
mod reconnects;
mod rejections;
mod restart;
mod server;
mod updates;

use std::path::Path;
use std::time::Instant;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use vipgate_policy::compiler::GatewayLocality;

use self::server::{Server, ServerStream};
use super::*;
use crate::xds::cache;
use crate::xds::fixtures::{ServerPolicy, ip, key, policy_server, response, responses, sample_placement, whole_policy};
use crate::xds::resource::Kind;

/// Timeout of each step, with a margin for slow machines.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a test checks that nothing happens.
const SILENCE: Duration = Duration::from_millis(200);

/// The gateway with its configured node and zone.
fn gateway_locality() -> GatewayLocality {
    GatewayLocality { name: "g1".into(), node: "n1".into(), zone: "z1".into(), ..GatewayLocality::default() }
}

/// A running client; the test takes the part of the gateway.
struct Gateway {
    events: mpsc::Receiver<ClientEvent>,
    status: Arc<ArcSwap<ServerStatus>>,
    task: JoinHandle<()>,
}

/// Configuration of a server at this port without TLS, with the cache in this directory.
fn plain_server(port: u16, dir: &Path) -> PolicyServer {
    PolicyServer { cache: dir.join("policy.cache"), ..policy_server(&[&format!("http://127.0.0.1:{port}")]) }
}

impl Gateway {
    /// Starts a client; returns the cached policy, too.
    fn start(server: PolicyServer) -> (Self, Option<PolicyUpdate>) {
        let (sender, events) = mpsc::channel(4);
        let (client, cached) = Client::open(gateway_locality(), server, sender);
        let status = client.status();
        (Self { events, status, task: tokio::spawn(client.run()) }, cached)
    }

    async fn event(&mut self) -> ClientEvent {
        timeout(TEST_TIMEOUT, self.events.recv()).await.expect("an event in time").expect("the client runs")
    }

    async fn next_update(&mut self) -> (PolicyUpdate, UpdateReply) {
        match self.event().await {
            ClientEvent::Update(update, reply) => (*update, reply),
            ClientEvent::Rejected(reason) => panic!("rejected: {reason}"),
        }
    }

    /// Receives the next update and replies that it is in force.
    async fn apply_next(&mut self) -> PolicyUpdate {
        let (update, reply) = self.next_update().await;
        reply.send(Ok(Effect::InForce)).unwrap();
        update
    }

    async fn next_rejection(&mut self) -> String {
        match self.event().await {
            ClientEvent::Rejected(reason) => reason,
            ClientEvent::Update(update, _) => panic!("an update: {update:?}"),
        }
    }

    async fn receives_nothing_for(&mut self, duration: Duration) -> bool {
        timeout(duration, self.events.recv()).await.is_err()
    }

    /// Waits until the status meets a condition.
    async fn wait_for_status(&self, condition: impl Fn(&ServerStatus) -> bool) -> ServerStatus {
        let wait = async {
            loop {
                let status = self.status.load_full();
                if condition(&status) {
                    return (*status).clone();
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TEST_TIMEOUT, wait).await.expect("a status in time")
    }

    /// Stops the client, which writes its cache and unlocks it.
    async fn stop(self) {
        drop(self.events);
        timeout(TEST_TIMEOUT, self.task).await.expect("it ends").unwrap();
    }
}

/// Whether the cache in a directory has this policy.
fn is_cached(dir: &Path, policy: &ServerPolicy) -> bool {
    let contents = cache::read(&dir.join("policy.cache"));
    matches!(contents, Ok(CacheContents::Policy(resources, _)) if resources == policy.resources)
}

/// Waits until the cache in a directory has this policy.
async fn wait_cached(dir: &Path, policy: &ServerPolicy) {
    let wait = async {
        while !is_cached(dir, policy) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TEST_TIMEOUT, wait).await.expect("it is written in time");
}

/// The kinds of the sample's resources, in sending order: no Service is so large that it has backend slices.
const SENT_KINDS: [Kind; 9] = [
    Kind::EgressPolicy,
    Kind::ShardMap,
    Kind::Vip,
    Kind::Endpoint,
    Kind::Service,
    Kind::Gateway,
    Kind::OverlayNode,
    Kind::Cluster,
    Kind::Settings,
];

/// A connected client and server.
struct Pair {
    gateway: Gateway,
    server: Server,
    stream: ServerStream,
    dir: TempDir,
}

/// Number of the last nonce once a pair is in sync, however many kinds of resources there are.
const SYNCED_NONCE: usize = 8;

impl Pair {
    /// Without any policy.
    async fn new() -> Self {
        let (dir, mut server) = (tempfile::tempdir().unwrap(), Server::start());
        let (gateway, cached) = Gateway::start(plain_server(server.port, dir.path()));
        assert!(cached.is_none());
        let mut stream = server.accept_stream().await;
        stream.subscriptions().await;
        Self { gateway, server, stream, dir }
    }

    /// With the server's policy in force.
    async fn synced(policy: &ServerPolicy) -> Self {
        let mut pair = Self::new().await;
        pair.stream.send_diff(policy, &ServerPolicy::default()).await;
        pair.gateway.apply_next().await;
        for _ in SENT_KINDS {
            pair.stream.expect_ack().await;
        }
        pair.stream.set_last_nonce(SYNCED_NONCE);
        pair
    }
}
