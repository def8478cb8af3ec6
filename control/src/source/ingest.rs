//! Ingestion of a policy source, by policyd and by a gateway with manifests in files: applies its events to the store,
//! compiles the policy, has addresses of pools recorded, and maintains the status of the source.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::{ArcSwap, ArcSwapOption};
use k8s_openapi::jiff::Timestamp;
use vipgate_common::spawn_blocking;
use vipgate_policy::diagnostic::Diagnostic;
use vipgate_policy::manifest::CloudPool;

use super::address_record::{RecordStorage, Recorder};
use super::store::{AcceptEmptyError, AcceptedEmpty, CompileOutcome, ManifestStore};
use super::{SourceEvent, SourceUpdate};
use crate::metric::{Family, Label, metrics};

/// Maximum number of reasons in a summary.
const MAX_LISTED_REASONS: usize = 5;
/// Records that follow from each other at once: what policies gave up, what others are to have then, and what other
/// servers write meanwhile.
const MAX_RECORDS: usize = 4;
/// How long a first policy waits for what couldn't be read, and is read again meanwhile.
const FAILED_READS_TIMEOUT: Duration = Duration::from_secs(15);
/// How often the wall clock is looked at, which can be set meanwhile.
const CLOCK_INTERVAL: Duration = Duration::from_mins(1);

const STATE: Label = Label::one_of("state", &["accepted", "last_good", "rejected"]);

metrics! {
    /// The policy source, where manifests are compiled.
    pub SOURCE_METRICS:
    POLICY_SOURCE_HEALTHY = Gauge("policy_source_healthy", []):
        "Whether the whole policy source is readable and not empty; if not, its last good state stays in force";
    POLICY_OBJECTS = Gauge("policy_objects", [STATE]):
        "Manifests by state: in force as written, in force in their last good version, not in force";
}

/// The status of a policy source, shared with its readers.
#[derive(Debug)]
pub struct SourceStatus {
    /// A description of the source, for output.
    pub name: String,
    /// Why the source is unreachable; `None`: it is reachable.
    pub unreachable: ArcSwapOption<String>,
    /// The result of the last compilation.
    pub compiled: ArcSwap<CompileOutcome>,
    pub health: ArcSwap<SourceHealth>,
}

/// The health of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceHealth {
    /// Why it is unhealthy; empty: it is healthy.
    pub reasons: Vec<String>,
    /// When it became healthy or unhealthy.
    pub since: SystemTime,
    /// Whether it waits for a first policy: there is none, and an empty one wasn't accepted.
    pub waiting: bool,
    /// Whether there are manifests meanwhile, but others couldn't be read.
    pub has_failed_reads: bool,
}

impl SourceHealth {
    /// Whether it is healthy.
    pub fn is_healthy(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Why a gateway or policy server waits for a first policy; `None`: it doesn't.
    pub fn waiting_reason(&self) -> Option<String> {
        let advice = if self.has_failed_reads {
            "it is read again in a moment"
        } else {
            "it needs a manifest, `vipgate policy accept-empty`, or `allow_empty: true`"
        };
        self.waiting.then(|| format!("the source has no policy yet: {}; {advice}", self.summary()))
    }

    /// The reasons as text, at most five of them.
    pub fn summary(&self) -> String {
        let mut text = self.reasons.iter().take(MAX_LISTED_REASONS).cloned().collect::<Vec<_>>().join("; ");
        if self.reasons.len() > MAX_LISTED_REASONS {
            let _ = write!(text, "; and {} more", self.reasons.len() - MAX_LISTED_REASONS);
        }
        text
    }

    /// Seconds since it became healthy or unhealthy.
    pub fn age_seconds(&self) -> u64 {
        SystemTime::now().duration_since(self.since).unwrap_or_default().as_secs()
    }
}

impl SourceStatus {
    fn new(name: String) -> Self {
        let (reasons, since) = (vec!["not read yet".to_owned()], SystemTime::now());
        let health = SourceHealth { reasons, since, waiting: true, has_failed_reads: false };
        Self {
            name,
            unreachable: ArcSwapOption::empty(),
            compiled: ArcSwap::default(),
            health: ArcSwap::from_pointee(health),
        }
    }

