//! A region with two gateways and some addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_cloud::aws::{Aws, Config, CredentialSource};
use vipgate_cloud::execute::ActionKind;
use vipgate_cloud::plan::{Desired, DesiredVip, GatewayState, plan};
use vipgate_cloud::{Associate, CallMeter, GatewayNic, Nic, Observation, Provider, PublicAddress, Scope, Tags};
use vipgate_cloud_testkit::aws::{ACCESS_KEY, FakeAws};
use vipgate_cloud_testkit::{FakeServer, RecordedRequest};

/// Zones of the gateways `a` and `b`: in different subnets, so that private addresses can't move.
pub(crate) const ZONES: [&str; 2] = ["eu-west-1a", "eu-west-1b"];

pub(crate) struct World {
    pub(crate) fake: FakeServer<FakeAws>,
    pub(crate) provider: Aws,
    pub(crate) scope: Scope,
    pub(crate) desired: Desired,
    pub(crate) enis: BTreeMap<String, String>,
    pub(crate) allocations: Vec<String>,
}

pub(crate) fn vip(last: u8) -> IpAddr {
    [203, 0, 113, last].into()
}

pub(crate) fn keys() -> CredentialSource {
    CredentialSource::Keys { access_key: ACCESS_KEY.to_owned(), secret_key: "secret".to_owned(), session_token: None }
}

pub(crate) fn config(url: &str) -> Config {
    Config {
        region: "eu-west-1".to_owned(),
        associate: Associate::Nic,
        cluster: "prod".to_owned(),
        endpoint: Some(url.to_owned()),
        credentials: keys(),
    }
}

pub(crate) fn provider(url: &str, associate: Associate, credentials: CredentialSource) -> Aws {
    let config = Config { associate, credentials, ..config(url) };
    Aws::new(config, Arc::new(CallMeter::default())).unwrap()
}

impl World {
    /// Two gateways, and this many addresses of the pool, which are VIPs at gateway `a`.
    pub(crate) async fn new(addresses: u8) -> Self {
        Self::with(addresses, Associate::Nic, "c7gn.xlarge").await
    }

    pub(crate) async fn with(addresses: u8, associate: Associate, kind: &str) -> Self {
        let mut cloud = FakeAws::new();
        let (mut enis, mut gateways) = (BTreeMap::new(), Vec::new());
        for (name, zone) in ["a", "b"].into_iter().zip(ZONES) {
            let (instance, eni) = cloud.add_instance(kind, zone);
            enis.insert(name.to_owned(), eni);
            gateways.push(GatewayNic {
                gateway: name.to_owned(),
                instance: format!("aws:///{zone}/{instance}"),
                nic: None,
            });
        }
        let tags = [("vipgate", "public"), ("team", "network")];
        let allocations = (1..=addresses).map(|last| cloud.add_address(vip(last), &tags)).collect();
        cloud.add_address(vip(200), &[("vipgate", "other")]);
        let fake = FakeServer::start(cloud).await.unwrap();
        let provider = provider(&fake.url(), associate, keys());
        let tags: Tags = [("vipgate".to_owned(), "public".to_owned())].into();
        let scope = Scope { tags, prefixes: vec![], gateways };
        let desired = Desired { cluster: "prod".to_owned(), ..Desired::default() };
        let mut world = Self { fake, provider, scope, desired, enis, allocations };
        world.desired.gateways = ["a", "b"].map(|name| (name.to_owned(), GatewayState::Active)).into();
        for last in 1..=addresses {
            world.place(last, "a", "b");
        }
        world
    }

    /// Places a VIP at a gateway.
    pub(crate) fn place(&mut self, last: u8, gateway: &str, standby: &str) {
        let vip_at = DesiredVip {
            owner: format!("Service default/web-{last}"),
            gateway: Some(gateway.to_owned()),
            standbys: vec![standby.to_owned()],
        };
        self.desired.vips.insert(vip(last), vip_at);
    }

    /// Gateway `a` dies, and `b` owns everything.
    pub(crate) fn fail_over(&mut self) {
        self.desired.gateways.insert("a".to_owned(), GatewayState::Dead);
        for vip in self.desired.vips.values_mut() {
            (vip.gateway, vip.standbys) = (Some("b".to_owned()), vec!["a".to_owned()]);
        }
    }

    pub(crate) async fn observe(&self) -> Observation {
        self.provider.observe(&self.scope).await.unwrap()
    }

    pub(crate) async fn address(&self, last: u8) -> PublicAddress {
        self.observe().await.addresses.into_iter().find(|address| address.address == vip(last)).unwrap()
    }

    pub(crate) async fn nic(&self, gateway: &str) -> Nic {
        self.observe().await.nic_of(gateway).unwrap().clone()
    }

    /// Plans and carries out until there is nothing to do; returns the kinds of what was done. What fails is done again.
    pub(crate) async fn converge(&self) -> Vec<ActionKind> {
        let mut done = Vec::new();
        for _ in 0..60 {
            let Ok(observed) = self.provider.observe(&self.scope).await else { continue };
            let plan = plan(&self.desired, &observed);
            if plan.actions.is_empty() {
                return done;
            }
            for action in &plan.actions {
                if self.provider.execute(action, &[]).await.is_ok() {
                    done.push(ActionKind::of(action));
                }
            }
        }
        panic!("there is always something to do: {:#?}", plan(&self.desired, &self.observe().await));
    }

    /// Where the packets of the VIPs of the pool go: the gateway.
    pub(crate) fn homes(&self) -> BTreeMap<IpAddr, String> {
        let gateway = |eni: &String| self.enis.iter().find(|(_, it)| *it == eni).map(|(name, _)| name.clone());
        let routes = self.fake.with(|cloud| cloud.routes());
        let routes = routes.into_iter().filter(|(public, _)| self.desired.vips.contains_key(public));
        routes.filter_map(|(public, (eni, _))| Some((public, gateway(&eni)?))).collect()
    }

    /// Asserts that each VIP is at the gateway that owns it, at a private address that isn't the primary one.
    pub(crate) fn assert_home(&self) {
        let wanted = self.desired.vips.iter().filter_map(|(vip, at)| Some((*vip, at.gateway.clone()?)));
        assert_eq!(self.homes(), wanted.collect());
    }
}

/// The actions of requests, without those of the metadata server.
pub(crate) fn actions(log: &[RecordedRequest]) -> Vec<String> {
    log.iter().map(action).filter(|action| !action.is_empty()).collect()
}

pub(crate) fn action(request: &RecordedRequest) -> String {
    request.form().into_iter().find(|(name, _)| name == "Action").map(|(_, value)| value).unwrap_or_default()
}

/// A parameter of a request.
pub(crate) fn parameter(request: &RecordedRequest, name: &str) -> Option<String> {
    request.form().into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}
