//! Public addresses of cloud providers: each pool with a provider has a reconciler, which every policy server runs. All observe;
//! the leader changes.
//!
//! ```text
//!   objects in force ----> pools, gateways --------+
//!   publication, view ---> VIPs, their gateways ---+--> inputs --> reconciler of each pool --> provider
//!   leadership ------------------------------------+                     |
//!   compiler <--------------- inventory <---------------- observations --+
//! ```

mod cache;
mod demand;
mod desired;
mod inventory;
mod provider;
mod reply;
mod report;

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::future::select_all;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::Instant;
use vipgate_cloud::reconciler::{Inputs, PoolState};
use vipgate_cloud::{CallMeter, GatewayNic, Scope};
use vipgate_common::{Task, Tasks, spawn_blocking};
use vipgate_membership::MembershipView;
use vipgate_policy::Shortage;
use vipgate_policy::manifest::CloudPool;

use self::demand::DemandTracker;
pub(super) use self::report::{AllocationFacts, PoolFacts, PoolReport};
use super::leader::{Leadership, leads_for};
use crate::config::CloudConfig;
use crate::metric::Family;
use crate::source::store::{CloudObjects, ProviderPool};
use crate::xds::proto::CloudReply;
use crate::xds::publication::Publication;

/// Why pools with a provider aren't observed.
const NOT_CONFIGURED: &str = "not observed: `cloud.cluster` isn't configured at the policy server";

/// What providers have, by pool.
pub(super) type Inventory = BTreeMap<String, Arc<CloudPool>>;

/// State of the server's part in clouds.
#[derive(Debug)]
pub struct CloudState {
    config: Option<CloudConfig>,
    objects: watch::Sender<Arc<CloudObjects>>,
    /// What Services lack of pools.
    service_shortages: watch::Sender<Arc<[Shortage]>>,
    inventory: watch::Sender<Arc<Inventory>>,
    /// State of the pools, by name.
    pools: ArcSwap<BTreeMap<String, PoolReport>>,
}

impl CloudState {
    pub(super) fn new(config: Option<CloudConfig>) -> Self {
        Self {
            config,
            objects: watch::Sender::default(),
            service_shortages: watch::Sender::default(),
            inventory: watch::Sender::default(),
            pools: ArcSwap::default(),
        }
    }

    /// Sets the objects in force.
    pub(super) fn set_objects(&self, objects: &CloudObjects) {
        self.objects.send_if_modified(|current| {
            let is_new = **current != *objects;
            if is_new {
                *current = Arc::new(objects.clone());
            }
            is_new
        });
    }

    /// Sets what Services lack, as address management has found.
    pub(super) fn set_service_shortages(&self, shortages: &[Shortage]) {
        send_if_new(&self.service_shortages, shortages.into());
    }

    /// Whether a pool's provider hasn't been observed yet, though it is to be.
    pub(super) fn awaits_observation(&self) -> bool {
        self.config.is_some() && self.objects.borrow().pools.values().any(|pool| !pool.is_known)
    }

    /// What providers have, for the compiler.
    pub(super) fn inventory(&self) -> watch::Receiver<Arc<Inventory>> {
        self.inventory.subscribe()
    }

    /// What was observed before this server started, of pools that it hasn't observed yet.
    pub(super) async fn cached(&self) -> Inventory {
        let Some(path) = self.config.as_ref().and_then(|config| config.cache.clone()) else { return Inventory::new() };
        let mut cached = spawn_blocking(move || cache::read(&path)).await;
        cached.retain(|name, _| !self.inventory.borrow().contains_key(name));
        cached
    }

    /// State of the pools, by name.
    pub(super) fn pools(&self) -> Arc<BTreeMap<String, PoolReport>> {
        self.pools.load_full()
    }

    /// What the status of pools with a provider says of it.
    pub(super) fn facts(&self) -> Vec<PoolFacts> {
        if self.config.is_none() {
            let fault = || Some(("NotConfigured".to_owned(), NOT_CONFIGURED.to_owned()));
            let objects = self.objects.borrow();
            let pools = objects.pools.keys();
            return pools
                .map(|name| PoolFacts { name: name.clone(), fault: fault(), ..PoolFacts::default() })
                .collect();
        }
        self.pools().iter().map(|(name, report)| PoolFacts::of(name, report)).collect()
    }

