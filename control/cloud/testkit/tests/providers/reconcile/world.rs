//! A world: a fake cloud, two policy servers, Services, gateways, and what happens to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use vipgate_cloud::plan::{Desired, DesiredVip, GatewayState};
use vipgate_cloud::reconciler::Inputs;
use vipgate_cloud::{AddressId, Allocation, Claim};
use vipgate_cloud_testkit::FakeServer;

use crate::reconcile::clock::pass;
use crate::reconcile::cloud::{Cloud, GATEWAYS, OURS, Snapshot};
use crate::reconcile::log::Log;
use crate::reconcile::random::Random;
use crate::reconcile::reached::Reached;
use crate::reconcile::server::{Common, Server};
use crate::reconcile::watched::Watched;

/// Events of a world.
const EVENTS: usize = 45;
/// Pause between two events at most, ms.
const MAX_PAUSE: usize = 6000;

/// A Service with a VIP: its owner, and the gateways in the order of placement.
type Service = (String, Vec<String>);

pub(crate) struct World<C> {
    pub(crate) random: Random,
    pub(crate) fake: FakeServer<Watched<C>>,
    pub(crate) servers: Vec<Server>,
    pub(crate) services: BTreeMap<IpAddr, Service>,
    /// The gateways of which the view says that they are dead.
    pub(crate) dead: BTreeSet<String>,
    pub(crate) allocations: Vec<Allocation>,
    pub(crate) common: Common,
    started: usize,
}

impl<C: Cloud> World<C> {
    pub(crate) async fn new(number: u64, reached: &Reached) -> Self {
        let mut random = Random(number);
        let common = Common {
            log: Log::new(),
            reached: reached.clone(),
            activity: Arc::default(),
            nics: Arc::default(),
            failed: Arc::default(),
        };
        let cloud = C::new(&mut random);
        let watched = Watched::new(cloud, Random(random.next()), &common);
        let fake = FakeServer::start(watched).await.expect("a port");
        let (services, dead, servers) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        let mut world = Self { random, fake, servers, services, dead, allocations: Vec::new(), common, started: 0 };
        world.start_server();
        world.start_server();
        world.servers[0].lead(true);
        for _ in 0..3 {
            world.add_service();
        }
        world.publish();
        world
    }

    pub(crate) fn note(&self, text: &str) {
        self.common.log.note(&format!("EVENT  {text}"));
    }

    pub(crate) fn count(&self, class: &str) {
        self.common.reached.count(class);
    }

    pub(crate) fn start_server(&mut self) {
        self.started += 1;
        let (url, name, common) = (self.fake.url(), format!("server {}", self.started), &self.common);
        let server = self.fake.with(|watched| Server::start(&name, &watched.cloud, &url, common));
        self.servers.push(server);
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.fake.with(|watched| watched.last.clone())
    }

    /// A VIP of a Service, or an address that could be one.
    pub(crate) fn address(&mut self) -> IpAddr {
        let mut all = self.fake.with(|watched| watched.cloud.pool());
        all.extend(self.snapshot().addresses.into_iter().filter(|(_, it)| it.is_allocated).map(|(ip, _)| ip));
        self.random.of(&all).expect("a pool")
    }

    pub(crate) fn gateway(&mut self) -> String {
        GATEWAYS[self.random.below(3)].to_owned()
    }

    pub(crate) fn add_service(&mut self) {
        let address = self.address();
        let mut order: Vec<String> = GATEWAYS.iter().map(|it| (*it).to_owned()).collect();
        order.rotate_left(self.random.below(3));
        if self.random.chance(30) {
            order.swap(1, 2);
        }
        order.truncate(if self.random.chance(15) { 1 } else { 3 });
        let owner = format!("default/web-{}", self.random.below(3));
        self.note(&format!("service {owner} with {address} at {order:?}"));
        self.services.insert(address, (owner, order));
    }

