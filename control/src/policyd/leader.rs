//! Leader election of policy servers by a Lease (coordination.k8s.io/v1): only the leader writes to the Kubernetes API,
//! and decides membership.
//!
//! Each write of the Lease is an update with the resource version that it follows from, so that of two candidates one
//! fails. When the leader dies, another one leads within 5 s; when it stops, at once.

mod election;

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use vipgate_common::{Backoff, LoggedErrors, Tasks, jittered};

use self::election::{Election, LEASE_DURATION, LeaseState, RENEW_INTERVAL, Step};
use crate::config::KubernetesSource;
use crate::source::kubernetes::{RequestError, client, request};

/// Timeout of a request about the Lease.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// How soon a failed renewal is repeated.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// The namespace of the pod that the server runs in.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Until when this server leads; `None`: it doesn't.
pub(super) type Leadership = Option<Instant>;

/// Whether a server leads for this long from now.
pub(super) fn leads_for(leadership: Leadership, duration: Duration) -> bool {
    leadership.is_some_and(|until| Instant::now() + duration < until)
}

/// Takes part in the election until `tasks` stop. `writers` write while this server leads, and end then, too: the Lease
/// is given back once nothing is written any more.
pub(super) async fn run(
    source: KubernetesSource,
    leadership: watch::Sender<Leadership>,
    writers: JoinHandle<()>,
    tasks: Tasks,
) {
    let mut candidate = Candidate::new(source, leadership);
    candidate.run(&tasks).await;
    if writers.await.is_err() {
        return;
    }
    candidate.release().await;
}

/// Namespace of the Lease, and of what else servers share.
pub(super) fn namespace(source: &KubernetesSource) -> String {
    let own_namespace = || fs::read_to_string(Path::new(NAMESPACE_FILE)).ok().map(|text| text.trim().to_owned());
    let namespace = source.lease.namespace.clone().or_else(own_namespace).filter(|name| !name.is_empty());
    namespace.unwrap_or_else(|| "default".to_owned())
}

struct Candidate {
    source: KubernetesSource,
    namespace: String,
    identity: String,
    election: Election,
    leadership: watch::Sender<Leadership>,
    started: Instant,
    /// The Lease as it was read or written last.
    lease: Option<Lease>,
    reported: LoggedErrors,
}

impl Candidate {
    fn new(source: KubernetesSource, leadership: watch::Sender<Leadership>) -> Self {
        let identity = identity();
        Self {
            namespace: namespace(&source),
            source,
            election: Election::new(identity.clone()),
            identity,
            leadership,
            started: Instant::now(),
            lease: None,
            reported: LoggedErrors::default(),
        }
    }

    /// Takes part in the election until `tasks` stop. Then it may still hold the Lease: see [`Candidate::release`].
    async fn run(&mut self, tasks: &Tasks) {
        let mut backoff = Backoff::default();
        loop {
            let round = async {
                match client(&self.source).await {
                    Ok(client) => self.campaign(client).await,
                    Err(error) => self.report(&error.to_string()),
                }
                sleep(jittered(backoff.next_delay(), getrandom::u32())).await;
            };
            tokio::select! {
                () = round => {}
                () = tasks.stopped() => return,
            }
        }
    }

    /// Campaigns with one client until there was no response for a while: its credentials may be others by then.
    async fn campaign(&mut self, client: Client) {
        let leases = self.leases(client);
        let mut last_success = Instant::now();
        while last_success.elapsed() < 8 * LEASE_DURATION {
            let delay = match self.round(&leases).await {
                Ok(delay) => {
                    last_success = Instant::now();
                    self.reported.clear();
                    delay
                }
                Err(error) => {
                    self.report(&error.to_string());
                    // Somebody else may have written it.
                    self.lease = None;
                    RETRY_INTERVAL
                }
            };
            self.publish();
            sleep(delay).await;
            self.publish();
        }
    }