    /// Updates the health, and logs changes.
    fn update_health(&self) {
        let (compiled, before) = (self.compiled.load(), self.health.load());
        let lost = self.unreachable.load_full().map(|lost| lost.to_string());
        let reasons: Vec<String> = lost.into_iter().chain(compiled.unhealthy.iter().cloned()).collect();
        let waiting = compiled.placement.is_none();
        let has_failed_reads = waiting && compiled.objects > 0;
        if reasons == before.reasons && (waiting, has_failed_reads) == (before.waiting, before.has_failed_reads) {
            return;
        }
        let since = if reasons.is_empty() == before.is_healthy() { before.since } else { SystemTime::now() };
        let now = SourceHealth { reasons, since, waiting, has_failed_reads };
        if let Some(reason) = now.waiting_reason() {
            tracing::warn!(event = "source_empty", source = self.name, "{reason}");
        } else if now.is_healthy() {
            tracing::info!(event = "source_healthy", source = self.name, "the policy source is readable and not empty");
        } else {
            let reason = now.summary();
            tracing::error!(
                event = "source_unhealthy",
                source = self.name,
                "the policy source is partly or fully empty or unreadable; its last good state stays in force: {reason}"
            );
        }
        self.health.store(Arc::new(now));
    }

    /// Its metrics.
    pub(crate) fn families(&self) -> Vec<Family> {
        vec![
            POLICY_SOURCE_HEALTHY.single(self.health.load().is_healthy().into()),
            POLICY_OBJECTS.by_label(self.compiled.load().states()),
        ]
    }
}

/// Applies the events of a source to its store.
#[derive(Debug)]
pub struct SourceIngester {
    store: ManifestStore,
    status: Arc<SourceStatus>,
    /// Stores the record of addresses of pools, where it is beside the source.
    recorder: Option<Recorder>,
    began: tokio::time::Instant,
}

impl SourceIngester {
    /// Creates the ingester of a source with this name.
    pub fn new(name: String, store: ManifestStore) -> Self {
        let began = tokio::time::Instant::now();
        Self { store, status: Arc::new(SourceStatus::new(name)), recorder: None, began }
    }

    /// Sets where the record of addresses of pools is stored. Default: nowhere.
    #[must_use]
    pub(crate) fn with_storage(self, storage: Option<RecordStorage>) -> Self {
        Self { recorder: storage.map(Recorder::new), ..self }
    }

    /// The status of the source.
    pub fn status(&self) -> Arc<SourceStatus> {
        self.status.clone()
    }

    /// Applies events and compiles the result on a blocking thread. Returns the time of compilation; `None` without
    /// updates.
    pub async fn ingest(&mut self, events: impl IntoIterator<Item = SourceEvent>) -> Option<Duration> {
        let mut updates = Vec::new();
        for event in events {
            match event {
                SourceEvent::Update(update) => {
                    if self.status.unreachable.swap(None).is_some() {
                        let source = &self.status.name;
                        tracing::info!(event = "source_found", source, "the policy source is reachable again");
                    }
                    updates.push(update);
                }
                SourceEvent::Unreachable(reason) => {
                    let source = &self.status.name;
                    tracing::warn!(event = "source_lost", source, reason, "the policy source is unreachable");
                    self.status.unreachable.store(Some(Arc::new(reason)));
                }
            }
        }
        if updates.is_empty() {
            self.status.update_health();
            return None;
        }
        Some(self.compile(updates).await)
    }

    /// Sets what cloud providers have, by pool, and compiles. Returns the time of compilation.
    pub async fn set_cloud(&mut self, cloud: BTreeMap<String, Arc<CloudPool>>) -> Duration {
        self.store.set_cloud(cloud);
        self.compile(Vec::new()).await
    }

    /// Accepts that the source, or parts of it, are empty, and removes the objects retained so far.
    ///
    /// # Errors
    /// If no part of it is empty, or what it holds is unknown.
    pub async fn accept_empty(&mut self) -> Result<AcceptedEmpty, AcceptEmptyError> {
        let accepted = self.store.accept_empty()?;
        for (name, objects) in &accepted.entries {
            tracing::warn!(event = "empty_accepted", text = %name, objects, "accepted as empty; removing its objects");
        }
        self.compile(Vec::new()).await;
        Ok(accepted)
    }

    /// Whether the record of addresses is known, where there is one beside the source.
    pub(crate) fn knows_record(&self) -> bool {
        self.recorder.as_ref().is_none_or(Recorder::is_loaded)
    }