    /// Its metrics.
    pub(super) fn families(&self) -> Vec<Family> {
        report::families(&self.pools())
    }

    /// The reply to `vipgate cloud`; `leads`: whether this server leads.
    pub(super) fn reply(&self, leads: bool) -> CloudReply {
        let (cluster, dry_run) =
            self.config.as_ref().map_or((String::new(), false), |it| (it.cluster.clone(), it.dry_run));
        let pools = self.pools();
        let observed = pools.iter().map(|(name, report)| reply::pool(name, report));
        // Without a configuration nothing is observed.
        let objects = self.objects.borrow();
        let unobserved = objects.pools.iter().filter(|(name, _)| !pools.contains_key(*name));
        let mut pools: Vec<_> = observed.chain(unobserved.map(|(name, pool)| reply::unobserved(name, pool))).collect();
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        CloudReply { leads: leads && !dry_run && !cluster.is_empty(), cluster, dry_run, pools }
    }
}

/// What the desired state follows from.
pub(super) struct Watches {
    pub(super) published: watch::Receiver<Option<Arc<Publication>>>,
    pub(super) view: watch::Receiver<Arc<MembershipView>>,
    /// `None`: there is no election, and this server leads.
    pub(super) leadership: Option<watch::Receiver<Leadership>>,
}

/// Runs the reconcilers of all pools until the stop signal of `tasks`.
pub(super) async fn run(state: Arc<CloudState>, watches: Watches, tasks: Tasks) {
    let Some(config) = state.config.clone() else { return };
    if let Some(path) = config.cache.clone() {
        tasks.spawn("cloud cache", cache::run(path, state.inventory(), tasks.clone()));
    }
    let (objects, shortages) = (state.objects.subscribe(), state.service_shortages.subscribe());
    let mut manager = Manager { config, state, watches, objects, shortages, pools: BTreeMap::new() };
    while !tasks.is_stopping() {
        manager.update();
        tokio::select! {
            () = manager.changed() => {}
            () = tasks.stopped() => {}
        }
    }
}

/// The reconciler of a pool.
struct Pool {
    spec: ProviderPool,
    inputs: watch::Sender<Inputs>,
    states: watch::Receiver<Arc<PoolState>>,
    meter: Arc<CallMeter>,
    demand: DemandTracker,
    _task: Task,
}

struct Manager {
    config: CloudConfig,
    state: Arc<CloudState>,
    watches: Watches,
    objects: watch::Receiver<Arc<CloudObjects>>,
    shortages: watch::Receiver<Arc<[Shortage]>>,
    pools: BTreeMap<String, Result<Pool, Box<FailedPool>>>,
}

/// A pool whose provider can't be used.
struct FailedPool {
    spec: ProviderPool,
    error: String,
}

/// How often the lead is looked at: one that isn't renewed ends by itself.
const LEAD_INTERVAL: Duration = Duration::from_millis(500);

impl Manager {
    /// Waits until something differs.
    async fn changed(&mut self) {
        let states = self.pools.values_mut().filter_map(|pool| pool.as_mut().ok());
        let mut states: Vec<_> = states.map(|pool| Box::pin(pool.states.changed())).collect();
        let of_pools = async {
            if states.is_empty() {
                pending::<()>().await;
            }
            drop(select_all(&mut states).await);
        };
        let Watches { published, view, leadership } = &mut self.watches;
        let lead = async {
            match leadership {
                Some(leadership) => drop(tokio::time::timeout(LEAD_INTERVAL, leadership.changed()).await),
                None => pending().await,
            }
        };
        tokio::select! {
            () = of_pools => {}
            () = lead => {}
            Ok(()) = self.objects.changed() => {}
            Ok(()) = self.shortages.changed() => {}
            Ok(()) = published.changed() => {}
            Ok(()) = view.changed() => {}
        }
    }

    fn leads(&self) -> bool {
        let leadership = self.watches.leadership.as_ref();
        leadership.is_none_or(|leadership| leads_for(*leadership.borrow(), Duration::ZERO))
    }

