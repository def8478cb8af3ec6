//! Address management: the leader of the policy servers records in the status of pools who has their addresses, and writes
//! the addresses of Services to their status.
//!
//! ```text
//!   objects in force -> plan -> is there a change? -> all Services and pools, read from the API -> plan
//!                                                         -> records of pools -> addresses of Services
//! ```
//! The first plan is of what the watches have delivered, and may be late; the second one is of the API's own state, so
//! that it has every write of this server and of the leader before. A write fails if its object has changed meanwhile.
//! No Service gets an address that isn't recorded.

mod api;
mod records;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_common::{Backoff, jittered, spawn_blocking};
use vipgate_policy::address_record::AddressRecord;
use vipgate_policy::ipam::{AllocationPlan, Decision, PoolUsage, Reason, Snapshot};
use vipgate_policy::manifest::ServiceRequest;

use self::api::{AddressApi, ListedPool, ListedService, keeps};
use self::records::RecordChange;
use self::report::{Report, Reporter};
use super::cloud::CloudState;
use super::kubernetes::writer::{KubeWriter, Purpose, Write, WriteError, in_turns};
use super::leader::leads_for;
use super::object_state::ObjectState;
use crate::config::KubernetesSource;
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::source::store::CATCH_UP_TIME;

/// Pause between rounds, such as after a conflict.
const ROUND_INTERVAL: Duration = Duration::from_millis(250);
/// Why the record of a pool isn't there although it was written.
const NOT_KEPT: &str = "the cluster doesn't keep `status.addresses`: apply this version's CustomResourceDefinitions";
/// Writes that are due later than that have failed several times.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// How often quarantined addresses are counted.
const COUNT_INTERVAL: Duration = Duration::from_mins(1);

/// State of address management, shared with the compiler and metrics.
#[derive(Debug, Default)]
pub struct IpamState {
    /// The objects in force.
    snapshot: watch::Sender<Option<Arc<Snapshot>>>,
    report: ArcSwap<Report>,
}

impl IpamState {
    /// Sets the objects in force. Nothing follows from the same ones.
    pub(super) fn set_snapshot(&self, snapshot: Arc<Snapshot>) {
        self.snapshot.send_if_modified(|current| {
            let is_new = current.as_ref().is_none_or(|current| !Arc::ptr_eq(current, &snapshot));
            *current = Some(snapshot);
            is_new
        });
    }

    /// Usage of the pools in the last plan; none while this server doesn't lead.
    pub(super) fn pools(&self) -> Vec<PoolUsage> {
        self.report.load().usage.clone()
    }

    /// Its metrics. Pools and Services are the leader's to report.
    pub(super) fn families(&self) -> Vec<Family> {
        let report = self.report.load();
        let usage = report.usage.iter().flat_map(|pool| {
            let states = [
                ("service", pool.services),
                ("policy", pool.policies),
                ("quarantined", pool.quarantined),
                ("free", pool.free),
            ];
            states.map(|(state, count)| (vec![("pool", pool.name.clone()), ("state", state.to_owned())], count))
        });
        let refused = |reason: Reason| (reason.as_str(), report.refused.get(&reason).copied().unwrap_or_default());
        vec![defined::IPAM_ADDRESSES.family(usage.collect()), defined::IPAM_REFUSED.by_label(Reason::ALL.map(refused))]
    }
}

/// Gives addresses while this server leads, until it stops.
pub(super) async fn run(
    source: KubernetesSource,
    state: Arc<IpamState>,
    objects: Arc<ObjectState>,
    cloud: Arc<CloudState>,
    writer: Arc<KubeWriter>,
) {
    let allocator = Allocator {
        api: AddressApi::new(source),
        writer,
        state,
        cloud,
        uncertain: BTreeMap::new(),
        reporter: Reporter::new(objects),
        leads_since: None,
    };
    allocator.run().await;
}

/// What is left to do after a round, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rest {
    /// The same again, later: nothing could be read, or writes fail again and again.
    Failed,
    /// Another round after this time: quarantines end, or there is more to write.
    Later(Duration),
    Nothing,
}

impl Rest {
    /// What is left of writes.
    fn of(retry_after: Option<Duration>) -> Self {
        match retry_after {
            None => Self::Nothing,
            Some(delay) if delay > MAX_RETRY_DELAY => Self::Failed,
            Some(delay) => Self::Later(delay.max(ROUND_INTERVAL)),
        }
    }