    /// Waits until a compilation is due without an event: a quarantine ends that a policy waits for, what couldn't be
    /// recorded is to be tried again, or the first policy waits no longer for what couldn't be read.
    pub(crate) fn due(&self) -> impl Future<Output = ()> + use<> {
        let without_reads_at = self.store.awaits_failed_reads().then(|| self.began + FAILED_READS_TIMEOUT);
        let retry_at = self.recorder.as_ref().and_then(Recorder::retry_at);
        let next_at = retry_at.into_iter().chain(without_reads_at).min();
        let waits_until = self.status.compiled.load().waits_until;
        async move {
            loop {
                let next = next_at.map(|at| at.saturating_duration_since(tokio::time::Instant::now()));
                let quarantine = waits_until.map(|end| Timestamp::now().duration_until(end));
                // One that has passed is negative.
                let quarantine = quarantine.map(|left| Duration::try_from(left).unwrap_or_default());
                match [next, quarantine].into_iter().flatten().min() {
                    None => std::future::pending().await,
                    Some(left) if left.is_zero() => return,
                    Some(left) => tokio::time::sleep(left.min(CLOCK_INTERVAL)).await,
                }
            }
        }
    }

    /// Compiles again, since that is due. Returns the time of compilation.
    pub(crate) async fn recompile(&mut self) -> Duration {
        self.compile(Vec::new()).await
    }

    /// Compiles until what is given is recorded, as far as that is possible now.
    async fn compile(&mut self, updates: Vec<SourceUpdate>) -> Duration {
        if let Some(recorder) = &mut self.recorder
            && let Some(stored) = recorder.load().await
        {
            if recorder.is_shared() {
                self.store.adopt_record(stored, record_time());
            } else {
                self.store.set_record(stored);
            }
        }
        let (mut outcome, mut took) = self.compile_once(updates).await;
        let mut records = 0;
        while self.save_record(&outcome, records).await {
            records += 1;
            let (next, more) = self.compile_once(Vec::new()).await;
            (outcome, took) = (next, took + more);
        }
        let status = self.status.clone();
        spawn_blocking(move || {
            // Comparing the diagnostics of thousands of manifests and dropping the previous result is slow, too.
            let before = status.compiled.load_full();
            log_changes(&before, &outcome);
            status.compiled.store(Arc::new(outcome));
        })
        .await;
        self.status.update_health();
        took
    }

    async fn compile_once(&mut self, updates: Vec<SourceUpdate>) -> (CompileOutcome, Duration) {
        let mut store = std::mem::take(&mut self.store);
        let is_reachable = self.status.unreachable.load().is_none();
        let waits_for_reads = self.began.elapsed() < FAILED_READS_TIMEOUT;
        let work = spawn_blocking(move || {
            let start = Instant::now();
            for update in updates {
                store.update(update);
            }
            if !waits_for_reads {
                store.accept_failed_reads();
            }
            store.set_now(record_time());
            store.set_reachable(is_reachable);
            let outcome = store.compile();
            (store, outcome, start.elapsed())
        });
        let (store, outcome, took) = work.await;
        self.store = store;
        (outcome, took)
    }

    /// Stores the record that follows from a compilation, after so many others; returns whether the next compilation has
    /// another record.
    async fn save_record(&mut self, outcome: &CompileOutcome, records: usize) -> bool {
        let Some(recorder) = &mut self.recorder else { return false };
        let Some(next) = &outcome.next_record else {
            recorder.rest();
            return false;
        };
        if records == MAX_RECORDS {
            recorder.postpone();
            return false;
        }
        let Some(stored) = recorder.save(next).await else { return false };
        if Arc::ptr_eq(&stored, next) {
            self.store.set_record(stored);
        } else {
            self.store.adopt_record(stored, record_time());
        }
        true
    }
}

/// The time, in whole milliseconds: it is written to the record.
fn record_time() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}

