//! Two gateways and two addresses in the fake, and the provider.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use vipgate_cloud::gcp::{Config, CredentialSource, Gcp};
use vipgate_cloud::{
    Associate, Binding, CallMeter, CloudError, GatewayNic, Nic, NicId, Observation, Provider, PublicAddress, Scope,
    Tags,
};
use vipgate_cloud_testkit::{FakeGcp, FakeServer, Fault, RecordedRequest};

use crate::calls::Calls;
pub(crate) use crate::calls::{ip, kind, our_claim};

pub(crate) const NIC_1: &str = "europe-west1-b/gw-1/nic0";
pub(crate) const NIC_2: &str = "europe-west1-c/gw-2/nic0";

pub(crate) struct Bench {
    pub(crate) server: FakeServer<FakeGcp>,
    pub(crate) provider: Gcp,
    pub(crate) meter: Arc<CallMeter>,
}

pub(crate) fn config(url: &str) -> Config {
    Config {
        project: "p1".to_owned(),
        region: "europe-west1".to_owned(),
        associate: Associate::Instance,
        endpoint: Some(url.to_owned()),
        credentials: CredentialSource::Metadata(url.trim_start_matches("http://").to_owned()),
        operation_timeout: Duration::from_secs(2),
    }
}

impl Bench {
    /// `vip-1` and `vip-2` are in the pool, `other` isn't; `gw-1` and `gw-2` are gateways, `other-vm` isn't.
    pub(crate) async fn new() -> Self {
        let mut cloud = FakeGcp::new("p1", "europe-west1");
        cloud.add_instance("europe-west1-b", "gw-1", "10.0.0.11");
        cloud.add_instance("europe-west1-c", "gw-2", "10.0.0.12");
        cloud.add_instance("europe-west1-c", "other-vm", "10.0.0.13");
        cloud.add_address("vip-1", "203.0.113.1", &[("pool", "edge"), ("team", "net")]);
        cloud.add_address("vip-2", "203.0.113.2", &[("pool", "edge"), ("team", "net")]);
        cloud.add_address("other", "203.0.113.9", &[("pool", "mail")]);
        let server = FakeServer::start(cloud).await.expect("a port");
        let meter = Arc::new(CallMeter::default());
        let provider = Gcp::new(&config(&server.url()), meter.clone()).expect("a valid configuration");
        Self { server, provider, meter }
    }

    /// With `vip-1` claimed by us.
    pub(crate) async fn claimed() -> Self {
        let bench = Self::new().await;
        bench.provider.claim(&bench.address("vip-1").await, &our_claim()).await.expect("claimed");
        bench.log();
        bench
    }

    /// With `vip-1` claimed by us and attached to `gw-1`.
    pub(crate) async fn attached() -> Self {
        let bench = Self::claimed().await;
        bench.attach(NIC_1).await.expect("attached");
        bench.log();
        bench
    }

    pub(crate) fn scope() -> Scope {
        let gateway = |name: &str, zone: &str| GatewayNic {
            gateway: name.to_owned(),
            instance: format!("gce://p1/{zone}/{name}"),
            nic: None,
        };
        Scope {
            tags: Tags::from([("pool".to_owned(), "edge".to_owned()), ("team".to_owned(), "net".to_owned())]),
            prefixes: Vec::new(),
            gateways: vec![gateway("gw-1", "europe-west1-b"), gateway("gw-2", "europe-west1-c")],
        }
    }

    pub(crate) async fn observe(&self) -> Observation {
        self.provider.observe(&Self::scope()).await.expect("an observation")
    }

    pub(crate) async fn address(&self, name: &str) -> PublicAddress {
        let observed = self.observe().await.addresses;
        observed.into_iter().find(|it| it.id.0 == name).expect("an address of this name")
    }

    pub(crate) async fn nic(&self, id: &str) -> Nic {
        self.observe().await.nics.into_iter().find(|nic| nic.id.0 == id).expect("a NIC with this id")
    }

    /// `vip-1` at the primary address of a NIC.
    pub(crate) async fn binding(&self, nic: &str) -> Binding {
        let address = self.address("vip-1").await;
        let private = address.private[&NicId(nic.to_owned())];
        Binding { address, private }
    }

    pub(crate) async fn attach(&self, nic: &str) -> Result<(), CloudError> {
        let (binding, nic) = (self.binding(nic).await, self.nic(nic).await);
        self.log();
        self.provider.attach(&nic, &[binding]).await
    }

    /// Moves `vip-1`.
    pub(crate) async fn move_to(&self, from: &str, nic: &str) -> Result<(), CloudError> {
        let (binding, nic) = (self.binding(nic).await, self.nic(nic).await);
        self.log();
        self.provider.move_from_dead(&NicId(from.to_owned()), &nic, &[binding]).await
    }

    pub(crate) async fn detach(&self, from: &str) -> Result<(), CloudError> {
        let address = self.address("vip-1").await;
        self.log();
        self.provider.detach(&NicId(from.to_owned()), &[address]).await
    }

    /// Plans a fault for the next `count` requests with this end of the path.
    pub(crate) fn fault(&self, count: usize, fault: Fault, end: &'static str) {
        self.server.plan_fault(count, fault, move |request| request.path.ends_with(end));
    }

    /// A single read.
    pub(crate) async fn read_once(&self) -> Result<Observation, CloudError> {
        self.provider.observe(&Scope { gateways: Vec::new(), ..Self::scope() }).await
    }

    /// Where `vip-1` is.
    pub(crate) fn route(&self) -> Option<(String, IpAddr)> {
        self.server.with(|cloud| cloud.routes().get(&ip("203.0.113.1")).cloned())
    }

    /// Requests of the API since the last call: method and last part of the path, sorted, since reads are concurrent.
    pub(crate) fn log(&self) -> Vec<String> {
        let requests = self.requests();
        let mut log: Vec<String> = requests.iter().map(|it| format!("{} {}", it.method, last(&it.path))).collect();
        log.sort();
        log
    }

    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        let is_api = |request: &RecordedRequest| request.path.starts_with("/compute/v1/");
        self.server.take_log().into_iter().filter(is_api).collect()
    }

    /// Changes among the requests since the last call.
    pub(crate) fn writes(&self) -> Vec<String> {
        let mut log = self.log();
        log.retain(|line| !line.starts_with("GET") && !line.ends_with("/wait") && line != "POST wait");
        log
    }
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}
