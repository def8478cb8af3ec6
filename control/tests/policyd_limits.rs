//! A policy server and clients that say too much, or nothing: what they make it hold is bounded, and gateways get in.
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

/// Far more than anything takes on a slow machine.
const LONG: Duration = Duration::from_secs(30);

/// A server in a process of its own, with a policy of one Service.
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

    /// With these limits.
    fn start_with(limits: &str) -> Self {
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let (folder, at, metrics) = (tempfile::tempdir().unwrap(), free(), free());
        let (config, policy) = (folder.path().join("policyd.yaml"), folder.path().join("policy.yaml"));
        fs::write(&policy, "apiVersion: vipgate.io/v1alpha1\nkind: Gateway\nmetadata: {name: gw-a}\nspec: {}\n")
            .unwrap();
        let text = format!(
            "listen: \"{at}\"\nmetrics: {{listen: \"{metrics}\"}}\nlimits: {limits}\nsource: {{files: [{}]}}\n",
            policy.display()
        );
        fs::write(&config, text).unwrap();
        let process =
            Command::new(env!("CARGO_BIN_EXE_vipgate")).args(["policyd", "--config"]).arg(config).spawn().unwrap();
        let policyd = Self { process, at, metrics, _folder: folder };
        let begun = Instant::now();
        while !policyd.page("/readyz").is_some_and(|page| page.starts_with("HTTP/1.1 200")) {
            assert!(begun.elapsed() < LONG, "it is not ready");
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

    /// The most memory that it ever had, MiB.
    fn peak(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// What becomes of a stream with these requests, which stays open behind them.
    async fn stream(
        &self,
        requests: impl Iterator<Item = DeltaDiscoveryRequest> + Send + 'static,
    ) -> Result<(), Status> {
        let client = AggregatedDiscoveryServiceClient::connect(format!("http://{}", self.at)).await.unwrap();
        let mut client = client.max_encoding_message_size(usize::MAX);
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let answers = async {
            let mut responses = client.delta_aggregated_resources(requests).await?.into_inner();
            while responses.message().await?.is_some() {}
            Ok(())
        };
        timeout(LONG, answers).await.expect("an end")
    }

    /// As many responses as there are requests.
    async fn responses(&self, requests: Vec<DeltaDiscoveryRequest>) -> Result<Vec<DeltaDiscoveryResponse>, Status> {
        let count = requests.len();
        let client = AggregatedDiscoveryServiceClient::connect(format!("http://{}", self.at)).await;
        let client = client.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut client = client.max_encoding_message_size(usize::MAX);
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let answers = async {
            let responses = client.delta_aggregated_resources(requests).await?.into_inner();
            responses.take(count).collect::<Result<Vec<_>, Status>>().await
        };
        timeout(LONG, answers).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no responses")))
    }

    /// Whether a gateway gets its first response.
    async fn serves(&self, name: &str) -> bool {
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
async fn a_stream_that_names_without_end_is_ended_and_memory_stays() {
    let server = Policyd::start();
    let before = server.peak();
    // 100 MB, a megabyte each.
    let requests = (0..100).map(|part| {
        let names = (0..10_000).map(|n| format!("{part}-{n}-{}", "x".repeat(90)));
        request("gw-x", names.collect())
    });
    let refusal = server.stream(requests).await.unwrap_err();
    assert_eq!(refusal.code(), Code::ResourceExhausted, "{refusal}");
    assert!(refusal.message().contains("take more than 32 MiB"), "{refusal}");
    // Names of nothing: 32 MB of them would be 800 MB in memory; and one message that is too long in any case.
    for names in [vec![String::new(); 2_000_000], vec![String::new(); 5_000_000], vec!["x".repeat(40_000_000)]] {
        let refusal = server.stream(std::iter::once(request("gw-y", names))).await.unwrap_err();
        assert!(matches!(refusal.code(), Code::ResourceExhausted | Code::OutOfRange), "{refusal}");
    }
    // The same names again and again, and no answer to any response.
    let again = (0..100).map(|_| request("gw-z", (0..20_000).map(|n| n.to_string()).collect()));
    let refusal = server.stream(again).await.unwrap_err();
    assert_eq!(refusal.code(), Code::ResourceExhausted, "{refusal}");
    println!("{before} MiB before, {} MiB at most", server.peak());
    assert!(server.peak() < before + 250, "{} MiB", server.peak());
    assert!(server.serves("gw-a").await);
    let begun = Instant::now();
    // But for what the last one hasn't answered.
    while server.metric("vipgate_policyd_held_bytes ") > 4096 {
        assert!(begun.elapsed() < LONG, "it still holds something");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_does_not_look_at_takes_no_memory() {
    let server = Policyd::start();
    assert!(server.serves("gw-a").await);
    let before = server.peak();
    // Two bytes each on the wire, 168 in memory.
    let extensions = vec![Extension::default(); 1_500_000];
    let node = Node { id: "gw-x".to_owned(), extensions, ..Node::default() };
    let heavy = DeltaDiscoveryRequest { node: Some(node), ..request("gw-x", Vec::new()) };
    assert_eq!(server.responses(vec![heavy]).await.unwrap().len(), 1);
    // Four megabytes of names each, of a type that there isn't.
    let unknown = DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
        ..request("gw-x", vec!["x".repeat(200); 20_000])
    };
    let responses = server.responses(vec![unknown; 20]).await.unwrap();
    assert!(responses.iter().all(|response| response.encoded_len() < 4096));
    println!("{before} MiB before, {} MiB at most", server.peak());
    assert!(server.peak() < before + 120, "{before} MiB before, {} MiB at most", server.peak());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_takes_as_much_as_is_configured() {
    // Three quarters of 64 MiB are for this.
    let server = Policyd::start_with("{bytes_per_address: 67108864}");
    // 27 MB: half for the names, half for responses that nobody has acknowledged.
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
    let refusal = tokio::select! {
        end = server.stream(requests("gw-x")) => panic!("the first one has ended: {end:?}"),
        refusal = second => refusal,
    };
    assert_eq!(refusal.code(), Code::ResourceExhausted, "{refusal}");
    assert!(refusal.message().contains("for your address (`limits.bytes_per_address`)"), "{refusal}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_silent_connections_keep_no_gateway_out() {
    vipgate::listener::raise_descriptors();
    let server = Policyd::start();
    let at = server.at;
    let crowd = std::thread::spawn(move || (0..10_000).filter_map(|_| TcpStream::connect(at).ok()).collect::<Vec<_>>());
    let crowd = crowd.join().unwrap();
    assert!(crowd.len() > 9_900, "{}", crowd.len());
    let begun = Instant::now();
    assert!(server.serves("gw-a").await);
    println!("a gateway was served after {:?}", begun.elapsed());
    let open = server.metric("vipgate_connections{listener=\"grpc\"} ");
    assert!(open <= 1024, "{open} of one address");
    assert!(server.metric("vipgate_connections_refused_total{listener=\"grpc\",reason=\"superseded\"} ") > 8_000);
    // And those to its metrics neither.
    let crowd: Vec<_> = (0..1_000).map(|_| TcpStream::connect(server.metrics).unwrap()).collect();
    assert!(server.metric("vipgate_connections{listener=\"metrics\"} ") <= 64);
    drop(crowd);
}
