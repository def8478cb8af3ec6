//! Leader election of policy servers that share their state: only the leader decides membership, and writes to the
//! Kubernetes API. They elect it by a Lease (coordination.k8s.io/v1), or by a key of etcd.
//!
//! Each write of the lease names the version that it follows from, so that of two candidates one fails. When the leader
//! dies, another one leads within 5 s; when it stops, at once.

mod election;
mod etcd_lease;
mod kubernetes_lease;

use std::fmt::Write;
use std::fs;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use vipgate_common::{LoggedErrors, Tasks};

use self::election::{Election, LeaseState, RENEW_INTERVAL, Step};
pub(super) use self::etcd_lease::EtcdLease;
pub(super) use self::kubernetes_lease::{KubernetesLease, namespace};

/// How soon a failed renewal is repeated.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Until when this server leads; `None`: it doesn't.
pub(super) type Leadership = Option<Instant>;

/// Whether a server leads for this long from now.
pub(super) fn leads_for(leadership: Leadership, duration: Duration) -> bool {
    leadership.is_some_and(|until| Instant::now() + duration < until)
}

/// Where the lease is.
pub(super) trait LeaseStore: Send {
    /// Its name, for messages.
    fn name(&self) -> String;

    /// What an operator may check if it can't be read or written.
    fn hint(&self) -> &'static str;

    /// Reads it; `None`: there is none. The error is for people.
    fn read(&mut self) -> impl Future<Output = Result<Option<LeaseState>, String>> + Send;

    /// Writes this holder in place of the state that was read or written last, or creates it; an empty one releases it.
    /// `None`: another candidate was faster.
    fn write(&mut self, holder: &str) -> impl Future<Output = Result<Option<LeaseState>, String>> + Send;
}

/// Takes part in the election until `tasks` stop. `writers` write while this server leads, and end then, too: the lease
/// is given back once nothing is written any more.
pub(super) async fn run(
    store: impl LeaseStore,
    leadership: watch::Sender<Leadership>,
    writers: Option<JoinHandle<()>>,
    tasks: Tasks,
) {
    let mut candidate = Candidate::new(store, leadership);
    tokio::select! {
        () = candidate.run() => {}
        () = tasks.stopped() => {}
    }
    if let Some(writers) = writers
        && writers.await.is_err()
    {
        return;
    }
    candidate.release().await;
}

struct Candidate<S> {
    store: S,
    identity: String,
    election: Election,
    leadership: watch::Sender<Leadership>,
    started: Instant,
    /// The lease as it was read or written last.
    lease: Option<LeaseState>,
    reported: LoggedErrors,
}

impl<S: LeaseStore> Candidate<S> {
    fn new(store: S, leadership: watch::Sender<Leadership>) -> Self {
        let identity = identity();
        Self {
            store,
            election: Election::new(identity.clone()),
            identity,
            leadership,
            started: Instant::now(),
            lease: None,
            reported: LoggedErrors::default(),
        }
    }

    /// Takes part in the election. When this is cancelled, it may still hold the lease: see [`Candidate::release`].
    async fn run(&mut self) {
        loop {
            let delay = match self.round().await {
                Ok(delay) => {
                    self.reported.clear();
                    delay
                }
                Err(error) => {
                    self.report(&error);
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

    /// One round: reads the lease unless it is held, and writes it if it may be; returns the time until the next one.
    async fn round(&mut self) -> Result<Duration, String> {
        let began = self.started.elapsed();
        if self.lease.is_none() || self.election.leads_until(began).is_none() {
            self.lease = self.store.read().await?;
        }
        match self.election.observe(self.lease.as_ref(), self.started.elapsed()) {
            Step::Wait(delay) => return Ok(delay),
            Step::Create | Step::Acquire => {}
        }
        self.lease = self.store.write(&self.identity).await?;
        if self.lease.is_none() {
            // Another candidate was faster.
            return Ok(RETRY_INTERVAL);
        }
        self.election.acquired(began);
        Ok(RENEW_INTERVAL)
    }

    /// Gives the lease back, so that another server leads at once. To be called when nothing is written any more.
    async fn release(mut self) {
        let is_held = self.election.leads_until(self.started.elapsed()).is_some();
        self.leadership.send_replace(None);
        if !is_held {
            return;
        }
        match self.try_release().await {
            Ok(()) => tracing::info!(event = "leader_released", "another policy server may lead"),
            Err(error) => tracing::debug!(error, "the lease was not released"),
        }
    }

    async fn try_release(&mut self) -> Result<(), String> {
        // A renewal may have been interrupted: what it has written is not known.
        if self.store.read().await?.is_some_and(|lease| lease.holder == self.identity) {
            self.store.write("").await?;
        }
        Ok(())
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
            let hint = self.store.hint();
            tracing::warn!(
                event = "lease_failed",
                lease = self.store.name(),
                error,
                "the lease can't be read or written, so this server doesn't lead: gateways get no leases, and Services \
                 no addresses; {hint}"
            );
        }
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
