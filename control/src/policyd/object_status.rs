//! Status of vipgate's objects: the leader of the policy servers writes what it knows of them to the API.
//!
//! ```text
//!   compilation, publication, gateways, pools --> desired status --\
//!                                                                   -> plan -> writes (server-side apply) and Events
//!   objects as observed by the source ---------> present status ---/
//! ```
//! Everything but the last step is pure. A status is written only if it differs from what is there, so that nothing is
//! written by a restart or a new leader.

mod accepted;
mod api;
mod condition;
mod events;
#[cfg(test)]
mod fixtures;
mod gateways;
mod inputs;
mod planner;
mod policies;
mod pools;
mod session_samples;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_common::{Backoff, LoggedErrors, TokenBucket, jittered};
use vipgate_policy::manifest::Kind;

use self::api::{StatusApi, WRITE_TIMEOUT, WriteError};
pub(super) use self::inputs::InputSources;
use self::inputs::Inputs;
use self::planner::{Planner, StatusPlan, StatusWrite};
use self::session_samples::SessionSamples;
use super::leader::{Leadership, WRITE_RATE, leads_for};
use crate::config::KubernetesSource;
use crate::source::ingest::join_result;

/// How often inputs are compared. Gateways acknowledge a policy faster than that, so most changes are one write.
const INTERVAL: Duration = Duration::from_secs(1);
/// Writes after which everything is derived again.
const MAX_WRITES: usize = 100;
/// A pause after a plan is so many times as long as the plan took: at most this part of a core is used.
const PAUSE_FACTOR: u32 = 20;

/// Writes status while this server leads, until `stop` is set.
pub(super) async fn run(
    source: KubernetesSource,
    sources: InputSources,
    leadership: watch::Receiver<Leadership>,
    stop: watch::Receiver<bool>,
) {
    let writer = Writer {
        api: StatusApi::new(source),
        sources,
        leadership,
        stop,
        planner: Planner::default(),
        samples: SessionSamples::default(),
        bucket: TokenBucket::new(WRITE_RATE),
        started: Instant::now(),
        reported: BTreeMap::new(),
    };
    writer.run().await;
}

struct Writer {
    api: StatusApi,
    sources: InputSources,
    leadership: watch::Receiver<Leadership>,
    stop: watch::Receiver<bool>,
    planner: Planner,
    samples: SessionSamples,
    bucket: TokenBucket,
    started: Instant,
    reported: BTreeMap<Kind, LoggedErrors>,
}

/// How a round has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// Everything is written.
    Nothing,
    /// There is more to write, or time will cause a write.
    More,
    /// The API server doesn't respond.
    Failed,
}

impl Writer {
    async fn run(mut self) {
        let mut backoff = Backoff::default();
        let mut leading_since: Option<Instant> = None;
        let mut last: Option<Inputs> = None;
        let mut pause = INTERVAL;
        loop {
            let mut stop = self.stop.clone();
            tokio::select! {
                () = sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            pause = INTERVAL;
            if !self.leads_for(Duration::ZERO) {
                (leading_since, last) = (None, None);
                self.planner.clear();
                self.sources.objects.pending.store(0, Relaxed);
                continue;
            }
            let leading_for = leading_since.get_or_insert_with(Instant::now).elapsed();
            let Some(mut inputs) = Inputs::gather(&self.sources, leading_for) else { continue };
            self.samples.apply(&mut inputs.gateways, leading_for);
            if last.as_ref().is_some_and(|last| last.is_same(&inputs)) {
                continue;
            }
            let began = Instant::now();
            let plan = self.plan(inputs.clone()).await;
            pause = pause.max(PAUSE_FACTOR * began.elapsed());
            let rest = self.write(plan).await;
            last = (rest == Rest::Nothing).then_some(inputs);
            match rest {
                Rest::Failed => pause = pause.max(jittered(backoff.next_delay(), getrandom::u32())),
                Rest::Nothing | Rest::More => backoff.reset(),
            }
        }
    }

    /// Whether this server leads for this long.
    fn leads_for(&self, duration: Duration) -> bool {
        leads_for(*self.leadership.borrow(), duration)
    }

    /// Plans on a blocking thread: there may be a hundred thousand endpoints.
    async fn plan(&mut self, inputs: Inputs) -> StatusPlan {
        let (mut planner, now) = (std::mem::take(&mut self.planner), self.started.elapsed());
        // The API's times have no fractions.
        let timestamp = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let work = tokio::task::spawn_blocking(move || {
            let plan = planner.plan(&inputs, now, &timestamp);
            (planner, plan)
        });
        let (planner, plan) = join_result(work.await);
        self.planner = planner;
        plan
    }

    async fn write(&mut self, plan: StatusPlan) -> Rest {
        let mut rest = if plan.is_waiting || plan.writes.len() > MAX_WRITES { Rest::More } else { Rest::Nothing };
        let mut pending = plan.writes.len() as u64;
        self.sources.objects.pending.store(pending, Relaxed);
        let mut denied = BTreeSet::new();
        for write in plan.writes.into_iter().take(MAX_WRITES) {
            if denied.contains(&write.object.kind) {
                self.planner.refused(&write, self.started.elapsed());
                pending -= 1;
                continue;
            }
            sleep(self.bucket.take(Instant::now())).await;
            // Another leader may write when the Lease has ended: nothing may be under way then.
            if !self.leads_for(WRITE_TIMEOUT) || *self.stop.borrow() {
                return Rest::More;
            }
            let outcome = self.api.write(&write).await;
            pending -= 1;
            self.sources.objects.pending.store(pending, Relaxed);
            match outcome {
                Ok(()) => self.confirm(write),
                Err(error) => {
                    if matches!(error, WriteError::Denied(_)) {
                        denied.insert(write.object.kind);
                    }
                    rest = Rest::More;
                    if self.fail(&write, error) == Rest::Failed {
                        return Rest::Failed;
                    }
                }
            }
        }
        rest
    }

    fn confirm(&mut self, mut write: StatusWrite) {
        self.sources.objects.written.increment();
        self.reported.remove(&write.object.kind);
        for event in std::mem::take(&mut write.events) {
            self.sources.objects.events.record(event);
        }
        self.planner.written(write);
    }

    fn fail(&mut self, write: &StatusWrite, error: WriteError) -> Rest {
        let now = self.started.elapsed();
        let (counter, error, rest) = match error {
            // The source will observe it.
            WriteError::Gone => {
                self.sources.objects.gone.increment();
                self.planner.refused(write, now);
                return Rest::More;
            }
            WriteError::Unknown(error) => (&self.sources.objects.failed, error, Rest::Failed),
            WriteError::Refused(error) => (&self.sources.objects.failed, error, Rest::More),
            WriteError::Denied(error) => (&self.sources.objects.denied, error, Rest::More),
        };
        counter.increment();
        if rest == Rest::More {
            self.planner.refused(write, now);
        }
        if self.reported.entry(write.object.kind).or_default().is_new(&error) {
            let (kind, object) = (write.object.kind.as_str(), &write.object.name);
            tracing::warn!(
                event = "status_failed",
                kind,
                object,
                error,
                "the status of objects can't be written: check the API server and the account's rights (`patch` of {}/\
                 status)",
                write.object.kind.plural()
            );
        }
        rest
    }
}
