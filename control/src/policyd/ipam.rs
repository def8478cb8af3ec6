//! Address management: the leader of the policy servers writes the addresses of Services to their status.
//!
//! ```text
//!   objects in force -> plan -> is there a change? -> all Services, read from the API -> plan -> writes
//! ```
//! The first plan is of what the watches have delivered, and may be late; the second one is of the API's own state, so
//! that it has every write of this server and of the leader before. A write fails if its Service has changed meanwhile.

mod api;
mod report;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_policy::ipam::{AllocationPlan, PoolUsage, Reason, Snapshot};
use vipgate_policy::manifest::ServiceRequest;

use self::api::{ListedService, ServiceApi, WRITE_TIMEOUT, WriteError};
use self::report::{Report, Reporter};
use super::cloud::CloudState;
use super::leader::{Leadership, leads_for};
use super::object_state::ObjectState;
use super::rate_limit::TokenBucket;
use super::stats::Counter;
use crate::config::KubernetesSource;
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::source::backoff::Backoff;
use crate::source::ingest::join_result;

/// Writes after which all Services are read again.
const MAX_WRITES: usize = 100;
/// Pause between rounds, such as after a conflict.
const ROUND_INTERVAL: Duration = Duration::from_millis(250);

/// State of address management, shared with the compiler and metrics.
#[derive(Debug, Default)]
pub struct IpamState {
    /// The objects in force.
    snapshot: watch::Sender<Option<Arc<Snapshot>>>,
    report: ArcSwap<Report>,
    written: Counter,
    conflicts: Counter,
    failures: Counter,
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
            [("service", pool.services), ("policy", pool.policies), ("free", pool.free)]
                .map(|(state, count)| (vec![("pool", pool.name.clone()), ("state", state.to_owned())], count))
        });
        let refused = |reason: Reason| (reason.as_str(), report.refused.get(&reason).copied().unwrap_or_default());
        let results = [("written", &self.written), ("conflict", &self.conflicts), ("failed", &self.failures)];
        vec![
            defined::IPAM_ADDRESSES.family(usage.collect()),
            defined::IPAM_REFUSED.by_label(Reason::ALL.map(refused)),
            defined::IPAM_WRITES.by_label(results.map(|(result, count)| (result, count.get()))),
        ]
    }
}

/// Gives addresses while this server leads, until `stop` is set.
pub(super) async fn run(
    source: KubernetesSource,
    (state, objects, cloud): (Arc<IpamState>, Arc<ObjectState>, Arc<CloudState>),
    leadership: watch::Receiver<Leadership>,
    stop: watch::Receiver<bool>,
) {
    let allocator = Allocator {
        api: ServiceApi::new(source),
        state,
        cloud,
        leadership,
        bucket: TokenBucket::default(),
        started: Instant::now(),
        uncertain: BTreeMap::new(),
        reporter: Reporter::new(objects),
        reported: None,
    };
    allocator.run(stop).await;
}

/// What is left to do after a round.
enum Rest {
    Nothing,
    /// Another round.
    More,
    /// The same again, later.
    Failed,
}

struct Allocator {
    api: ServiceApi,
    state: Arc<IpamState>,
    cloud: Arc<CloudState>,
    leadership: watch::Receiver<Leadership>,
    bucket: TokenBucket,
    started: Instant,
    /// Writes without a response, by Service: the version that they were for, and the addresses.
    uncertain: BTreeMap<String, (String, Vec<IpAddr>)>,
    reporter: Reporter,
    /// The error that was logged last.
    reported: Option<String>,
}

