//! Azure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::Value;
use vipgate_cloud::azure::{Azure, Config, CredentialSource};
use vipgate_cloud::{Associate, CallMeter, Claim, GatewayNic, Scope};
use vipgate_cloud_testkit::azure::{FakeAzure, GROUP, SUBSCRIPTION, error_reply};
use vipgate_cloud_testkit::{FakeCloud, RecordedRequest, Reply};

use crate::reconcile::cloud::{Address, Cloud, GATEWAYS, Interface, OURS, Refusal, Snapshot};
use crate::reconcile::random::Random;

const CLUSTER: &str = "vipgate.io_cluster";
const VIP: &str = "vipgate.io_vip";

pub(crate) struct AzureCloud {
    fake: FakeAzure,
    associate: Associate,
    addresses: u8,
    has_ipv6: bool,
    has_candidates: bool,
    /// The address that is in one zone.
    zonal: Option<IpAddr>,
    instances: BTreeSet<String>,
    next: usize,
}

fn address(last: u8) -> IpAddr {
    [203, 0, 113, last].into()
}

const IPV6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn number(gateway: &str) -> u8 {
    1 + GATEWAYS.iter().position(|it| *it == gateway).unwrap_or_default() as u8
}

impl AzureCloud {
    fn name(&self, address: IpAddr) -> Option<String> {
        let wanted = address.to_string();
        let all = self.fake.addresses();
        all.iter().find(|it| it["properties"]["ipAddress"] == wanted.as_str()).map(|it| text(&it["name"]))
    }

    /// A new IP configuration of an interface, by somebody else's hand.
    fn configuration(&mut self, nic: &str) -> String {
        self.next += 1;
        let name = format!("pod-{}", self.next);
        self.fake.add_configuration(nic, &name);
        name
    }
}

impl FakeCloud for AzureCloud {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        self.fake.handle(request)
    }
}

impl Cloud for AzureCloud {
    type Provider = Azure;

    const HAS_SWAP: bool = true;

    fn new(random: &mut Random) -> Self {
        let mut fake = FakeAzure::new();
        fake.retry_after = random.chance(50).then_some(1);
        fake.has_location_only = random.chance(20);
        fake.add_instance("other-vm", 1);
        fake.add_address("mail", address(90), &[("pool", "mail")]);
        let associate = if random.chance(25) { Associate::Instance } else { Associate::Nic };
        let addresses = 2 + random.below(4) as u8;
        let has_ipv6 = associate == Associate::Nic && random.chance(25);
        let zonal = random.chance(25).then(|| address(1));
        let has_candidates = random.chance(30);
        let (instances, next) = (BTreeSet::new(), 0);
        let mut cloud = Self { fake, associate, addresses, has_ipv6, has_candidates, zonal, instances, next };
        for gateway in GATEWAYS {
            cloud.launch(gateway);
        }
        cloud.pool().into_iter().filter(|it| *it != address(addresses + 1)).for_each(|it| cloud.add(it));
        cloud
    }

    fn provider(&self, url: &str) -> Azure {
        let config = Config {
            subscription: SUBSCRIPTION.to_owned(),
            resource_group: GROUP.to_owned(),
            location: None,
            cluster: OURS.to_owned(),
            associate: self.associate,
            endpoint: Some(url.to_owned()),
            audience: "https://management.azure.com".to_owned(),
            credentials: CredentialSource::Managed { imds: url.to_owned(), client: None },
            operation_timeout: Duration::from_secs(10),
        };
        Azure::new(&config, Arc::new(CallMeter::default())).expect("a valid configuration")
    }

    fn scope(&self) -> Scope {
        let gateway = |name: &&str| GatewayNic {
            gateway: (*name).to_owned(),
            instance: format!(
                "azure:///subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Compute/virtualMachines/{name}"
            ),
            nic: None,
        };
        let tags = [("pool".to_owned(), "edge".to_owned())].into();
        Scope { tags, prefixes: Vec::new(), gateways: GATEWAYS.iter().map(gateway).collect() }
    }

