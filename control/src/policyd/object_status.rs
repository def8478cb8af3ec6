//! Status of vipgate's objects: the leader of the policy servers writes what it knows of them to the API.
//!
//! ```text
//!   compilation, publication, gateways, pools --> desired status --\
//!                                                                   -> plan -> writes (server-side apply) and Events
//!   objects as observed by the source ---------> present status ---/
//! ```
//! Everything but the last step is pure. A status is written only if it differs from what is there, so that nothing is
//! written by a restart or a new leader. Nodes have no status of vipgate's, but Events.

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

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use tokio::time::sleep;
use vipgate_common::spawn_blocking;

pub(super) use self::inputs::InputSources;
use self::inputs::Inputs;
use self::planner::{Planner, StatusPlan, StatusWrite};
use self::session_samples::SessionSamples;
use super::kubernetes::writer::{KubeWriter, Purpose, Write};
use super::node_events::Agents;

/// How often inputs are compared. Gateways acknowledge a policy faster than that, so most changes are one write.
const INTERVAL: Duration = Duration::from_secs(1);
/// A pause after a plan is so many times as long as the plan took: at most this part of a core is used.
const PAUSE_FACTOR: u32 = 20;

/// Keeps status up to date while this server leads, until it stops.
pub(super) async fn run(sources: InputSources, writer: Arc<KubeWriter>) {
    let reconciler = Reconciler {
        sources,
        writer,
        planner: Planner::default(),
        samples: SessionSamples::default(),
        agents: Agents::default(),
        started: Instant::now(),
    };
    reconciler.run().await;
}

struct Reconciler {
    sources: InputSources,
    writer: Arc<KubeWriter>,
    planner: Planner,
    samples: SessionSamples,
    agents: Agents,
    started: Instant,
}

impl Reconciler {
    async fn run(mut self) {
        let mut leading_since: Option<Instant> = None;
        let mut last: Option<Inputs> = None;
        let mut pause = INTERVAL;
        loop {
            tokio::select! {
                () = sleep(pause) => {}
                () = self.writer.tasks.stopped() => return,
            }
            pause = INTERVAL;
            if !self.writer.leads() {
                (leading_since, last) = (None, None);
                self.planner.clear();
                self.agents = Agents::default();
                self.sources.objects.pending.store(0, Relaxed);
                continue;
            }
            let leading_for = leading_since.get_or_insert_with(Instant::now).elapsed();
            let Some(mut inputs) = Inputs::gather(&self.sources, leading_for) else { continue };
            for event in self.agents.events(&self.sources.nodes, &inputs.compilation.published, Instant::now()) {
                self.sources.objects.events.record(event);
            }
            self.samples.apply(&mut inputs.gateways, leading_for);
            if last.as_ref().is_some_and(|last| last.is_same(&inputs)) {
                continue;
            }
            let began = Instant::now();
            let plan = self.plan(inputs.clone()).await;
            pause = pause.max(PAUSE_FACTOR * began.elapsed());
            let is_done = self.write(plan).await;
            if is_done {
                self.writer.succeeded(Purpose::Status);
            }
            last = is_done.then_some(inputs);
        }
    }

    /// Plans on a blocking thread: there may be a hundred thousand endpoints.
    async fn plan(&mut self, inputs: Inputs) -> StatusPlan {
        let (mut planner, now) = (std::mem::take(&mut self.planner), self.started.elapsed());
        // The API's times have no fractions.
        let timestamp = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let work = spawn_blocking(move || {
            let plan = planner.plan(&inputs, now, &timestamp);
            (planner, plan)
        });
        let (planner, plan) = work.await;
        self.planner = planner;
        plan
    }

    /// Writes what is planned; returns whether nothing is left to write, and time will cause no write.
    async fn write(&mut self, plan: StatusPlan) -> bool {
        let objects = self.sources.objects.clone();
        let planned = plan.writes.len();
        objects.pending.store(planned as u64, Relaxed);
        let applied = self.writer.apply_all(plan.writes.into_iter().map(with_document)).await;
        let mut pending = planned;
        for (mut write, outcome) in applied.outcomes {
            if outcome.is_ok() {
                pending -= 1;
                for event in std::mem::take(&mut write.events) {
                    objects.events.record(event);
                }
                self.planner.written(write);
            }
        }
        objects.pending.store(pending as u64, Relaxed);
        applied.retry_after.is_none() && !plan.is_waiting
    }
}

fn with_document(write: StatusWrite) -> (StatusWrite, Write) {
    let document = Write::status(Purpose::Status, write.object.clone(), None, Some(write.status.clone()));
    (write, document)
}
