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

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use tokio::time::sleep;
use vipgate_common::{Backoff, jittered};

pub(super) use self::inputs::InputSources;
use self::inputs::Inputs;
use self::planner::{Planner, StatusPlan, StatusWrite};
use self::session_samples::SessionSamples;
use super::kubernetes::writer::{KubeWriter, Write, WriteError, WriteLog};
use crate::source::ingest::join_result;

/// Name of the field manager.
const FIELD_MANAGER: &str = "vipgate-status";
/// How often inputs are compared. Gateways acknowledge a policy faster than that, so most changes are one write.
const INTERVAL: Duration = Duration::from_secs(1);
/// Writes after which everything is derived again.
const MAX_WRITES: usize = 100;
/// A pause after a plan is so many times as long as the plan took: at most this part of a core is used.
const PAUSE_FACTOR: u32 = 20;

/// Keeps status up to date while this server leads, until it stops.
pub(super) async fn run(sources: InputSources, writer: Arc<KubeWriter>) {
    let reconciler = Reconciler {
        sources,
        writer,
        planner: Planner::default(),
        samples: SessionSamples::default(),
        started: Instant::now(),
        log: WriteLog::new(
            "status_failed",
            "the status of an object can't be written",
            "`patch` of the status of vipgate's kinds",
        ),
    };
    reconciler.run().await;
}

struct Reconciler {
    sources: InputSources,
    writer: Arc<KubeWriter>,
    planner: Planner,
    samples: SessionSamples,
    started: Instant,
    log: WriteLog,
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

impl Reconciler {
    async fn run(mut self) {
        let mut backoff = Backoff::default();
        let mut leading_since: Option<Instant> = None;
        let mut last: Option<Inputs> = None;
        let mut pause = INTERVAL;
        loop {
            let mut stop = self.writer.stop.clone();
            tokio::select! {
                () = sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            pause = INTERVAL;
            if !self.writer.leads() {
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
                Rest::More => backoff.reset(),
                Rest::Nothing => {
                    backoff.reset();
                    self.log.clear();
                }
            }
        }
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
            // Rights may be those in a namespace.
            let place = (write.object.kind, write.object.namespace.clone());
            if denied.contains(&place) {
                self.planner.refused(&write, self.started.elapsed());
                pending -= 1;
                continue;
            }
            let document = Write::status(FIELD_MANAGER, &write.object, None, Some(write.status.clone()));
            let outcome = self.writer.apply(&document).await;
            pending -= 1;
            self.sources.objects.pending.store(pending, Relaxed);
            match outcome {
                Ok(_) => self.confirm(write),
                Err(WriteError::NotLeader) => return Rest::More,
                Err(error) => {
                    if matches!(error, WriteError::Denied(_)) {
                        denied.insert(place);
                    }
                    rest = Rest::More;
                    if self.fail(&write, &error) == Rest::Failed {
                        return Rest::Failed;
                    }
                }
            }
        }
        rest
    }

    fn confirm(&mut self, mut write: StatusWrite) {
        self.sources.objects.written.increment();
        for event in std::mem::take(&mut write.events) {
            self.sources.objects.events.record(event);
        }
        self.planner.written(write);
    }

    fn fail(&mut self, write: &StatusWrite, error: &WriteError) -> Rest {
        let objects = &self.sources.objects;
        let (counter, rest) = match error {
            // The source will observe it.
            WriteError::Conflict | WriteError::NotLeader => (&objects.gone, Rest::More),
            WriteError::Denied(_) => (&objects.denied, Rest::More),
            WriteError::Refused(_) => (&objects.failed, Rest::More),
            WriteError::Unknown(_) => (&objects.failed, Rest::Failed),
        };
        counter.increment();
        if rest == Rest::More {
            self.planner.refused(write, self.started.elapsed());
        }
        if let Some(reason) = error.reason() {
            self.log.report(&format!("{} {}", write.object.kind.as_str(), write.object.name), reason);
        }
        rest
    }
}