    fn snapshot(&self) -> Snapshot {
        let (addresses, interfaces) = (self.fake.addresses(), self.fake.interfaces());
        let mut snapshot = Snapshot::default();
        let ips: BTreeMap<String, IpAddr> = addresses
            .iter()
            .filter_map(|it| Some((text(&it["name"]), text(&it["properties"]["ipAddress"]).parse().ok()?)))
            .collect();
        for nic in &interfaces {
            let (id, name) = (text(&nic["id"]), text(&nic["name"]));
            let gateway = name.strip_suffix("-nic").filter(|name| GATEWAYS.contains(name)).map(str::to_owned);
            let zone = gateway.as_deref().map_or(String::new(), |it| number(it).to_string());
            let mut value = Interface { gateway, zone, ..Interface::default() };
            for configuration in nic["properties"]["ipConfigurations"].as_array().into_iter().flatten() {
                let private = text(&configuration["properties"]["privateIPAddress"]);
                if configuration["properties"]["primary"] == true {
                    value.primary = private;
                } else {
                    let name = text(&configuration["name"]);
                    let address = name.strip_prefix("vipgate-");
                    let bound = address.and_then(|name| ips.get(name));
                    if address.is_some() && bound.is_none() {
                        // Somebody deleted the public address: the planner doesn't know of it any more.
                        continue;
                    }
                    value.secondary.entry(private).or_default().extend(bound);
                }
            }
            snapshot.nics.insert(id, value);
        }
        let routes = self.fake.routes();
        for it in &addresses {
            let Some(public) = ips.get(&text(&it["name"])).copied() else { continue };
            let tags = it["tags"].as_object();
            let mut tags: BTreeMap<String, String> =
                tags.into_iter().flatten().map(|(key, value)| (key.clone(), text(value))).collect();
            let owner = tags.remove(VIP).unwrap_or_default();
            let claim = tags.remove(CLUSTER).map(|cluster| Claim { cluster, owner });
            let is_allocated = tags.remove("vipgate.io_allocated").is_some();
            let in_pool = tags.get("pool").is_some_and(|pool| pool == "edge");
            let nic_id =
                |name: &String| interfaces.iter().find(|nic| nic["name"] == name.as_str()).map(|nic| text(&nic["id"]));
            let at = routes.get(&public).and_then(|(nic, private)| Some((nic_id(nic)?, private.to_string())));
            let user = it["properties"]["natGateway"]["id"].as_str().map(|user| (user.to_owned(), String::new()));
            let id = text(&it["name"]);
            snapshot
                .addresses
                .insert(public, Address { id, in_pool, claim, is_allocated, at: at.or(user), others_tags: tags });
        }
        snapshot
    }

    fn pool(&self) -> Vec<IpAddr> {
        (1..=self.addresses + 1).map(address).chain(self.has_ipv6.then_some(IPV6)).collect()
    }

    fn candidates(&self) -> Vec<IpNet> {
        let all = ["10.0.1.64/26", "10.0.2.64/26", "10.0.3.64/26", "fd00::/16"];
        if self.has_candidates { all.map(|it| it.parse().expect("a prefix")).to_vec() } else { Vec::new() }
    }

    fn is_ambiguous(&self) -> bool {
        self.associate == Associate::Instance
    }

    fn capacity(&self) -> usize {
        if self.associate == Associate::Instance { 1 } else { 200 }
    }

    fn zone_of(&self, address: IpAddr) -> Option<String> {
        (self.zonal == Some(address)).then(|| "1".to_owned())
    }

    fn is_change(request: &RecordedRequest) -> bool {
        request.method == "PUT" || request.method == "DELETE"
    }

    fn describe(request: &RecordedRequest) -> String {
        let name = request.path.rsplit('/').take(2).collect::<Vec<_>>().join(" ");
        let body = request.json();
        let configurations = body["properties"]["ipConfigurations"].as_array().into_iter().flatten();
        let all: Vec<String> = configurations
            .map(|it| {
                let properties = &it["properties"];
                let public = text(&properties["publicIPAddress"]["id"]);
                let public = public.rsplit('/').next().unwrap_or_default();
                format!("{}:{}:{public}", text(&it["name"]), text(&properties["privateIPAddress"]))
            })
            .collect();
        let tags = if request.method == "PUT" { body["tags"].to_string() } else { String::new() };
        format!("{} {name} {} {tags} {all:?}", request.method, request.header("if-match").unwrap_or_default())
    }