    /// One round: reads the Lease unless it is held, and writes it if it may be; returns the time until the next one.
    async fn round(&mut self, leases: &Api<Lease>) -> Result<Duration, RequestError> {
        let began = self.started.elapsed();
        if self.lease.is_none() || self.election.leads_until(began).is_none() {
            self.lease = request(REQUEST_TIMEOUT, leases.get_opt(&self.source.lease.name)).await?;
        }
        let state = self.lease.as_ref().map(state);
        let written = match self.election.observe(state.as_ref(), self.started.elapsed()) {
            Step::Wait(delay) => return Ok(delay),
            Step::Create => request(REQUEST_TIMEOUT, leases.create(&PostParams::default(), &self.next(None))).await,
            Step::Acquire => {
                let next = self.next(self.lease.as_ref());
                let name = &self.source.lease.name;
                request(REQUEST_TIMEOUT, leases.replace(name, &PostParams::default(), &next)).await
            }
        };
        match written {
            Ok(lease) => {
                self.lease = Some(lease);
                self.election.acquired(began);
                Ok(RENEW_INTERVAL)
            }
            // Another candidate was faster.
            Err(error) if error.code() == Some(409) => {
                self.lease = None;
                Ok(RETRY_INTERVAL)
            }
            Err(error) => Err(error),
        }
    }

    /// The Lease as this server writes it.
    fn next(&self, previous: Option<&Lease>) -> Lease {
        let mut lease = previous.cloned().unwrap_or_default();
        lease.metadata.name = Some(self.source.lease.name.clone());
        lease.metadata.namespace = Some(self.namespace.clone());
        // They are the server's to write.
        lease.metadata.managed_fields = None;
        let now = MicroTime(Timestamp::now());
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count.saturating_add(1)));
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(LEASE_DURATION.as_secs()).ok();
        spec.renew_time = Some(now);
        lease
    }

    /// Gives the Lease back, so that another server leads at once. To be called when nothing is written any more.
    async fn release(self) {
        let is_held = self.election.leads_until(self.started.elapsed()).is_some();
        self.leadership.send_replace(None);
        if !is_held {
            return;
        }
        match self.try_release().await {
            Ok(()) => tracing::info!(event = "leader_released", "another policy server may lead"),
            Err(error) => tracing::debug!(error, "the Lease was not released"),
        }
    }

    async fn try_release(&self) -> Result<(), String> {
        let client = client(&self.source).await.map_err(|error| error.to_string())?;
        let (leases, name) = (self.leases(client), &self.source.lease.name);
        // A renewal may have been interrupted: what it has written is not known.
        let mut lease = request(REQUEST_TIMEOUT, leases.get(name)).await.map_err(|error| error.to_string())?;
        if state(&lease).holder == self.identity {
            lease.metadata.managed_fields = None;
            lease.spec.get_or_insert_with(LeaseSpec::default).holder_identity = Some(String::new());
            let replaced = request(REQUEST_TIMEOUT, leases.replace(name, &PostParams::default(), &lease)).await;
            replaced.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn leases(&self, client: Client) -> Api<Lease> {
        Api::namespaced(client, &self.namespace)
    }

    fn publish(&self) {
        let now = self.started.elapsed();
        let leads_until = self.election.leads_until(now).map(|until| self.started + until);
        let was_leader = self.leadership.send_replace(leads_until).is_some();
        if leads_until.is_some() && !was_leader {
            tracing::info!(event = "leader_elected", identity = self.identity, "this policy server leads");
        } else if leads_until.is_none() && was_leader {
            tracing::warn!(event = "leader_lost", identity = self.identity, "this policy server doesn't lead any more");
        }
    }

    fn report(&mut self, error: &str) {
        if self.reported.is_new(error) {
            let lease = format!("{}/{}", self.namespace, self.source.lease.name);
            tracing::warn!(
                event = "lease_failed",
                lease,
                error,
                "the Lease can't be read or written, so this server doesn't lead: gateways get no leases, and \
                 Services no addresses; check the account's rights (`get`, `create` and `update` of leases)"
            );
        }
    }
}

fn state(lease: &Lease) -> LeaseState {
    let spec = lease.spec.as_ref();
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    LeaseState {
        holder: spec.and_then(|spec| spec.holder_identity.clone()).unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: seconds.map_or(LEASE_DURATION, Duration::from_secs),
    }
}

/// The host's name, and a suffix that no other process has.
fn identity() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut identity = format!("{}_", host.trim());
    // Without randomness: the process, which is unique on its host.
    let suffix = getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()));
    // Writing into a String can't fail.
    let _ = write!(identity, "{suffix:016x}");
    identity
}
