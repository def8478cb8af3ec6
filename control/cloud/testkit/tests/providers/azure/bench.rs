//! Three gateways and two addresses in the fake, and the provider.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use vipgate_cloud::azure::{Azure, Config, CredentialSource};
use vipgate_cloud::{
    Associate, Binding, CallMeter, CloudError, GatewayNic, Nic, NicId, Observation, Provider, PublicAddress, Scope,
};
use vipgate_cloud_testkit::azure::{FakeAzure, GROUP, SUBSCRIPTION};
use vipgate_cloud_testkit::{FakeServer, Fault, RecordedRequest, Reply};

use crate::calls::Calls;
pub(crate) use crate::calls::{ip, kind, our_claim};

pub(crate) const VIP_1: &str = "203.0.113.1";
pub(crate) const VIP_2: &str = "203.0.113.2";

pub(crate) struct Bench {
    pub(crate) server: FakeServer<FakeAzure>,
    pub(crate) provider: Azure,
    pub(crate) meter: Arc<CallMeter>,
    gateways: Vec<GatewayNic>,
}

pub(crate) fn config(url: &str, associate: Associate) -> Config {
    Config {
        subscription: SUBSCRIPTION.to_owned(),
        resource_group: GROUP.to_owned(),
        location: None,
        cluster: "prod".to_owned(),
        associate,
        endpoint: Some(url.to_owned()),
        audience: "https://management.azure.com".to_owned(),
        credentials: CredentialSource::Managed { imds: url.to_owned(), client: None },
        operation_timeout: Duration::from_secs(2),
    }
}

pub(crate) fn nic_id(name: &str) -> NicId {
    let subscription = SUBSCRIPTION;
    let network = format!("/subscriptions/{subscription}/resourceGroups/{GROUP}/providers/Microsoft.Network");
    NicId(format!("{network}/networkInterfaces/{name}"))
}

/// Whether a request is of this method and ends with this name.
pub(crate) fn is(method: &'static str, name: &'static str) -> impl Fn(&RecordedRequest) -> bool + Send + 'static {
    move |request| request.method == method && request.path.ends_with(&format!("/{name}"))
}

impl Bench {
    /// `vip-1` and `vip-2` are in the pool, `other` isn't; `gw-1` to `gw-3` are gateways, `other-vm` isn't.
    pub(crate) async fn with(associate: Associate) -> Self {
        let mut cloud = FakeAzure::new();
        cloud.retry_after = Some(0);
        let gateways = (1..=3).map(|zone| GatewayNic {
            gateway: format!("gw-{zone}"),
            instance: cloud.add_instance(&format!("gw-{zone}"), zone),
            nic: None,
        });
        let gateways = gateways.collect();
        cloud.add_instance("other-vm", 1);
        cloud.add_address("vip-1", ip(VIP_1), &[("pool", "edge"), ("team", "net")]);
        cloud.add_address("vip-2", ip(VIP_2), &[("pool", "edge"), ("team", "net")]);
        cloud.add_address("other", ip("203.0.113.9"), &[("pool", "mail")]);
        let server = FakeServer::start(cloud).await.expect("a port");
        let meter = Arc::new(CallMeter::default());
        let provider = Azure::new(&config(&server.url(), associate), meter.clone()).expect("a valid configuration");
        Self { server, provider, meter, gateways }
    }

    pub(crate) async fn new() -> Self {
        Self::with(Associate::Nic).await
    }

    /// With both addresses claimed, and prepared at `gw-1` and `gw-2`.
    pub(crate) async fn prepared() -> Self {
        let bench = Self::new().await;
        bench.claim_all().await;
        for gateway in ["gw-1", "gw-2"] {
            let (nic, addresses) = (bench.nic(gateway).await, bench.addresses().await);
            bench.provider.prepare(&nic, &addresses, &[]).await.expect("prepared");
        }
        bench.log();
        bench
    }

