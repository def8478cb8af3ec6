//! What a gateway refuses, at its stream: which publication it is sent. One that refuses nothing gets the common one;
//! another one a variant without what it refuses. Variants are built on blocking threads, few at a time, and for one
//! gateway during a part of the time, so that a gateway that refuses everything it gets costs little.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use vipgate_common::{Task, spawn_blocking};

use super::admission::{Admitted, Role};
use super::{End, Published, StreamTask};
use crate::policyd::set_aside::Refused;
use crate::xds::publication::Publication;
use crate::xds::publication::selection::Selection;

/// Maximum number of variants that are built at the same time.
const MAX_BUILDS: usize = 2;
/// A pause after a build is so many times as long as the build, up to a maximum.
const PAUSE_FACTOR: u32 = 10;
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// How long an update after a NACK waits for the answers to the other responses of the rejected one: what they reject,
/// too, is part of the update. Clients answer all of an update together.
const ANSWERS_TIMEOUT: Duration = Duration::from_millis(100);
/// Intervals, first and at most, at which rejected resources are sent again without any other reason.
const REPETITION: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(5));

/// Permits for builds.
static BUILDS: Semaphore = Semaphore::const_new(MAX_BUILDS);

/// A build, with the time that it took.
type Build = Task<(Publication, Duration)>;

/// The variants of a stream's publications.
#[derive(Debug, Default)]
pub(super) struct Variants {
    /// The last one, while anything is set aside.
    last: Option<Arc<Publication>>,
    build: Option<Build>,
    serials: u64,
    /// When a build may begin that has to wait.
    build_at: Option<Instant>,
    /// When a resource returns.
    return_at: Option<Instant>,
    /// When the client last rejected a response.
    rejected_at: Option<Instant>,
    /// When what it rejected is sent again, and how long after the last time.
    repeat_at: Option<Instant>,
    repeat_interval: Duration,
}

impl Variants {
    /// Waits until the running build ends; forever if there is none. Cancel-safe.
    pub(super) async fn built(&mut self) -> Duration {
        let Some(build) = &mut self.build else { return std::future::pending().await };
        let (publication, elapsed) = build.await;
        self.build = None;
        self.last = Some(Arc::new(publication));
        elapsed
    }

    /// The publication for a client that has none yet, if it isn't the common one.
    pub(super) fn last(&self) -> Option<&Arc<Publication>> {
        self.last.as_ref()
    }

    /// When something is to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        [self.build_at, self.return_at, self.repeat_at].into_iter().flatten().min()
    }

    /// The client has rejected a response.
    fn rejected(&mut self) {
        let now = Instant::now();
        self.rejected_at = Some(now);
        self.repeat_interval = self.repeat_interval.max(REPETITION.0);
        self.repeat_at.get_or_insert(now + self.repeat_interval);
    }

    /// The client has accepted everything.
    pub(super) fn accepted(&mut self) {
        (self.repeat_at, self.repeat_interval) = (None, Duration::ZERO);
    }
}

impl StreamTask {
    /// The publication for this client; `None`: it is being built.
    pub(super) fn target(&mut self, current: &Arc<Publication>) -> Option<Arc<Publication>> {
        let Some(Admitted { role: Role::Gateway, name }) = &self.client else { return Some(current.clone()) };
        self.variants.build_at = None;
        let registry = &self.service.registry;
        let (selection, outdated) = registry.set_aside(name, current);
        for key in outdated {
            tracing::info!(event = "set_aside_over", gateway = name, resource = %key, "changed: it is set aside no more");
        }
        self.variants.return_at = registry.next_return(name).map(Instant::from_std);
        if selection.is_empty() {
            self.variants.last = None;
            return Some(current.clone());
        }
        let last = self.variants.last.clone().filter(|last| last.leaves_out(&selection));
        let is_current = last.as_ref().is_some_and(|last| last.number == current.number);
        if !is_current {
            self.start_build(current, selection);
        }
        // With publications in quick succession, an earlier one is better than none.
        let has_later = |it: &Publication| self.stream.publication().is_none_or(|sent| sent.number < it.number);
        last.filter(|last| is_current || has_later(last))
    }

