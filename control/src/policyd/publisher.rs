//! Compiles the manifests whenever their source, or the providers of their pools, have changed, and publishes the result.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, Interval, sleep_until};
use vipgate_common::spawn_blocking;

use super::cloud::Inventory;
use super::state::{AcceptEmptyCommand, ServerState};
use crate::source::SourceEvent;
use crate::source::ingest::SourceIngester;
use crate::source::store::{AcceptEmptyError, AcceptedEmpty};
use crate::systemd;
use crate::xds::publication::Publication;

/// How long the first policy waits for the providers of pools, and for addresses of pools to be recorded.
const FIRST_POLICY_TIMEOUT: Duration = Duration::from_secs(15);
/// How often the log repeats that there is no policy.
const NO_POLICY_LOG_INTERVAL: Duration = Duration::from_secs(30);

/// What the policies follow from.
pub(super) struct Inputs {
    /// Events of the source.
    pub(super) events: mpsc::Receiver<SourceEvent>,
    /// Commands to accept a source that is empty.
    pub(super) commands: mpsc::Receiver<AcceptEmptyCommand>,
}

/// Publishes each compiled policy.
pub(super) struct Publisher {
    state: Arc<ServerState>,
    intake: SourceIngester,
    /// What providers have.
    inventory: watch::Receiver<Arc<Inventory>>,
    publish: watch::Sender<Option<Arc<Publication>>>,
    /// The last publication; that of version 0 was not published.
    last: Arc<Publication>,
    began: Instant,
    /// Address that the server listens on, for the log.
    listen: String,
}

/// What to do after an input.
enum Next {
    /// Publish what was compiled in this time.
    Publish(Duration),
    /// Publish, and then answer the command.
    Answer(AcceptEmptyCommand, Result<AcceptedEmpty, AcceptEmptyError>),
    /// Nothing was compiled.
    Wait,
    /// The source has ended.
    End,
}

impl Publisher {
    pub(super) fn new(
        state: Arc<ServerState>,
        intake: SourceIngester,
        publish: watch::Sender<Option<Arc<Publication>>>,
        listen: String,
    ) -> Self {
        let inventory = state.cloud.inventory();
        Self { state, intake, inventory, publish, last: Arc::default(), began: Instant::now(), listen }
    }

    /// Compiles and publishes until the source ends.
    pub(super) async fn run(mut self, mut inputs: Inputs) {
        let mut batch = Vec::new();
        let mut no_policy_timer = tokio::time::interval(NO_POLICY_LOG_INTERVAL);
        no_policy_timer.tick().await;
        loop {
            let (elapsed, answer) = match self.next(&mut inputs, &mut batch, &mut no_policy_timer).await {
                Next::Publish(elapsed) => (elapsed, None),
                Next::Answer(reply, outcome) => (Duration::ZERO, Some((reply, outcome))),
                Next::Wait => continue,
                Next::End => return,
            };
            self.publish(elapsed).await;
            // The client may have disconnected; the command was executed all the same.
            let _ = answer.map(|(reply, outcome)| reply.send(outcome));
        }
    }

    /// Waits for an input, and compiles what follows from it.
    async fn next(&mut self, inputs: &mut Inputs, batch: &mut Vec<SourceEvent>, no_policy: &mut Interval) -> Next {
        let is_first = self.last.number == 0;
        tokio::select! {
            count = inputs.events.recv_many(batch, super::EVENT_QUEUE) => {
                if count == 0 {
                    return Next::End;
                }
                for _ in batch.iter().filter(|event| matches!(event, SourceEvent::Update(_))) {
                    self.state.stats.source_updates.increment();
                }
                self.intake.ingest(batch.drain(..)).await.map_or(Next::Wait, Next::Publish)
            }
            Some(reply) = inputs.commands.recv() => Next::Answer(reply, self.intake.accept_empty().await),
            Ok(()) = self.inventory.changed() => {
                let observed = self.inventory.borrow_and_update().clone();
                Next::Publish(self.intake.set_cloud((*observed).clone()).await)
            }
            () = self.intake.due() => Next::Publish(self.intake.recompile().await),
            () = sleep_until(self.began + FIRST_POLICY_TIMEOUT), if is_first && self.waits_for_all() => {
                let cached = self.state.cloud.cached().await;
                if !cached.is_empty() {
                    let pools = cached.keys().cloned().collect::<Vec<_>>().join(", ");
                    tracing::warn!(event = "cloud_cached", pools, "not observed yet: what was observed before is used");
                }
                Next::Publish(self.intake.set_cloud(cached).await)
            }
            _ = no_policy.tick(), if is_first => {
                let reason = self.state.source.health.load().waiting_reason().unwrap_or_default();
                tracing::warn!(event = "no_policy", reason, "still no policy: nothing is published");
                systemd::extend_startup(&format!("no policy yet: {reason}"), 2 * NO_POLICY_LOG_INTERVAL);
                Next::Wait
            }
        }
    }

    /// Publishes what the manifests were compiled into, if it is new; `elapsed`: the time that this has taken so far.
    async fn publish(&mut self, elapsed: Duration) {
        let state = &self.state;
        if let Some((kubernetes, snapshot)) = state.kubernetes.as_ref().zip(state.source.compiled.load().ipam.clone()) {
            kubernetes.ipam.set_snapshot(snapshot);
        }
        state.cloud.set_objects(&state.source.compiled.load().cloud);
        if let Some(placement) = state.source.compiled.load().placement.clone().filter(|_| self.is_complete()) {
            let (previous, started) = (self.last.clone(), Instant::now());
            let next = spawn_blocking(move || previous.next(placement)).await;
            let elapsed = elapsed + started.elapsed();
            state.stats.compile_us.store(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX), Relaxed);
            if let Some(next) = next {
                let is_first = self.last.number == 0;
                next.log_left_out(&self.last);
                self.last = Arc::new(next);
                report_publication(state, &self.last, elapsed);
                let _ = self.publish.send(Some(self.last.clone()));
                if is_first {
                    tracing::info!(event = "ready", listen = self.listen, source = state.source.name, "ready");
                    systemd::ready();
                }
            }
        }
        if let Some(kubernetes) = &state.kubernetes {
            kubernetes.share(state.source.compiled.load_full(), &self.last);
        }
    }

    /// Whether what is compiled may be published: a first policy without the private addresses of VIPs, or without
    /// addresses that are about to be recorded, would take them from gateways that have them.
    fn is_complete(&self) -> bool {
        let has_pending = || self.state.source.compiled.load().has_pending;
        let is_whole = || !self.waits_for_all() || !(self.state.cloud.awaits_observation() || has_pending());
        // Without the record it isn't known who has which address, and gateways have a policy.
        self.last.number > 0 || self.intake.knows_record() && is_whole()
    }

    /// Whether a first policy has time to become complete.
    fn waits_for_all(&self) -> bool {
        self.began.elapsed() < FIRST_POLICY_TIMEOUT
    }
}

/// Counts and logs a publication.
fn report_publication(state: &ServerState, publication: &Publication, elapsed: Duration) {
    state.stats.publications.increment();
    tracing::info!(
        event = "policy",
        version = publication.version,
        vips = publication.placement.vips.len(),
        endpoints = publication.placement.endpoints.len(),
        changed = publication.changed_keys.len().saturating_sub(1),
        nodes = publication.encoded_nodes(),
        ms = elapsed.as_millis() as u64,
        "policy published"
    );
}