    /// With both addresses attached to `gw-1`.
    pub(crate) async fn attached() -> Self {
        let bench = Self::prepared().await;
        bench.attach("gw-1").await.expect("attached");
        bench.log();
        bench
    }

    pub(crate) async fn claim_all(&self) {
        for address in self.addresses().await {
            self.provider.claim(&address, &our_claim()).await.expect("claimed");
        }
    }

    pub(crate) fn scope(&self) -> Scope {
        let tags = [("pool", "edge"), ("team", "net")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        Scope { tags: tags.into(), prefixes: vec![], gateways: self.gateways.clone() }
    }

    pub(crate) async fn observe(&self) -> Observation {
        self.provider.observe(&self.scope()).await.expect("an observation")
    }

    pub(crate) async fn addresses(&self) -> Vec<PublicAddress> {
        self.observe().await.addresses
    }

    pub(crate) async fn address(&self, address: &str) -> PublicAddress {
        let all = self.addresses().await;
        all.into_iter().find(|it| it.address == ip(address)).expect("an address of the pool")
    }

    pub(crate) async fn nic(&self, gateway: &str) -> Nic {
        self.observe().await.nic_of(gateway).expect("a gateway").clone()
    }

    /// NIC of a gateway, and the bindings of all addresses there.
    pub(crate) async fn bindings(&self, gateway: &str) -> (Nic, Vec<Binding>) {
        let observed = self.observe().await;
        let nic = observed.nic_of(gateway).expect("a gateway").clone();
        let bind = |address: &PublicAddress| {
            Some(Binding { address: address.clone(), private: *address.private.get(&nic.id)? })
        };
        let bindings = observed.addresses.iter().filter_map(bind).collect();
        (nic, bindings)
    }

    pub(crate) async fn attach(&self, gateway: &str) -> Result<(), CloudError> {
        let (nic, bindings) = self.bindings(gateway).await;
        self.log();
        self.provider.attach(&nic, &bindings).await
    }

    pub(crate) async fn move_to(&self, from: &str, gateway: &str) -> Result<(), CloudError> {
        let (nic, bindings) = self.bindings(gateway).await;
        self.log();
        self.provider.move_from_dead(&nic_id(from), &nic, &bindings).await
    }

    /// Where both addresses are: names of interfaces.
    pub(crate) fn places(&self) -> [Option<String>; 2] {
        let routes = self.server.with(|cloud| cloud.routes());
        [VIP_1, VIP_2].map(|vip| routes.get(&ip(vip)).map(|(nic, _)| nic.clone()))
    }

    pub(crate) fn assert_places(&self, first: Option<&str>, second: Option<&str>) {
        assert_eq!(self.places(), [first, second].map(|it| it.map(str::to_owned)));
    }

    pub(crate) fn resource(&self, name: &str) -> Value {
        self.server.with(|cloud| cloud.resource(name))
    }

    /// Requests of the API since the last call.
    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        let is_api = |request: &RecordedRequest| request.path.starts_with("/subscriptions/");
        self.server.take_log().into_iter().filter(is_api).collect()
    }

    /// The same, as method and name of the resource.
    pub(crate) fn log(&self) -> Vec<String> {
        let line = |request: RecordedRequest| {
            let mut parts = request.path.rsplit('/');
            let last = parts.next().unwrap_or_default();
            let name = if parts.next() == Some("operations") { "operation" } else { last };
            format!("{} {name}", request.method)
        };
        self.requests().into_iter().map(line).collect()
    }

    /// The changes since the last call.
    pub(crate) fn changes(&self) -> Vec<String> {
        self.log().into_iter().filter(|line| !line.starts_with("GET")).collect()
    }

    pub(crate) fn fault(&self, fault: Fault, method: &'static str, name: &'static str) {
        self.server.plan_fault(1, fault, is(method, name));
    }

    pub(crate) fn refuse(&self, count: usize, reply: &Reply, method: &'static str, name: &'static str) {
        self.server.plan_fault(count, Fault::Reply(reply.clone()), is(method, name));
    }
}