impl Allocator {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let (mut snapshots, mut leadership) = (self.state.snapshot.subscribe(), self.leadership.clone());
        let mut backoff = Backoff::new();
        while !*stop.borrow() {
            let leader = leads_for(*leadership.borrow_and_update(), Duration::ZERO);
            let snapshot = snapshots.borrow_and_update().clone().filter(|_| leader);
            let rest = if let Some(snapshot) = snapshot {
                self.round(&snapshot, &stop).await
            } else {
                self.reporter.clear();
                self.state.report.store(Arc::default());
                self.cloud.set_service_shortages(&[]);
                Rest::Nothing
            };
            let delay = match rest {
                Rest::Nothing => None,
                Rest::More => Some(ROUND_INTERVAL),
                Rest::Failed => Some(backoff.next_delay()),
            };
            if !matches!(rest, Rest::Failed) {
                backoff = Backoff::new();
            }
            // Renewals change nothing; without one, the lead ends by itself.
            let other_leader = async {
                let _ = leadership.wait_for(|leadership| leads_for(*leadership, Duration::ZERO) != leader).await;
            };
            let is_failed = matches!(rest, Rest::Failed);
            tokio::select! {
                _ = snapshots.changed(), if !is_failed => {}
                () = other_leader => {}
                () = sleep(delay.unwrap_or_default()), if delay.is_some() => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
    }

    async fn round(&mut self, snapshot: &Arc<Snapshot>, stop: &watch::Receiver<bool>) -> Rest {
        let (services, plan) = plan_for(snapshot, Snapshot::services).await;
        if plan.changes().is_empty() && self.uncertain.is_empty() {
            self.report(&services, &plan);
            return Rest::Nothing;
        }
        let listed = match self.api.list().await {
            Ok(listed) => listed,
            Err(error) => {
                self.report_error("all Services", &error);
                return Rest::Failed;
            }
        };
        let services = self.with_uncertain(&listed);
        let (services, plan) = plan_for(snapshot, move |_| services).await;
        self.report(&services, &plan);
        let changes = plan.changes();
        let mut rest = if changes.len() > MAX_WRITES { Rest::More } else { Rest::Nothing };
        for decision in changes.into_iter().take(MAX_WRITES) {
            sleep(self.bucket.take(self.started.elapsed())).await;
            // Another leader may read the Services when the Lease has ended: nothing may be under way then.
            if !leads_for(*self.leadership.borrow(), WRITE_TIMEOUT) || *stop.borrow() {
                return Rest::More;
            }
            match self.write(&listed[decision.service], &decision.addresses).await {
                Rest::Nothing => {}
                other => rest = other,
            }
        }
        if matches!(rest, Rest::Nothing) {
            self.reported = None;
        }
        rest
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

    async fn write(&mut self, service: &ListedService, addresses: &[IpAddr]) -> Rest {
        let path = service.request.path();
        match self.api.write(service, addresses).await {
            Ok(()) => {
                self.uncertain.remove(&path);
                self.state.written.increment();
                self.reporter.report_write(&path, &service.request.current, addresses);
                Rest::Nothing
            }
            Err(WriteError::Conflict) => {
                self.state.conflicts.increment();
                tracing::debug!(service = path, "the Service has changed meanwhile");
                Rest::More
            }
            Err(WriteError::Refused(error)) => {
                self.state.failures.increment();
                self.report_error(&path, &error);
                Rest::Failed
            }
            Err(WriteError::Unknown(error)) => {
                self.state.failures.increment();
                self.report_error(&path, &error);
                self.uncertain.insert(path, (service.version().to_owned(), addresses.to_vec()));
                Rest::Failed
            }
        }
    }

    fn report_error(&mut self, service: &str, error: &str) {
        if self.reported.as_deref() != Some(error) {
            tracing::warn!(
                event = "address_failed",
                service,
                error,
                "addresses of Services can't be read or written: check the API server and the account's rights (`patch` \
                 of services/status)"
            );
            self.reported = Some(error.to_owned());
        }
    }
}

/// Plans for Services on a blocking thread: there may be ten thousand.
async fn plan_for(
    snapshot: &Arc<Snapshot>,
    services: impl FnOnce(&Snapshot) -> Vec<ServiceRequest> + Send + 'static,
) -> (Vec<ServiceRequest>, AllocationPlan) {
    let snapshot = snapshot.clone();
    let work = tokio::task::spawn_blocking(move || {
        let services = services(&snapshot);
        let plan = snapshot.plan(&services);
        (services, plan)
    });
    join_result(work.await)
}
