//! Resource limits of the policy server: memory for hostile or silent clients is bounded, and gateways can connect.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::{Extension, Node};
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message as _;
use tempfile::TempDir;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tonic::{Code, Status};
use vipgate::xds::resource::Kind;

/// Timeout of all waits, long enough for a slow machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A policy server in a separate process, with a policy of one gateway.
struct Policyd {
    process: Child,
    at: SocketAddr,
    metrics: SocketAddr,
    _folder: TempDir,
}

impl Policyd {
    fn start() -> Self {
        Self::start_with("{}")
    }

    /// Starts a server with these limits.
    fn start_with(limits: &str) -> Self {
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let (folder, at, metrics) = (tempfile::tempdir().unwrap(), free(), free());
        let (config, policy) = (folder.path().join("policyd.yaml"), folder.path().join("policy.yaml"));
        fs::write(&policy, "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: gw-a}\nspec: {}\n")
            .unwrap();
        let text = format!(
            "listen: \"{at}\"\nmetrics: {{listen: \"{metrics}\"}}\nlimits: {limits}\nsource: {{files: [{}]}}\n",
            policy.display()
        );
        fs::write(&config, text).unwrap();
        let process =
            Command::new(env!("CARGO_BIN_EXE_vipgate")).args(["policyd", "--config"]).arg(config).spawn().unwrap();
        let policyd = Self { process, at, metrics, _folder: folder };
        let start = Instant::now();
        while !policyd.page("/readyz").is_some_and(|page| page.starts_with("HTTP/1.1 200")) {
            assert!(start.elapsed() < TIMEOUT, "not ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        policyd
    }

    fn page(&self, path: &str) -> Option<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = TcpStream::connect(self.metrics).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// The value of a series.
    fn metric(&self, series: &str) -> u64 {
        let page = self.page("/metrics").unwrap();
        let value =
            page.lines().find_map(|line| line.strip_prefix(series)).unwrap_or_else(|| panic!("{series}: {page}"));
        value.trim().parse().unwrap()
    }

    /// Peak resident memory in MiB.
    fn peak_memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// Sends requests on a stream that stays open; returns the stream's result.
    async fn stream(
        &self,
        requests: impl Iterator<Item = DeltaDiscoveryRequest> + Send + 'static,
    ) -> Result<(), Status> {
        let client = AggregatedDiscoveryServiceClient::connect(format!("http://{}", self.at)).await.unwrap();
        let mut client = client.max_encoding_message_size(usize::MAX);
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let responses = async {
            let mut responses = client.delta_aggregated_resources(requests).await?.into_inner();
            while responses.message().await?.is_some() {}
            Ok(())
        };
        timeout(TIMEOUT, responses).await.expect("end of the stream")
    }

    /// Sends requests; returns as many responses.
    async fn responses(&self, requests: Vec<DeltaDiscoveryRequest>) -> Result<Vec<DeltaDiscoveryResponse>, Status> {
        let count = requests.len();
        let client = AggregatedDiscoveryServiceClient::connect(format!("http://{}", self.at)).await;
        let client = client.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut client = client.max_encoding_message_size(usize::MAX);
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let responses = async {
            let responses = client.delta_aggregated_resources(requests).await?.into_inner();
            responses.take(count).collect::<Result<Vec<_>, Status>>().await
        };
        timeout(TIMEOUT, responses).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no responses")))
    }

    /// Whether a gateway gets its first response.
    async fn responds_to(&self, name: &str) -> bool {
        self.responses(vec![request(name, Vec::new())]).await.is_ok_and(|responses| responses.len() == 1)
    }
}

impl Drop for Policyd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn request(name: &str, names: Vec<String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node { id: name.to_owned(), ..Node::default() }),
        type_url: Kind::Gateway.type_url().to_owned(),
        resource_names_subscribe: names,
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_subscriptions_end_the_stream_and_memory_is_bounded() {
    let server = Policyd::start();
    let before = server.peak_memory();
    // 100 requests of 1 MB.
    let requests = (0..100).map(|part| {
        let names = (0..10_000).map(|n| format!("{part}-{n}-{}", "x".repeat(90)));
        request("gw-x", names.collect())
    });
    let rejection = server.stream(requests).await.unwrap_err();
    assert_eq!(rejection.code(), Code::ResourceExhausted, "{rejection}");
    assert!(rejection.message().contains("exceed 32 MiB"), "{rejection}");
    // Empty names, of which 32 MB would take 800 MB of memory, and a message that exceeds every limit.
    for names in [vec![String::new(); 2_000_000], vec![String::new(); 5_000_000], vec!["x".repeat(40_000_000)]] {
        let rejection = server.stream(std::iter::once(request("gw-y", names))).await.unwrap_err();
        assert!(matches!(rejection.code(), Code::ResourceExhausted | Code::OutOfRange), "{rejection}");
    }
    // Repeated names, without acknowledgement of any response.
    let again = (0..100).map(|_| request("gw-z", (0..20_000).map(|n| n.to_string()).collect()));
    let rejection = server.stream(again).await.unwrap_err();
    assert_eq!(rejection.code(), Code::ResourceExhausted, "{rejection}");
    println!("{before} MiB before, {} MiB at most", server.peak_memory());
    assert!(server.peak_memory() < before + 250, "{} MiB", server.peak_memory());
    assert!(server.responds_to("gw-a").await);
    let start = Instant::now();
    // Except for the response that the last client hasn't acknowledged.
    while server.metric("vipgate_policyd_held_bytes ") > 4096 {
        assert!(start.elapsed() < TIMEOUT, "memory is still held");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ignored_fields_use_no_memory() {
    let server = Policyd::start();
    assert!(server.responds_to("gw-a").await);
    let before = server.peak_memory();
    // Two bytes each on the wire, 168 in memory.
    let extensions = vec![Extension::default(); 1_500_000];
    let node = Node { id: "gw-x".to_owned(), extensions, ..Node::default() };
    let heavy = DeltaDiscoveryRequest { node: Some(node), ..request("gw-x", Vec::new()) };
    assert_eq!(server.responses(vec![heavy]).await.unwrap().len(), 1);
    // 4 MB of names each, of an unknown type.
    let unknown = DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
        ..request("gw-x", vec!["x".repeat(200); 20_000])
    };
    let responses = server.responses(vec![unknown; 20]).await.unwrap();
    assert!(responses.iter().all(|response| response.encoded_len() < 4096));
    println!("{before} MiB before, {} MiB at most", server.peak_memory());
    assert!(server.peak_memory() < before + 120, "{before} MiB before, {} MiB at most", server.peak_memory());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_per_address_is_enforced() {
    // Three quarters of 64 MiB are available for this.
    let server = Policyd::start_with("{bytes_per_address: 67108864}");
    // 27 MB: half for the names, half for unacknowledged responses.
    let requests = |gateway: &'static str| {
        (0..8).map(move |part| {
            let names = (0..10_000).map(|n| format!("{part}-{n}-{}", "x".repeat(90)));
            request(gateway, names.collect())
        })
    };
    let second = async {
        while server.metric("vipgate_policyd_held_bytes ") < 24_000_000 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server.stream(requests("gw-y")).await.unwrap_err()
    };
    let rejection = tokio::select! {
        end = server.stream(requests("gw-x")) => panic!("the first stream has ended: {end:?}"),
        rejection = second => rejection,
    };
    assert_eq!(rejection.code(), Code::ResourceExhausted, "{rejection}");
    assert!(rejection.message().contains("for your address (`limits.bytes_per_address`)"), "{rejection}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_silent_connections_block_no_gateway() {
    vipgate::listener::raise_descriptor_limit();
    let server = Policyd::start();
    let at = server.at;
    let idle = std::thread::spawn(move || (0..10_000).filter_map(|_| TcpStream::connect(at).ok()).collect::<Vec<_>>());
    let idle = idle.join().unwrap();
    assert!(idle.len() > 9_900, "{}", idle.len());
    let start = Instant::now();
    assert!(server.responds_to("gw-a").await);
    println!("a gateway got its policy after {:?}", start.elapsed());
    let open = server.metric("vipgate_connections{listener=\"grpc\"} ");
    assert!(open <= 1024, "{open} of one address");
    assert!(server.metric("vipgate_connections_refused_total{listener=\"grpc\",reason=\"superseded\"} ") > 8_000);
    // The same for connections to the metrics port.
    let idle: Vec<_> = (0..1_000).map(|_| TcpStream::connect(server.metrics).unwrap()).collect();
    assert!(server.metric("vipgate_connections{listener=\"metrics\"} ") <= 64);
    drop(idle);
}
