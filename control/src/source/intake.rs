//! What policyd and a gateway with manifests in files do with a source: take in its events, compile, and say how the source stands.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::task::JoinError;

use super::store::{Accepted, Outcome, Store};
use super::{Event, Update};
use crate::metrics::{Family, Kind, Labels, family};

/// Reasons that are listed one by one.
const LISTED: usize = 5;

/// How a source of manifests stands, for everybody who asks.
#[derive(Debug)]
pub struct SourceStatus {
    /// For people: where manifests come from.
    pub name: String,
    /// Why the source can't be asked; none while it can.
    pub lost: ArcSwapOption<String>,
    /// What the manifests come to.
    pub compiled: ArcSwap<Outcome>,
    /// Whether it is what it should be.
    pub health: ArcSwap<Health>,
}

/// Whether a source is what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Why not; empty when it is.
    pub reasons: Vec<String>,
    /// Since when it is so, or isn't.
    pub since: SystemTime,
    /// Whether there is nothing to put in force, not even nothing.
    pub waiting: bool,
}

impl Health {
    /// Whether it is what it should be.
    pub fn is_healthy(&self) -> bool {
        self.reasons.is_empty()
    }

    /// What a gateway or a server waits for; none when it doesn't.
    pub fn waits_for(&self) -> Option<String> {
        let advice = "it needs a manifest, `vipgate policy accept-empty`, or `allow_empty: true`";
        self.waiting.then(|| format!("the source has no policy yet: {}; {advice}", self.summary()))
    }

    /// The reasons, of many only the first.
    pub fn summary(&self) -> String {
        let mut text = self.reasons.iter().take(LISTED).cloned().collect::<Vec<_>>().join("; ");
        if self.reasons.len() > LISTED {
            let _ = write!(text, "; and {} more", self.reasons.len() - LISTED);
        }
        text
    }

    /// Seconds since it is so.
    pub fn age_seconds(&self) -> u64 {
        SystemTime::now().duration_since(self.since).unwrap_or_default().as_secs()
    }
}

impl SourceStatus {
    fn new(name: String) -> Self {
        let health = Health { reasons: vec!["it wasn't read yet".to_owned()], since: SystemTime::now(), waiting: true };
        Self { name, lost: ArcSwapOption::empty(), compiled: ArcSwap::default(), health: ArcSwap::from_pointee(health) }
    }

    /// Notes and logs how it stands by now.
    fn look(&self) {
        let (compiled, before) = (self.compiled.load(), self.health.load());
        let lost = self.lost.load_full().map(|lost| lost.to_string());
        let reasons: Vec<String> = lost.into_iter().chain(compiled.unhealthy.iter().cloned()).collect();
        let waiting = compiled.deal.is_none();
        if reasons == before.reasons && waiting == before.waiting {
            return;
        }
        let since = if reasons.is_empty() == before.is_healthy() { before.since } else { SystemTime::now() };
        let now = Health { reasons, since, waiting };
        if let Some(reason) = now.waits_for() {
            tracing::warn!(event = "source_empty", source = self.name, "{reason}");
        } else if now.is_healthy() {
            tracing::info!(event = "source_healthy", source = self.name, "all of the source can be read");
        } else {
            let reason = now.summary();
            tracing::error!(
                event = "source_unhealthy",
                source = self.name,
                "the source is empty or unreadable, at least in part, and what was in force of it stays: {reason}"
            );
        }
        self.health.store(Arc::new(now));
    }

    /// What there is to measure.
    pub(crate) fn families(&self) -> Vec<Family> {
        let states = self.compiled.load().states().map(|(state, count)| (vec![("state", state.to_owned())], count));
        vec![
            family(
                "policy_source_healthy",
                "Whether the source of manifests can be read and isn't empty, in whole; else the last good state stays",
                Kind::Gauge,
                vec![(Labels::new(), self.health.load().is_healthy().into())],
            ),
            family(
                "policy_objects",
                "Manifests by state: in force as written, in force as they were before, left out",
                Kind::Gauge,
                states.into(),
            ),
        ]
    }
}

/// Takes in what a source says.
#[derive(Debug)]
pub struct Intake {
    store: Store,
    status: Arc<SourceStatus>,
}

impl Intake {
    /// Of a source of this name, into an empty store.
    pub fn new(name: String, store: Store) -> Self {
        Self { store, status: Arc::new(SourceStatus::new(name)) }
    }