/// Logs new diagnostics and newly faulty objects.
fn log_changes(before: &CompileOutcome, now: &CompileOutcome) {
    // Both are sorted.
    let is_new = |diagnostic: &&Diagnostic| before.diagnostics.binary_search(diagnostic).is_err();
    for diagnostic in now.diagnostics.iter().filter(is_new) {
        if diagnostic.is_error() {
            tracing::error!(event = "manifest_refused", "{diagnostic}");
        } else {
            tracing::warn!(event = "manifest_warning", "{diagnostic}");
        }
    }
    if now.slices_unverified && !before.slices_unverified {
        tracing::warn!(
            event = "slices_unverified",
            "tenancy is strict, but the source has no Pod: addresses of EndpointSlices are taken as they are"
        );
    }
    for (id, faulty) in now.faulty.iter().filter(|(id, faulty)| before.faulty.get(*id) != Some(faulty)) {
        let effect = if faulty.has_last_good { "it stays in force as it was last read" } else { "it is set aside" };
        tracing::error!(event = "object_refused", object = %id, "{id} is not in force as written: {effect}");
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use tokio::time::timeout;

    use super::*;

    /// `count` Services, each with the same invalid field, so that there are many diagnostics to compare.
    fn manifests(count: u32, port: &str) -> String {
        let mut text = String::new();
        for n in 0..count {
            let _ = write!(
                text,
                "---\napiVersion: v1\nkind: Service\n\
                 metadata: {{name: s{n}, namespace: a, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
                 spec: {{type: LoadBalancer, ports: [{{port: {port}}}]}}\n\
                 status: {{loadBalancer: {{ingress: [{{ip: 100.0.{}.{}}}]}}}}\n",
                n >> 8,
                n & 255
            );
        }
        text
    }

    #[tokio::test]
    async fn compiling_a_large_source_does_not_block_the_calling_thread() {
        let mut intake = SourceIngester::new("a test".to_owned(), ManifestStore::default());
        for port in ["80", "70000", "70001"] {
            let changed = vec![("x.yaml".into(), Ok(manifests(1500, port).into()))];
            let update = SourceUpdate { full: true, changed, ..SourceUpdate::default() };
            let worked = crate::stalls::thread_cpu_time();
            let took = intake.ingest([SourceEvent::Update(update)]).await.unwrap();
            let worked = crate::stalls::thread_cpu_time().saturating_sub(worked);
            assert!(worked < took / 10, "this thread worked for {worked:?} of {took:?}");
        }
    }

    /// How long a test checks that nothing is due.
    const SHORT: Duration = Duration::from_millis(100);

    /// A source whose second file can't be read at the moment.
    async fn partly_read() -> SourceIngester {
        let mut intake = SourceIngester::new("a test".to_owned(), ManifestStore::default());
        let failed = Err("can't be read: too many open files".to_owned());
        let changed = vec![("x.yaml".into(), Ok(manifests(1, "80").into())), ("y.yaml".into(), failed)];
        let update = SourceUpdate { full: true, changed, has_failed_reads: true, ..SourceUpdate::default() };
        intake.ingest([SourceEvent::Update(update)]).await.unwrap();
        let (status, reason) = (intake.status(), intake.status().health.load().waiting_reason().unwrap());
        assert!(status.compiled.load().placement.is_none(), "it would take from gateways what is in y.yaml");
        let because = "y.yaml: can't be read: too many open files; it is read again in a moment";
        assert_eq!(reason, format!("the source has no policy yet: {because}"));
        assert!(timeout(SHORT, intake.due()).await.is_err(), "it waits");
        intake
    }

    /// The number of VIPs in force.
    fn vips(intake: &SourceIngester) -> Option<usize> {
        intake.status().compiled.load().placement.as_ref().map(|placement| placement.vips.iter().count())
    }

    #[tokio::test]
    async fn a_first_policy_waits_for_a_file_until_it_can_be_read() {
        let mut intake = partly_read().await;
        let changed = vec![("y.yaml".into(), Ok(manifests(2, "80").into()))];
        // The first Service is the other file's, too.
        let update = SourceUpdate { changed, ..SourceUpdate::default() };
        intake.ingest([SourceEvent::Update(update)]).await.unwrap();
        assert_eq!((vips(&intake), intake.status().health.load().waiting), (Some(2), false));
    }

    #[tokio::test]
    async fn a_first_policy_waits_not_for_ever_for_a_file_that_cannot_be_read() {
        let mut intake = partly_read().await;
        intake.began -= FAILED_READS_TIMEOUT;
        timeout(SHORT, intake.due()).await.expect("it is due");
        intake.recompile().await;
        assert_eq!(vips(&intake), Some(1));
        assert!(!intake.status().health.load().is_healthy(), "y.yaml is still reported");
    }
}