    fn refuse(refusal: Refusal, after: Option<u64>) -> Reply {
        let reply = match refusal {
            Refusal::Throttled => error_reply(429, "TooManyRequests"),
            Refusal::Unavailable => error_reply(503, "ServiceUnavailable"),
            Refusal::Internal => error_reply(500, "InternalServerError"),
        };
        after.map_or(reply.clone(), |after| reply.with_header("retry-after", &after.to_string()))
    }

    fn set_lag(&mut self, changes: usize) {
        self.fake.lag = changes;
    }

    fn set_operations(&mut self, time: Duration, failures: usize) {
        self.fake.operation_time = time;
        let error = ("Failed".to_owned(), "RetryableError".to_owned(), "on purpose".to_owned());
        self.fake.operation_errors = std::iter::repeat_n(error, failures).collect();
    }

    fn add(&mut self, address: IpAddr) {
        if self.name(address).is_some() {
            return;
        }
        let name = format!("vip-{}", address.to_string().replace([':', '.'], "-"));
        self.fake.add_address(&name, address, &[("pool", "edge"), ("team", "net")]);
        if self.zonal == Some(address) {
            self.fake.set_zones(&name, &["1"]);
        }
    }

    fn remove(&mut self, address: IpAddr) {
        self.detach(address);
        self.name(address).iter().for_each(|name| self.fake.remove_address(name));
    }

    fn attach_elsewhere(&mut self, address: IpAddr) {
        self.detach(address);
        let Some(name) = self.name(address) else { return };
        self.next += 1;
        if address.is_ipv6() || self.next.is_multiple_of(2) {
            self.fake.attach_to_nat_gateway(&name, "nat");
        } else {
            let configuration = self.configuration("other-vm-nic");
            self.fake.attach(&name, "other-vm-nic", &configuration);
        }
    }

    fn attach_at(&mut self, address: IpAddr, gateway: &str) -> bool {
        let Some(name) = self.name(address).filter(|_| address.is_ipv4() && self.instances.contains(gateway)) else {
            return false;
        };
        self.detach(address);
        let nic = format!("{gateway}-nic");
        let configuration = self.configuration(&nic);
        self.fake.attach(&name, &nic, &configuration);
        true
    }

    fn detach(&mut self, address: IpAddr) {
        let Some(name) = self.name(address) else { return };
        let found = self.fake.interfaces().into_iter().find_map(|nic| {
            let all = nic["properties"]["ipConfigurations"].as_array()?.clone();
            let is_it = |it: &&Value| text(&it["properties"]["publicIPAddress"]["id"]).ends_with(&format!("/{name}"));
            Some((text(&nic["name"]), text(&all.iter().find(is_it)?["name"])))
        });
        match found {
            Some((nic, configuration)) => self.fake.detach(&nic, &configuration),
            None => self.fake.detach_from_nat_gateway(&name),
        }
        self.fake.touch(&name);
    }

    fn set_claim(&mut self, address: IpAddr, claim: Option<&Claim>) {
        let Some(name) = self.name(address) else { return };
        self.fake.set_tag(&name, CLUSTER, claim.map(|it| it.cluster.as_str()));
        self.fake.set_tag(&name, VIP, claim.map(|it| it.owner.as_str()));
    }

    fn add_private(&mut self, gateway: &str) -> Option<String> {
        if !self.instances.contains(gateway) {
            return None;
        }
        let nic = format!("{gateway}-nic");
        let name = self.configuration(&nic);
        self.fake.private(&nic).get(&name).cloned()
    }

    fn terminate(&mut self, gateway: &str) {
        if self.instances.remove(gateway) {
            self.fake.remove_instance(gateway);
        }
    }

    fn launch(&mut self, gateway: &str) {
        if self.instances.insert(gateway.to_owned()) {
            self.fake.add_instance(gateway, number(gateway));
        }
    }
}
