//! What becomes of writes: their numbers, what is logged, and when a failed write is tried again.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use vipgate_common::{LoggedErrors, delay_after};

use super::{ObjectReference, Purpose, Write};
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::policyd::stats::Counter;
use crate::source::kubernetes::RequestError;

/// How soon a failed write is tried again: at first, and at last.
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_mins(1));
const PURPOSES: [&str; 3] = ["addresses", "status", "events"];
const RESULTS: [&str; 4] = ["written", "conflict", "denied", "failed"];

/// Why a write has failed.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::policyd) enum WriteError {
    /// This server doesn't lead, or not for long enough, or stops: nothing was sent.
    NotLeader,
    /// It has failed before, and isn't due for this time: nothing was sent.
    Held(Duration),
    /// The object has changed, is gone, or another one has its name.
    Conflict,
    /// The account may not.
    Denied(String),
    /// The API server refuses it.
    Refused(String),
    /// There was no response: it may have been done.
    Unknown(String),
}

impl WriteError {
    pub(super) fn of(error: &RequestError) -> Self {
        let text = error.to_string();
        match error.code() {
            Some(404 | 409) => Self::Conflict,
            Some(401 | 403) => Self::Denied(text),
            Some(code @ 400..=499) if code != 429 => Self::Refused(text),
            _ => Self::Unknown(text),
        }
    }

    /// What people must know of it. The others are resolved by the next plan.
    fn reason(&self) -> Option<&str> {
        match self {
            Self::NotLeader | Self::Held(_) | Self::Conflict => None,
            Self::Denied(reason) | Self::Refused(reason) | Self::Unknown(reason) => Some(reason),
        }
    }
}

/// Numbers of writes by purpose and result.
#[derive(Debug, Default)]
pub(in crate::policyd) struct WriteCounts([[Counter; 4]; 3]);

impl WriteCounts {
    pub(super) fn count(&self, purpose: Purpose, error: Option<&WriteError>) {
        let [written, conflict, denied, failed] = &self.0[purpose as usize];
        let counter = match error {
            None => written,
            Some(WriteError::NotLeader | WriteError::Held(_) | WriteError::Conflict) => conflict,
            Some(WriteError::Denied(_)) => denied,
            Some(WriteError::Refused(_) | WriteError::Unknown(_)) => failed,
        };
        counter.increment();
    }

    /// Its metric.
    pub(in crate::policyd) fn family(&self) -> Family {
        let of_purpose = |(purpose, counters): (&str, &[Counter; 4])| {
            let labels = |result: &str| vec![("of", purpose.to_owned()), ("result", result.to_owned())];
            RESULTS.into_iter().zip(counters).map(|(result, count)| (labels(result), count.get())).collect::<Vec<_>>()
        };
        defined::WRITES.family(PURPOSES.into_iter().zip(&self.0).flat_map(of_purpose).collect())
    }
}

/// Writes that have failed.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// How often in a row, and until when they wait.
    waiting: HashMap<(Purpose, ObjectReference), (u32, Instant)>,
    /// Errors that were logged, until everything is written.
    reported: BTreeMap<Purpose, LoggedErrors>,
}

impl Failures {
    /// How long a write is still to wait. Those of Events never do.
    pub(super) fn wait(&self, write: &Write, now: Instant) -> Duration {
        let untils = keys(write).into_iter().flatten().filter_map(|key| self.waiting.get(&key));
        untils.map(|(_, until)| until.saturating_duration_since(now)).max().unwrap_or_default()
    }

    /// A write has succeeded or failed.
    pub(super) fn note(&mut self, write: &Write, error: Option<&WriteError>, now: Instant) {
        if let Some(reason) = error.and_then(WriteError::reason) {
            self.report(write.purpose, &write.title(), reason);
        }
        let Some([object, kind]) = keys(write) else { return };
        let Some(error) = error else {
            self.waiting.remove(&object);
            self.waiting.remove(&kind);
            return;
        };
        // Of ten thousand objects one finds out whether the account may write by now.
        let is_of_kind = write.purpose == Purpose::Status && matches!(error, WriteError::Denied(_));
        // An object that is gone isn't tried any more.
        self.waiting.retain(|_, (_, until)| now < *until + RETRY.1);
        let (failures, until) = self.waiting.entry(if is_of_kind { kind } else { object }).or_insert((0, now));
        *until = now + delay_after(*failures, RETRY);
        *failures = failures.saturating_add(1);
    }

    /// Logs an error once.
    pub(super) fn report(&mut self, purpose: Purpose, object: &str, error: &str) {
        if self.reported.entry(purpose).or_default().is_new(error) {
            let [event, failure, rights] = purpose.failure();
            tracing::warn!(event, object, error, "{failure}: check the API server and the account's rights ({rights})");
        }
    }

    /// Errors are logged again.
    pub(super) fn forget_reported(&mut self, purpose: Purpose) {
        self.reported.remove(&purpose);
    }
}

/// What a failure may be of: the object, or its kind in its namespace.
fn keys(write: &Write) -> Option<[(Purpose, ObjectReference); 2]> {
    let object = write.object.as_ref()?;
    let kind = ObjectReference { name: String::new(), uid: "".into(), ..object.clone() };
    Some([object.clone(), kind].map(|object| (write.purpose, object)))
}

#[cfg(test)]
mod tests;
