//! Google Cloud.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::json;
use vipgate_cloud::gcp::{Config, CredentialSource, Gcp};
use vipgate_cloud::{Associate, CallMeter, Claim, GatewayNic, Scope};
use vipgate_cloud_testkit::{FakeCloud, FakeGcp, GcpAccessConfig, GcpInterface, RecordedRequest, Reply};

use crate::reconcile::cloud::{Address, Cloud, GATEWAYS, Interface, Refusal, Snapshot};
use crate::reconcile::random::Random;

const CLUSTER: &str = "vipgate-cluster";
const VIP: &str = "vipgate-vip";
const ZONES: [&str; 3] = ["r1-a", "r1-b", "r1-c"];

pub(crate) struct GcpCloud {
    fake: FakeGcp,
    addresses: u8,
}

fn address(last: u8) -> IpAddr {
    [203, 0, 113, last].into()
}

fn number(gateway: &str) -> usize {
    GATEWAYS.iter().position(|it| *it == gateway).unwrap_or_default()
}

impl GcpCloud {
    fn name(&self, address: IpAddr) -> Option<String> {
        let text = address.to_string();
        self.fake.state.addresses.iter().find(|(_, it)| it.address == text).map(|(name, _)| name.clone())
    }
}

impl FakeCloud for GcpCloud {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        self.fake.handle(request)
    }
}

impl Cloud for GcpCloud {
    type Provider = Gcp;

    const HAS_SWAP: bool = true;

    fn new(random: &mut Random) -> Self {
        let mut fake = FakeGcp::new("p1", "r1");
        fake.finds_use_late = random.chance(30);
        let addresses = 2 + random.below(4) as u8;
        fake.add_instance("r1-a", "other-vm", "10.0.0.10");
        fake.add_address("mail", "203.0.113.90", &[("pool", "mail")]);
        let mut cloud = Self { fake, addresses };
        for gateway in GATEWAYS {
            cloud.launch(gateway);
        }
        (1..=addresses).for_each(|last| cloud.add(address(last)));
        cloud
    }

    fn provider(&self, url: &str) -> Gcp {
        let config = Config {
            project: "p1".to_owned(),
            region: "r1".to_owned(),
            associate: Associate::Instance,
            endpoint: Some(url.to_owned()),
            credentials: CredentialSource::Metadata(url.trim_start_matches("http://").to_owned()),
            operation_timeout: Duration::from_secs(10),
        };
        Gcp::new(&config, Arc::new(CallMeter::default())).expect("a valid configuration")
    }

    fn scope(&self) -> Scope {
        let gateway = |name: &&str| GatewayNic {
            gateway: (*name).to_owned(),
            instance: format!("gce://p1/{}/{name}", ZONES[number(name)]),
            nic: None,
        };
        let tags = [("pool".to_owned(), "edge".to_owned())].into();
        Scope { tags, prefixes: Vec::new(), gateways: GATEWAYS.iter().map(gateway).collect() }
    }

    fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (name, instance) in &self.fake.state.instances {
            for (nic, interface) in &instance.interfaces {
                let gateway = GATEWAYS.contains(&name.as_str()).then(|| name.clone());
                let (zone, primary) = (instance.zone.clone(), interface.network_ip.clone());
                let value = Interface { gateway, zone, primary, ..Interface::default() };
                snapshot.nics.insert(format!("{}/{name}/{nic}", instance.zone), value);
            }
        }
        let routes = self.fake.routes();
        for (name, address) in &self.fake.state.addresses {
            let public: IpAddr = address.address.parse().expect("an address");
            let mut tags = address.labels.clone();
            let owner = tags.remove(VIP).unwrap_or_default().replace("_-", "/");
            let claim = tags.remove(CLUSTER).map(|cluster| Claim { cluster, owner });
            let is_allocated = tags.remove("vipgate-allocated").is_some();
            let in_pool = tags.get("pool").is_some_and(|pool| pool == "edge");
            let user = address.user.clone().map(|user| (user, String::new()));
            let at = routes.get(&public).map(|(nic, private)| (nic.clone(), private.to_string())).or(user);
            let value = Address { id: name.clone(), in_pool, claim, is_allocated, at, others_tags: tags };
            snapshot.addresses.insert(public, value);
        }
        snapshot
    }

    fn pool(&self) -> Vec<IpAddr> {
        (1..=self.addresses + 1).map(address).collect()
    }

    fn candidates(&self) -> Vec<IpNet> {
        Vec::new()
    }

    fn is_ambiguous(&self) -> bool {
        false
    }

    fn capacity(&self) -> usize {
        1
    }

    fn zone_of(&self, _: IpAddr) -> Option<String> {
        None
    }

    fn is_change(request: &RecordedRequest) -> bool {
        request.method != "GET" && request.path.starts_with("/compute/") && !request.path.ends_with("/wait")
    }

    fn describe(request: &RecordedRequest) -> String {
        let path = request.path.strip_prefix("/compute/v1/projects/p1/").unwrap_or(&request.path);
        let query: Vec<_> = request.query.iter().filter(|(name, _)| name != "requestId").collect();
        format!("{} {path} {query:?} {}", request.method, String::from_utf8_lossy(&request.body))
    }

    fn refuse(refusal: Refusal, after: Option<u64>) -> Reply {
        let (status, reason) = match refusal {
            Refusal::Throttled => (403, "rateLimitExceeded"),
            Refusal::Unavailable => (503, "backendError"),
            Refusal::Internal => (500, "internalError"),
        };
        let error = json!({ "code": status, "message": "on purpose", "errors": [{ "reason": reason }] });
        let reply = Reply::json(status, &json!({ "error": error }));
        after.map_or(reply.clone(), |after| reply.with_header("retry-after", &after.to_string()))
    }

    fn set_lag(&mut self, changes: usize) {
        self.fake.lag = changes;
    }

    fn set_operations(&mut self, time: Duration, failures: usize) {
        self.fake.operation_time = time;
        let error = ("RESOURCE_NOT_READY".to_owned(), "on purpose".to_owned());
        self.fake.operation_errors = std::iter::repeat_n(error, failures).collect();
    }

    fn add(&mut self, address: IpAddr) {
        if self.name(address).is_none() {
            let text = address.to_string();
            self.fake.add_address(
                &format!("vip-{}", text.replace('.', "-")),
                &text,
                &[("pool", "edge"), ("team", "net")],
            );
        }
    }

    fn remove(&mut self, address: IpAddr) {
        self.detach(address);
        if let Some(name) = self.name(address) {
            self.fake.change(|state| state.addresses.remove(&name));
        }
    }

    fn attach_elsewhere(&mut self, address: IpAddr) {
        self.detach(address);
        let is_free = self.fake.state.instances["other-vm"].interfaces["nic0"].access_config.is_none();
        if is_free {
            self.fake.attach(&address.to_string(), "other-vm");
        } else if let Some(name) = self.name(address) {
            let user = "https://www.googleapis.com/compute/v1/projects/p1/regions/r1/forwardingRules/web".to_owned();
            self.fake.change(|state| {
                if let Some(address) = state.addresses.get_mut(&name) {
                    address.user = Some(user);
                }
            });
        }
    }

    fn attach_at(&mut self, address: IpAddr, gateway: &str) -> bool {
        let instance = self.fake.state.instances.get(gateway);
        let is_free = instance.is_some_and(|it| it.interfaces["nic0"].access_config.is_none());
        if is_free {
            self.detach(address);
            self.fake.attach(&address.to_string(), gateway);
        }
        is_free
    }

    fn detach(&mut self, address: IpAddr) {
        let (text, name) = (address.to_string(), self.name(address));
        self.fake.change(|state| {
            let has = |config: &GcpAccessConfig| config.nat_ip == text;
            let nics = state.instances.values_mut().flat_map(|it| it.interfaces.values_mut());
            nics.filter(|nic: &&mut GcpInterface| nic.access_config.as_ref().is_some_and(has))
                .for_each(|nic| nic.access_config = None);
            if let Some(address) = name.and_then(|name| state.addresses.get_mut(&name)) {
                address.user = None;
            }
        });
    }

    fn set_claim(&mut self, address: IpAddr, claim: Option<&Claim>) {
        let Some(name) = self.name(address) else { return };
        self.fake.change(|state| {
            let Some(address) = state.addresses.get_mut(&name) else { return };
            address.label_version += 1;
            for (key, value) in [(CLUSTER, claim.map(|it| &it.cluster)), (VIP, claim.map(|it| &it.owner))] {
                match value {
                    Some(value) => address.labels.insert(key.to_owned(), value.replace('/', "_-")),
                    None => address.labels.remove(key),
                };
            }
        });
    }

    fn add_private(&mut self, _: &str) -> Option<String> {
        None
    }

    fn terminate(&mut self, gateway: &str) {
        self.fake.change(|state| state.instances.remove(gateway));
    }

    fn launch(&mut self, gateway: &str) {
        if !self.fake.state.instances.contains_key(gateway) {
            let at = number(gateway);
            self.fake.add_instance(ZONES[at], gateway, &format!("10.0.0.{}", 11 + at));
        }
    }
}