    /// What is left once a plan is carried out.
    fn after(plan: &AllocationPlan, now: Timestamp) -> Self {
        let until = |end: Timestamp| Duration::try_from(end.duration_since(now)).unwrap_or_default();
        let has_quarantined = plan.usage.iter().any(|pool| pool.quarantined > 0);
        let delays = plan.waits_until.map(until).into_iter().chain(has_quarantined.then_some(COUNT_INTERVAL));
        delays.min().map_or(Self::Nothing, |delay| Self::Later(delay.max(ROUND_INTERVAL)))
    }
}

struct Allocator {
    api: AddressApi,
    writer: Arc<KubeWriter>,
    state: Arc<IpamState>,
    cloud: Arc<CloudState>,
    /// Writes without a response, by Service: the version that they were for, and the addresses.
    uncertain: BTreeMap<String, (String, Vec<IpAddr>)>,
    reporter: Reporter,
    /// Since when this server leads.
    leads_since: Option<Instant>,
}

impl Allocator {
    async fn run(mut self) {
        let (mut leadership, tasks) = (self.writer.leadership.clone(), self.writer.tasks.clone());
        let mut snapshots = self.state.snapshot.subscribe();
        let mut backoff = Backoff::default();
        while !tasks.is_stopping() {
            let leader = leads_for(*leadership.borrow_and_update(), Duration::ZERO);
            let snapshot = snapshots.borrow_and_update().clone().filter(|_| leader);
            self.leads_since = leader.then(|| self.leads_since.unwrap_or_else(Instant::now));
            let rest = if let Some(snapshot) = snapshot {
                self.round(&snapshot).await
            } else {
                self.reporter.clear();
                self.state.report.store(Arc::default());
                self.cloud.set_service_shortages(&[]);
                Rest::Nothing
            };
            let delay = match rest {
                Rest::Nothing => None,
                Rest::Later(delay) => Some(delay),
                Rest::Failed => Some(jittered(backoff.next_delay(), getrandom::u32())),
            };
            if !matches!(rest, Rest::Failed) {
                backoff.reset();
            }
            // Renewals change nothing; without one, the lead ends by itself.
            let other_leader = async {
                let _ = leadership.wait_for(|leadership| leads_for(*leadership, Duration::ZERO) != leader).await;
            };
            let is_failed = matches!(rest, Rest::Failed);
            if rest != Rest::Nothing {
                // However fast objects change: a round may read the whole API.
                sleep(ROUND_INTERVAL).await;
            }
            tokio::select! {
                _ = snapshots.changed(), if !is_failed => {}
                () = other_leader => {}
                () = sleep(delay.unwrap_or_default()), if delay.is_some() => {}
                () = tasks.stopped() => {}
            }
        }
    }

    async fn round(&mut self, snapshot: &Arc<Snapshot>) -> Rest {
        let snapshot = &self.as_known(snapshot);
        let (services, plan) = plan_for(snapshot, |snapshot| (snapshot.services(), snapshot.record())).await;
        let is_done = plan.changes().is_empty() && records::are_observed(&plan.records, snapshot);
        if is_done && self.uncertain.is_empty() {
            self.report(&services, &plan);
            return self.after(&plan);
        }
        let mut listed = match self.api.list().await {
            Ok(listed) => listed,
            Err(error) => {
                self.writer.report(Purpose::Addresses, "all Services and AddressPools", &error);
                return Rest::Failed;
            }
        };
        // Others aren't in force: their addresses are nobody's.
        listed.pools.retain(|name, _| plan.records.contains_key(name));
        let (services, record) = (self.with_uncertain(&listed.services), records::merged(&listed.pools));
        let snapshot = Arc::new(records::with_unobserved(snapshot, &record));
        let (services, plan) = plan_for(&snapshot, move |_| (services, record)).await;
        self.report(&services, &plan);
        let (unwritten, rest) = self.write_records(&listed.pools, &plan).await;
        let mut changes = plan.changes();
        changes.retain(|it| !records::waits_for(&services[it.service], &it.addresses, &unwritten));
        // What is given up comes first.
        let place = |it: &&Decision| (it.addresses.is_empty(), services[it.service].namespace.clone());
        let rest = rest.min(self.write_services(&listed.services, &in_turns(changes, place)).await);
        if rest == Rest::Nothing {
            self.writer.succeeded(Purpose::Addresses);
        }
        rest.min(self.after(&plan))
    }

