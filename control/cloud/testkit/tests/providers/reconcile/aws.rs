//! AWS.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use vipgate_cloud::aws::{Aws, Config, CredentialSource};
use vipgate_cloud::{Associate, CallMeter, Claim, GatewayNic, Scope};
use vipgate_cloud_testkit::aws::{ACCESS_KEY, FakeAws};
use vipgate_cloud_testkit::{FakeCloud, RecordedRequest, Reply};

use crate::reconcile::cloud::{Address, Cloud, GATEWAYS, Interface, OURS, Refusal, Snapshot};
use crate::reconcile::random::Random;

const CLUSTER: &str = "vipgate.io/cluster";
const VIP: &str = "vipgate.io/vip";
const ZONES: [&str; 2] = ["eu-west-1a", "eu-west-1b"];

pub(crate) struct AwsCloud {
    fake: FakeAws,
    associate: Associate,
    instance_type: &'static str,
    capacity: usize,
    zones: Vec<&'static str>,
    /// Instance and ENI of each gateway.
    gateways: BTreeMap<String, (String, String)>,
    /// The ENI of something that isn't a gateway.
    other: String,
    addresses: u8,
    next_private: u8,
}

fn address(last: u8) -> IpAddr {
    [203, 0, 113, last].into()
}

impl AwsCloud {
    fn id(&self, address: IpAddr) -> Option<String> {
        self.fake.addresses().into_iter().find(|(_, public)| *public == address).map(|(id, _)| id)
    }
}

impl FakeCloud for AwsCloud {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        self.fake.handle(request)
    }
}

impl Cloud for AwsCloud {
    type Provider = Aws;

    const HAS_SWAP: bool = false;

    fn new(random: &mut Random) -> Self {
        let mut fake = FakeAws::new();
        let associate = if random.chance(25) { Associate::Instance } else { Associate::Nic };
        let (instance_type, private) =
            random.of(&[("t3.nano", 2), ("t3.medium", 6), ("c7gn.xlarge", 15)]).expect("a type");
        let (_, other) = fake.add_instance("t3.medium", ZONES[0]);
        let addresses = 2 + random.below(4) as u8;
        let zones = (0..3).map(|_| ZONES[random.below(2)]).collect();
        let capacity = if associate == Associate::Instance { 1 } else { private - 1 };
        let gateways = BTreeMap::new();
        let mut cloud =
            Self { fake, associate, instance_type, capacity, zones, gateways, other, addresses, next_private: 200 };
        for gateway in GATEWAYS {
            cloud.launch(gateway);
        }
        (1..=addresses).for_each(|last| cloud.add(address(last)));
        cloud.fake.add_address(address(90), &[("pool", "mail")]);
        cloud
    }

    fn provider(&self, url: &str) -> Aws {
        let credentials = CredentialSource::Keys {
            access_key: ACCESS_KEY.to_owned(),
            secret_key: "secret".to_owned(),
            session_token: None,
        };
        let config = Config {
            region: "eu-west-1".to_owned(),
            associate: self.associate,
            cluster: OURS.to_owned(),
            endpoint: Some(url.to_owned()),
            credentials,
        };
        Aws::new(config, Arc::new(CallMeter::default())).expect("a valid configuration")
    }

    fn scope(&self) -> Scope {
        let gateway = |(name, (instance, _)): (&String, &(String, String))| GatewayNic {
            gateway: name.clone(),
            instance: format!("aws:///zone/{instance}"),
            nic: None,
        };
        let tags = [("pool".to_owned(), "edge".to_owned())].into();
        Scope { tags, prefixes: Vec::new(), gateways: self.gateways.iter().map(gateway).collect() }
    }

    fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for eni in self.fake.interfaces() {
            let private = self.fake.private_addresses(eni);
            let nic = Interface {
                gateway: self.gateways.iter().find(|(_, (_, id))| id == eni).map(|(name, _)| name.clone()),
                zone: self.fake.zone_of(eni).unwrap_or_default(),
                primary: private[0].to_string(),
                secondary: private[1..].iter().map(|it| (it.to_string(), BTreeSet::new())).collect(),
            };
            snapshot.nics.insert(eni.to_owned(), nic);
        }
        let routes = self.fake.routes();
        for (id, public) in self.fake.addresses() {
            let mut tags = self.fake.tags(&id);
            let claim =
                tags.remove(CLUSTER).map(|cluster| Claim { cluster, owner: tags.remove(VIP).unwrap_or_default() });
            for (key, private) in &tags {
                let Some(eni) = key.strip_prefix("vipgate.io/private/") else { continue };
                let bound = snapshot.nics.get_mut(eni).and_then(|nic| nic.secondary.get_mut(private));
                bound.map(|bound| bound.insert(public));
            }
            let is_allocated = tags.remove("vipgate.io/allocated").is_some();
            tags.retain(|key, _| !key.starts_with("vipgate.io/"));
            let at = routes.get(&public).map(|(eni, private)| (eni.clone(), private.to_string()));
            let in_pool = tags.get("pool").is_some_and(|pool| pool == "edge");
            snapshot.addresses.insert(public, Address { id, in_pool, claim, is_allocated, at, others_tags: tags });
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
        self.associate == Associate::Instance
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn zone_of(&self, _: IpAddr) -> Option<String> {
        None
    }

    fn is_change(request: &RecordedRequest) -> bool {
        let action = action(request);
        !action.is_empty() && !action.starts_with("Describe")
    }

    fn describe(request: &RecordedRequest) -> String {
        let parameters = request.form().into_iter().filter(|(name, _)| name != "Version");
        let parameters: Vec<String> = parameters.map(|(name, value)| format!("{name}={value}")).collect();
        parameters.join(" ")
    }

    fn refuse(refusal: Refusal, after: Option<u64>) -> Reply {
        let (status, code) = match refusal {
            Refusal::Throttled => (503, "RequestLimitExceeded"),
            Refusal::Unavailable => (503, "Unavailable"),
            Refusal::Internal => (500, "InternalError"),
        };
        let error = format!("<Error><Code>{code}</Code><Message>on purpose</Message></Error>");
        let reply = Reply::text(status, "text/xml", format!("<Response><Errors>{error}</Errors></Response>"));
        after.map_or(reply.clone(), |after| reply.with_header("retry-after", &after.to_string()))
    }

    fn set_lag(&mut self, changes: usize) {
        self.fake.set_lag(changes * 2);
    }

    fn set_operations(&mut self, _: Duration, _: usize) {}

    fn add(&mut self, address: IpAddr) {
        if self.id(address).is_none() {
            self.fake.add_address(address, &[("pool", "edge"), ("team", "network")]);
        }
    }

    fn remove(&mut self, address: IpAddr) {
        self.id(address).iter().for_each(|id| self.fake.remove_address(id));
    }

    fn attach_elsewhere(&mut self, address: IpAddr) {
        let Some(id) = self.id(address) else { return };
        self.next_private += 1;
        let private: IpAddr = [10, 0, 0, self.next_private].into();
        let other = self.other.clone();
        self.fake.assign_by_hand(&other, private);
        self.fake.associate_by_hand(&id, &other, private);
    }

    fn attach_at(&mut self, address: IpAddr, gateway: &str) -> bool {
        let Some(id) = self.id(address) else { return false };
        let Some(private) = self.add_private(gateway).and_then(|it| it.parse().ok()) else { return false };
        let eni = self.gateways[gateway].1.clone();
        self.fake.associate_by_hand(&id, &eni, private);
        true
    }

    fn detach(&mut self, address: IpAddr) {
        self.id(address).iter().for_each(|id| self.fake.disassociate_by_hand(id));
    }

    fn set_claim(&mut self, address: IpAddr, claim: Option<&Claim>) {
        let Some(id) = self.id(address) else { return };
        for (key, value) in [(CLUSTER, claim.map(|it| &it.cluster)), (VIP, claim.map(|it| &it.owner))] {
            match value {
                Some(value) => self.fake.set_tag(&id, key, value),
                None => self.fake.remove_tag(&id, key),
            }
        }
    }

    fn add_private(&mut self, gateway: &str) -> Option<String> {
        let eni = self.gateways.get(gateway)?.1.clone();
        let all = self.fake.private_addresses(&eni);
        let IpAddr::V4(first) = all.first()? else { return None };
        let is_full = all.len() > self.capacity && self.associate == Associate::Nic;
        self.next_private += 1;
        let [a, b, c, _] = first.octets();
        let private = IpAddr::from([a, b, c, self.next_private]);
        if is_full || all.contains(&private) || self.next_private > 250 {
            return None;
        }
        self.fake.assign_by_hand(&eni, private);
        Some(private.to_string())
    }

    fn terminate(&mut self, gateway: &str) {
        if let Some((instance, _)) = self.gateways.remove(gateway) {
            self.fake.terminate(&instance);
        }
    }

    fn launch(&mut self, gateway: &str) {
        let zone = self.zones[GATEWAYS.iter().position(|it| *it == gateway).unwrap_or_default()];
        if !self.gateways.contains_key(gateway) {
            let ids = self.fake.add_instance(self.instance_type, zone);
            self.gateways.insert(gateway.to_owned(), ids);
        }
    }
}

fn action(request: &RecordedRequest) -> String {
    request.form().into_iter().find(|(name, _)| name == "Action").map(|(_, value)| value).unwrap_or_default()
}