    pub(crate) fn desired(&self) -> Desired {
        let vip = |(address, (owner, order)): (&IpAddr, &Service)| {
            let mut standbys = order.clone();
            let at = standbys.iter().position(|it| !self.dead.contains(it));
            let gateway = at.map(|at| standbys.remove(at));
            standbys.sort_by_key(|it| self.dead.contains(it));
            (*address, DesiredVip { owner: owner.clone(), gateway, standbys })
        };
        let state = |name: &&str| {
            let state = if self.dead.contains(*name) { GatewayState::Dead } else { GatewayState::Active };
            ((*name).to_owned(), state)
        };
        let is_releasable = |ip: &IpAddr| !self.services.contains_key(ip);
        let addresses = self.snapshot().addresses;
        let ids = addresses.iter().filter(|(ip, it)| it.is_allocated && is_releasable(ip));
        Desired {
            cluster: OURS.to_owned(),
            vips: self.services.iter().map(vip).collect(),
            gateways: GATEWAYS.iter().map(state).collect(),
            allocations: self.allocations.clone(),
            releasable: ids.map(|(_, it)| self.id_of(&it.id)).collect(),
            ..Desired::default()
        }
    }

    /// What a provider calls an address: the end of the id is its name.
    fn id_of(&self, name: &str) -> AddressId {
        let observed = self.servers.iter().filter_map(|it| it.states.borrow().observation.clone());
        let found = observed.flat_map(|it| it.addresses.clone()).find(|it| it.id.0.ends_with(name));
        found.map_or_else(|| AddressId(name.to_owned()), |it| it.id)
    }

    pub(crate) fn inputs(&self) -> Inputs {
        let (scope, candidates) = self.fake.with(|watched| (watched.cloud.scope(), watched.cloud.candidates()));
        Inputs { scope, desired: Some(Arc::new(self.desired())), candidates: candidates.into(), leads: false }
    }

    /// Gives all servers the current inputs.
    pub(crate) fn publish(&mut self) {
        self.use_allocated();
        let inputs = self.inputs();
        for server in &self.servers {
            server.publish(inputs.clone());
        }
        self.mark_dead();
    }

    /// An address that was allocated is that of a Service.
    fn use_allocated(&mut self) {
        for (ip, address) in self.snapshot().addresses {
            let is_wanted = |it: &Allocation| address.is_allocated && address.claim.as_ref() == Some(&it.claim);
            if let Some(at) = self.allocations.iter().position(is_wanted) {
                let allocation = self.allocations.remove(at);
                self.note(&format!("{ip} was allocated"));
                self.services.insert(ip, (allocation.claim.owner, GATEWAYS.map(str::to_owned).to_vec()));
            }
        }
    }

    /// Notes which gateways are dead in some view.
    fn mark_dead(&self) {
        let dead = self.servers.iter().flat_map(Server::dead).chain(self.dead.iter().cloned());
        let dead: Vec<String> = dead.collect();
        self.fake.with(|watched| {
            let now = tokio::time::Instant::now();
            watched.dead.extend(dead.into_iter().map(|it| (it, now)));
        });
    }

    /// Lets time pass, and fails if something happened that must not.
    pub(crate) async fn pass(&mut self, time: Duration) {
        self.mark_dead();
        pass(time, &self.common.activity).await;
        self.mark_dead();
        for server in &self.servers {
            let state = server.states.borrow().clone();
            state.plan.problems.values().for_each(|it| self.count(it.reason()));
            self.common.reached.add("repaired", state.repaired);
        }
        let violations = self.common.log.violations();
        assert!(violations.is_empty(), "{violations:#?}");
    }

    /// What happens, until it is quiet.
    pub(crate) async fn run(&mut self) {
        for _ in 0..EVENTS {
            self.event();
            self.revive().await;
            self.publish();
            let pause = Duration::from_millis(self.random.below(MAX_PAUSE) as u64);
            self.pass(pause).await;
        }
    }

    /// A claim of this cluster that nobody of this world has.
    pub(crate) fn allocation(&mut self) -> Allocation {
        let token = format!("token-{}", self.random.below(2));
        let tags = [("pool".to_owned(), "edge".to_owned())].into();
        let claim = Claim { cluster: OURS.to_owned(), owner: format!("default/{token}") };
        Allocation { tags, claim, is_ipv6: false, zone: None, token }
    }
}