    /// The snapshot of a leader: a new one may not have the objects yet that the record is of, so it frees none at first.
    fn as_known(&self, snapshot: &Arc<Snapshot>) -> Arc<Snapshot> {
        if self.has_caught_up() {
            snapshot.clone()
        } else {
            Arc::new(Snapshot { is_complete: false, ..(**snapshot).clone() })
        }
    }

    fn has_caught_up(&self) -> bool {
        self.leads_since.is_some_and(|since| since.elapsed() >= CATCH_UP_TIME)
    }

    fn after(&self, plan: &AllocationPlan) -> Rest {
        let rest = Rest::after(plan, Timestamp::now());
        if self.has_caught_up() { rest } else { rest.min(Rest::Later(CATCH_UP_TIME)) }
    }

    /// Writes the records that the API doesn't have; returns those that it may still not have.
    async fn write_records<'a>(
        &mut self,
        pools: &'a BTreeMap<String, ListedPool>,
        plan: &'a AllocationPlan,
    ) -> (Vec<RecordChange<'a>>, Rest) {
        let mut changes = records::changes(pools, plan);
        let mut writes = Vec::new();
        for (n, change) in changes.iter().enumerate() {
            // The watch will say that another pool is gone.
            writes.extend(change.listed.map(|pool| (n, pool.write(change.pool, change.record))));
        }
        let applied = self.writer.apply_all(writes).await;
        let (mut rest, mut recorded) = (Rest::of(applied.retry_after), BTreeSet::new());
        for (n, written) in applied.outcomes {
            let RecordChange { pool, record, .. } = changes[n];
            match written {
                Ok(written) if keeps(&written, record) => {
                    recorded.insert(pool);
                }
                Ok(_) => {
                    self.writer.report(Purpose::Addresses, &format!("AddressPool {pool}"), NOT_KEPT);
                    rest = Rest::Failed;
                }
                Err(_) => {}
            }
        }
        changes.retain(|it| !recorded.contains(it.pool));
        (changes, rest)
    }

    /// Writes the addresses of Services.
    async fn write_services(&mut self, services: &[ListedService], changes: &[&Decision]) -> Rest {
        let writes: Vec<Write> = changes.iter().map(|it| services[it.service].write(&it.addresses)).collect();
        let applied = self.writer.apply_all(writes.into_iter().enumerate()).await;
        for (n, written) in applied.outcomes {
            let Decision { service, addresses, .. } = changes[n];
            let service = &services[*service];
            let path = service.request.path();
            match written {
                Ok(_) => {
                    self.uncertain.remove(&path);
                    self.reporter.report_write(&path, &service.request.current, addresses);
                }
                Err(WriteError::Unknown(_)) => {
                    self.uncertain.insert(path, (service.version().to_owned(), addresses.clone()));
                }
                Err(_) => {}
            }
        }
        Rest::of(applied.retry_after)
    }

    fn report(&mut self, services: &[ServiceRequest], plan: &AllocationPlan) {
        self.state.report.store(Arc::new(self.reporter.report(services, plan)));
        self.cloud.set_service_shortages(&plan.shortages);
    }

    /// The listed Services. One that is as it was at a write without a response may still get that write.
    fn with_uncertain(&mut self, listed: &[ListedService]) -> Vec<ServiceRequest> {
        let mut left = BTreeMap::new();
        let mut services = Vec::new();
        for service in listed {
            let mut request = service.request.clone();
            let path = request.path();
            let uncertain = self.uncertain.remove(&path).filter(|(version, _)| version == service.version());
            if let Some((version, addresses)) = uncertain {
                request.assumed.clone_from(&addresses);
                left.insert(path, (version, addresses));
            }
            services.push(request);
        }
        self.uncertain = left;
        services
    }
}

/// Plans on a blocking thread: there may be ten thousand Services.
async fn plan_for(
    snapshot: &Arc<Snapshot>,
    inputs: impl FnOnce(&Snapshot) -> (Vec<ServiceRequest>, AddressRecord) + Send + 'static,
) -> (Vec<ServiceRequest>, AllocationPlan) {
    let snapshot = snapshot.clone();
    let work = spawn_blocking(move || {
        let (services, record) = inputs(&snapshot);
        let plan = snapshot.plan(&services, record, Timestamp::now());
        (services, plan)
    });
    work.await
}

#[cfg(test)]
mod tests;