    /// How the source stands.
    pub fn status(&self) -> Arc<SourceStatus> {
        self.status.clone()
    }

    /// Takes in events, and compiles what they come to, off this thread; how long that took, and nothing if nothing was read.
    pub async fn take(&mut self, events: impl IntoIterator<Item = Event>) -> Option<Duration> {
        let mut updates = Vec::new();
        for event in events {
            match event {
                Event::Update(update) => {
                    if self.status.lost.swap(None).is_some() {
                        tracing::info!(
                            event = "source_found",
                            source = self.status.name,
                            "the source can be asked again"
                        );
                    }
                    updates.push(update);
                }
                Event::Lost(reason) => {
                    tracing::warn!(
                        event = "source_lost",
                        source = self.status.name,
                        reason,
                        "the source can't be asked"
                    );
                    self.status.lost.store(Some(Arc::new(reason)));
                }
            }
        }
        if updates.is_empty() {
            self.status.look();
            return None;
        }
        Some(self.compile(updates).await)
    }

    /// Takes the source at its word where it is empty.
    ///
    /// # Errors
    /// When it is empty nowhere, and why it isn't.
    pub async fn accept_empty(&mut self) -> Result<Accepted, String> {
        let accepted = self.store.accept_empty()?;
        for (name, objects) in &accepted.texts {
            tracing::warn!(event = "empty_accepted", text = %name, objects, "accepted as empty: what it had goes");
        }
        self.compile(Vec::new()).await;
        Ok(accepted)
    }

    async fn compile(&mut self, updates: Vec<Update>) -> Duration {
        let (mut store, status) = (std::mem::take(&mut self.store), self.status.clone());
        let work = tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            for update in updates {
                store.update(update);
            }
            let outcome = store.compile();
            let took = begun.elapsed();
            // Comparing what is wrong with thousands of manifests, and freeing what they came to before, takes its time, too.
            let before = status.compiled.load_full();
            complain(&before, &outcome);
            status.compiled.store(Arc::new(outcome));
            (store, took)
        });
        let (store, took) = finished(work.await);
        self.store = store;
        self.status.look();
        took
    }
}

/// What work off this thread came to. A compiler that panics is a bug of ours, and no state to go on with.
pub(crate) fn finished<T>(work: Result<T, JoinError>) -> T {
    work.unwrap_or_else(|error| std::panic::resume_unwind(Box::new(error.to_string())))
}

/// Logs what is wrong now and wasn't before.
fn complain(before: &Outcome, now: &Outcome) {
    for complaint in now.complaints.iter().filter(|complaint| !before.complaints.contains(complaint)) {
        if complaint.is_error() {
            tracing::error!(event = "manifest_refused", "{complaint}");
        } else {
            tracing::warn!(event = "manifest_warning", "{complaint}");
        }
    }
    for (id, faulty) in now.faulty.iter().filter(|(id, faulty)| before.faulty.get(*id) != Some(faulty)) {
        let instead = if faulty.has_last_good { "its last good version stays in force" } else { "it is left out" };
        tracing::error!(event = "object_refused", object = %id, "{id} is not in force as it is written: {instead}");
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// So many Services whose manifests are wrong in one way each time, so that there is much to compare as well.
    fn manifests(count: u32, wrong: &str) -> String {
        let mut text = String::new();
        for n in 0..count {
            let _ = write!(
                text,
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: a, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
                 spec: {{type: LoadBalancer, ports: [{{port: {wrong}}}]}}\n\
                 status: {{loadBalancer: {{ingress: [{{ip: 100.0.{}.{}}}]}}}}\n",
                n >> 8,
                n & 255
            );
        }
        text
    }

    #[tokio::test]
    async fn whoever_awaits_a_large_source_works_next_to_nothing_meanwhile() {
        let mut intake = Intake::new("a test".to_owned(), Store::default());
        for wrong in ["80", "70000", "70001"] {
            let changed = vec![("x.yaml".into(), Ok(manifests(1500, wrong)))];
            let update = Update { whole: true, changed, ..Update::default() };
            let worked = crate::gateway::stalls::thread_time();
            let took = intake.take([Event::Update(update)]).await.unwrap();
            let worked = crate::gateway::stalls::thread_time().saturating_sub(worked);
            assert!(worked < took / 10, "this thread worked for {worked:?} of {took:?}");
        }
    }
}