    /// Starts to build a variant, unless one is being built or it is too early.
    fn start_build(&mut self, current: &Arc<Publication>, selection: Selection) {
        if self.variants.build.is_some() {
            return;
        }
        let now = Instant::now();
        let name = self.client.as_ref().map_or("", |client| &client.name);
        let earliest = self.service.registry.next_build(name).map(Instant::from_std);
        if let Some(at) = earliest.filter(|at| *at > now) {
            self.variants.build_at = Some(at);
            return;
        }
        self.variants.serials += 1;
        let (current, serial) = (current.clone(), self.variants.serials);
        self.variants.build = Some(Task::spawn(async move {
            // The semaphore is never closed.
            let permit = BUILDS.acquire().await;
            let build = move || {
                // Also when the stream has ended: the thread is in use until then.
                let _permit = permit;
                let began = Instant::now();
                let variant = current.variant(Arc::new(selection), serial);
                (variant, began.elapsed())
            };
            spawn_blocking(build).await
        }));
    }

    /// A build has ended, after this time.
    pub(super) async fn handle_build(&mut self, elapsed: Duration, published: &mut Published) -> Result<(), End> {
        self.pause_builds(elapsed);
        self.handle_publication(published).await
    }

    fn pause_builds(&self, elapsed: Duration) {
        if let Some(client) = &self.client {
            self.service.registry.pause_builds(&client.name, (PAUSE_FACTOR * elapsed).min(MAX_PAUSE));
        }
    }

    /// Waits for the first publication of a client that has refused resources before.
    pub(super) async fn first_target(&mut self, published: &Published) -> Result<(), End> {
        loop {
            let Some(current) = published.borrow().clone() else { return Ok(()) };
            if self.target(&current).is_some() {
                return Ok(());
            }
            let at = self.variants.build_at;
            tokio::select! {
                elapsed = self.variants.built() => self.pause_builds(elapsed),
                () = tokio::time::sleep_until(at.unwrap_or_else(Instant::now)), if at.is_some() => {}
                () = self.sender.closed() => return Err(None),
            }
        }
    }

    /// Sets aside what a NACK names.
    pub(super) fn handle_nack(&mut self, name: &str, reason: &str, refused: Option<Refused>, current: &Publication) {
        self.variants.rejected();
        let Some(refused) = refused else { return };
        if self.service.registry.refuse(name, &refused, reason, current) {
            let resource = refused.key;
            tracing::warn!(event = "set_aside", gateway = name, %resource, reason, "set aside for this gateway alone");
            self.update_deadline = Some(Instant::now());
        }
    }

    /// Whether an update is to wait since the client hasn't answered all of a rejected one.
    pub(super) fn waits_for_answers(&mut self) -> bool {
        let until = self.variants.rejected_at.map(|at| at + ANSWERS_TIMEOUT);
        let until = until.filter(|until| self.stream.awaits_answers() && Instant::now() < *until);
        self.update_deadline = until.or(self.update_deadline);
        until.is_some()
    }

    /// Does what is due at a deadline of the variants.
    pub(super) async fn handle_deadline(&mut self, published: &mut Published) -> Result<(), End> {
        let now = Instant::now();
        // Derived again by the update.
        (self.variants.build_at, self.variants.return_at) = (None, None);
        if let Some(Admitted { role: Role::Gateway, name }) = &self.client
            && let Some(resource) = self.service.registry.return_due(name)
        {
            tracing::info!(event = "set_aside_over", gateway = name, %resource, "sent to the gateway again");
        }
        if self.variants.repeat_at.is_some_and(|at| at <= now) {
            self.variants.repeat_at = None;
            if let Some(update) = self.stream.repetition() {
                self.variants.repeat_interval = (2 * self.variants.repeat_interval).min(REPETITION.1);
                self.stream.publish(update);
                self.send_pending(published).await?;
            } else if self.stream.awaits_answers() {
                self.variants.repeat_at = Some(now + self.variants.repeat_interval);
            }
        }
        self.send_update(published).await
    }
}