    /// Brings the inputs of all reconcilers, and what follows from their states, up to date.
    fn update(&mut self) {
        let objects = self.objects.borrow_and_update().clone();
        let shortages = [&objects.shortages, &**self.shortages.borrow_and_update()].concat();
        self.pools.retain(|name, pool| {
            let spec = objects.pools.get(name);
            let current = pool.as_ref().map_or_else(|failed| &failed.spec, |pool| &pool.spec);
            spec.is_some_and(|spec| (&spec.spec, &spec.prefixes) == (&current.spec, &current.prefixes))
        });
        for (name, spec) in &objects.pools {
            if !self.pools.contains_key(name) {
                let pool = self.start(spec);
                self.pools.insert(name.clone(), pool);
            }
        }
        let (published, view) =
            (self.watches.published.borrow_and_update().clone(), self.watches.view.borrow_and_update().clone());
        let leads = self.leads() && !self.config.dry_run;
        let (mut inventory, mut reports) = (Inventory::new(), BTreeMap::new());
        for (name, pool) in &mut self.pools {
            let pool = match pool {
                Ok(pool) => pool,
                Err(failed) => {
                    reports.insert(name.clone(), PoolReport::failed(&failed.spec.spec, &failed.error));
                    continue;
                }
            };
            let state = pool.states.borrow_and_update().clone();
            let observation = state.observation.clone();
            let mut beyond_limit = 0;
            let desired = observation.as_ref().zip(published.as_ref()).map(|(observation, published)| {
                let mut desired = desired::desired(&self.config.cluster, &published.placement, &view, observation);
                let (spec, now) = (&pool.spec.spec, Instant::now());
                beyond_limit = pool.demand.update(name.as_str(), spec, &shortages, &mut desired, observation, now);
                Arc::new(desired)
            });
            if let Some(observation) = &observation {
                let cloud = inventory::cloud_pool(&self.config.cluster, observation);
                inventory.insert(name.clone(), Arc::new(cloud));
            }
            let of_state = PoolReport::of(&pool.spec.spec, state, &pool.meter);
            let report = PoolReport { desired: desired.clone(), beyond_limit, ..of_state };
            reports.insert(name.clone(), report);
            let candidates: Arc<[IpNet]> = pool.spec.spec.private.prefixes().iter().map(|cidr| cidr.0).collect();
            let inputs = Inputs { scope: scope(&pool.spec, &objects), desired, candidates, leads };
            send_if_new(&pool.inputs, inputs);
        }
        self.state.pools.store(Arc::new(reports));
        send_if_new(&self.state.inventory, Arc::new(inventory));
    }

    fn start(&self, spec: &ProviderPool) -> Result<Pool, Box<FailedPool>> {
        let meter = Arc::new(CallMeter::default());
        let (inputs, of_reconciler) =
            watch::channel(Inputs { scope: scope(spec, &self.objects.borrow()), ..Inputs::default() });
        let (states, of_manager) = watch::channel(Arc::default());
        let leadership = self.watches.leadership.clone();
        let leads = move || leadership.as_ref().is_none_or(|it| leads_for(*it.borrow(), Duration::ZERO));
        let task = provider::spawn(&spec.spec, &self.config, meter.clone(), of_reconciler, states, leads);
        let task = task.map_err(|error| Box::new(FailedPool { spec: spec.clone(), error }))?;
        let demand = DemandTracker::default();
        Ok(Pool { spec: spec.clone(), inputs, states: of_manager, meter, demand, _task: task })
    }
}

/// Sends a value, unless it equals the current one.
fn send_if_new<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|current| {
        let is_new = *current != value;
        *current = value;
        is_new
    });
}

/// What the provider of a pool is asked for.
fn scope(pool: &ProviderPool, objects: &CloudObjects) -> Scope {
    let gateways = objects.gateways.iter().filter_map(|gateway| {
        let (gateway, instance, nic) = (gateway.name.clone(), gateway.instance.clone()?, gateway.nic.clone());
        Some(GatewayNic { gateway, instance, nic })
    });
    Scope {
        tags: pool.spec.tags().cloned().unwrap_or_default(),
        prefixes: pool.prefixes.clone(),
        gateways: gateways.collect(),
    }
}
