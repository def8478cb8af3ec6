//! Probe of the API server: whether it responds, and whether its state is the one that was listed.
//!
//! A watch says nothing while nothing changes, nor when its connection is cut; and it doesn't notice that a backup of
//! the cluster's state was restored.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ListParams, PartialObjectMeta};
use kube::{Api, Client};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep};
use vipgate_common::LoggedErrors;

use super::collection::REQUEST_TIMEOUT;
use super::request::{RequestError, request};

const INTERVAL: Duration = Duration::from_secs(2);
/// After an outage of this duration the client is built anew: its credentials may be others.
const MAX_OUTAGE: Duration = Duration::from_secs(30);

/// What a probe has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// The server responds.
    Reachable,
    /// It doesn't, and why.
    Unreachable(String),
    /// All collections must be listed again, and why.
    Stale(String),
}

/// Probes the API server, and sends each finding that differs from the one before, until the receiver is dropped.
pub(super) async fn run(client: Client, findings: Sender<Finding>) {
    let mut history = History::default();
    loop {
        sleep(INTERVAL).await;
        if let Some(finding) = history.record(revision(&client).await, Instant::now())
            && findings.send(finding).await.is_err()
        {
            return;
        }
    }
}

/// The uid of the cluster: that of its namespace `kube-system`, which is never replaced.
///
/// # Errors
/// If the server doesn't respond as it should.
pub(crate) async fn cluster_uid(client: &Client) -> Result<Option<String>, String> {
    let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let namespace = request(REQUEST_TIMEOUT, namespaces.get_opt("kube-system")).await;
    namespace.map(|namespace| namespace.and_then(|it| it.metadata.uid)).map_err(|error| error.to_string())
}

/// A small list with a quorum: its revision, if it is a number.
async fn revision(client: &Client) -> Result<Option<u64>, Failure> {
    let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    match request(REQUEST_TIMEOUT, namespaces.list(&ListParams::default().limit(1))).await {
        Ok(list) => Ok(list.metadata.resource_version.and_then(|revision| revision.parse().ok())),
        Err(RequestError::NoResponse(_)) => Err(Failure::Timeout),
        Err(error) => Err(Failure::Response(error.to_string())),
    }
}

/// Why a probe has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    /// No response: connections may be dead without saying so.
    Timeout,
    /// An error.
    Response(String),
}

#[derive(Debug, Default)]
struct History {
    /// The highest revision so far.
    revision: u64,
    /// The first failure since the last success.
    failed_since: Option<Instant>,
    has_timed_out: bool,
    /// The reasons that were reported.
    reported: LoggedErrors,
}

impl History {
    /// Records the outcome of a probe; returns a finding if it differs from the one before.
    fn record(&mut self, outcome: Result<Option<u64>, Failure>, now: Instant) -> Option<Finding> {
        let failure = match outcome {
            Ok(revision) => return self.succeeded(revision.unwrap_or(self.revision)),
            Err(failure) => failure,
        };
        let is_first = self.failed_since.is_none();
        let since = *self.failed_since.get_or_insert(now);
        let reason = match failure {
            Failure::Timeout => {
                self.has_timed_out = true;
                RequestError::NoResponse(REQUEST_TIMEOUT).to_string()
            }
            Failure::Response(reason) if is_first => {
                tracing::debug!(reason, "a probe has failed");
                return None;
            }
            Failure::Response(reason) => reason,
        };
        if now.duration_since(since) >= MAX_OUTAGE {
            return Some(Finding::Stale(reason));
        }
        self.reported.is_new(&reason).then_some(Finding::Unreachable(reason))
    }

    fn succeeded(&mut self, revision: u64) -> Option<Finding> {
        let (has_timed_out, was_reported) = (std::mem::take(&mut self.has_timed_out), self.reported.clear());
        self.failed_since = None;
        if revision < self.revision {
            let reason = format!("its state is older than before (revision {revision} after {})", self.revision);
            return Some(Finding::Stale(reason));
        }
        self.revision = revision;
        if has_timed_out {
            return Some(Finding::Stale("it responds again after a timeout".to_owned()));
        }
        was_reported.then_some(Finding::Reachable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> Result<Option<u64>, Failure> {
        Err(Failure::Response("connection refused".to_owned()))
    }

    #[test]
    fn one_failed_probe_is_no_outage() {
        let (mut history, now) = (History::default(), Instant::now());
        assert_eq!(history.record(refused(), now), None);
        assert_eq!(history.record(Ok(Some(7)), now), None);
        assert_eq!(history.record(refused(), now), None);
        assert_eq!(history.record(refused(), now), Some(Finding::Unreachable("connection refused".to_owned())));
        assert_eq!(history.record(refused(), now), None, "reported once");
        assert_eq!(history.record(Ok(Some(7)), now), Some(Finding::Reachable));
    }

    #[test]
    fn after_a_timeout_everything_is_listed_again() {
        let (mut history, now) = (History::default(), Instant::now());
        assert!(matches!(history.record(Err(Failure::Timeout), now), Some(Finding::Unreachable(_))));
        assert!(matches!(history.record(Ok(Some(7)), now), Some(Finding::Stale(_))));
        assert_eq!(history.record(Ok(Some(7)), now), None);
    }

    #[test]
    fn a_restored_state_is_listed_again() {
        let (mut history, now) = (History::default(), Instant::now());
        assert_eq!(history.record(Ok(Some(9)), now), None);
        assert_eq!(history.record(Ok(None), now), None, "a revision that is no number says nothing");
        assert!(matches!(history.record(Ok(Some(8)), now), Some(Finding::Stale(_))));
    }

    #[test]
    fn a_long_outage_builds_the_client_anew() {
        let (mut history, now) = (History::default(), Instant::now());
        assert_eq!(history.record(refused(), now), None);
        assert!(matches!(history.record(refused(), now + MAX_OUTAGE / 2), Some(Finding::Unreachable(_))));
        assert!(matches!(history.record(refused(), now + MAX_OUTAGE), Some(Finding::Stale(_))));
    }
}
