//! Calls of a provider's API: authorized, limited in rate, repeated where that is safe, and counted.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hyper::header::RETRY_AFTER;
use hyper::{Request, Response};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};
use vipgate_common::{Rate, TokenBucket, delay_after, jittered};

use crate::credential::{Authorize, Cache};
use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, HttpError};

/// Attempts of a call at most.
const MAX_ATTEMPTS: u32 = 4;
/// First and longest delay between attempts.
pub(crate) const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));
/// Time that a call may wait for its turn and between attempts, in total; a provider that asks for more fails it.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// Pages of a list at most: more than a quota of addresses can be.
const MAX_PAGES: usize = 100;

/// An operation of an API.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    /// Its name, as the provider has it.
    pub(crate) name: &'static str,
    /// Whether it changes nothing, so that it can be repeated when its response is lost.
    pub(crate) is_read: bool,
    /// Attempts at most.
    pub(crate) attempts: u32,
    pub(crate) rate: Rate,
}

impl Operation {
    /// A read: 10 a second.
    pub(crate) const fn read(name: &'static str) -> Self {
        Self {
            name,
            is_read: true,
            attempts: MAX_ATTEMPTS,
            rate: Rate { interval: Duration::from_millis(100), burst: 40 },
        }
    }

    /// A change: 5 a second.
    pub(crate) const fn write(name: &'static str) -> Self {
        Self {
            name,
            is_read: false,
            attempts: MAX_ATTEMPTS,
            rate: Rate { interval: Duration::from_millis(200), burst: 100 },
        }
    }

    /// The same without another attempt, except with new credentials.
    pub(crate) const fn once(self) -> Self {
        Self { attempts: 1, ..self }
    }
}

/// Operation, and `OK` or a code.
type Outcome = (&'static str, String);

/// Calls by operation and outcome, with their time.
#[derive(Debug, Default)]
pub struct CallMeter {
    calls: Mutex<BTreeMap<Outcome, (u64, Duration)>>,
}

/// Maximum codes of one provider that are counted apart; others are `other`.
const MAX_CODES: usize = 200;

/// Calls of an operation with the same outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallSample {
    pub operation: &'static str,
    /// `OK`, or the provider's code.
    pub code: String,
    /// Their number.
    pub count: u64,
    /// Their time in total.
    pub time: Duration,
}

impl CallMeter {
    /// Counts a call.
    pub(crate) fn record(&self, operation: &'static str, code: &str, time: Duration) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (operation, code.to_owned());
        let is_known = calls.len() < MAX_CODES || calls.contains_key(&key);
        let (count, total) = calls.entry(if is_known { key } else { (operation, "other".to_owned()) }).or_default();
        *count += 1;
        *total += time;
    }

    /// The calls until now.
    pub fn samples(&self) -> Vec<CallSample> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let sample = |((operation, code), (count, time)): (&Outcome, &(u64, Duration))| CallSample {
            operation,
            code: code.clone(),
            count: *count,
            time: *time,
        };
        calls.iter().map(sample).collect()
    }
}

/// A client of an API.
pub(crate) struct Api<A: Authorize> {
    http: HttpClient,
    source: A,
    credentials: Cache<A::Credential>,
    /// By operation.
    buckets: Mutex<HashMap<&'static str, TokenBucket>>,
    meter: Arc<CallMeter>,
    /// What a response that isn't a success means.
    error: fn(&'static str, &Response<Bytes>) -> CloudError,
}

impl<A: Authorize> fmt::Debug for Api<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Api { .. }")
    }
}

impl<A: Authorize> Api<A> {
    pub(crate) fn new(
        source: A,
        meter: Arc<CallMeter>,
        error: fn(&'static str, &Response<Bytes>) -> CloudError,
    ) -> Self {
        Self { http: HttpClient::new(), source, credentials: Cache::default(), buckets: Mutex::default(), meter, error }
    }

    /// Sends a request until there is an answer that another attempt wouldn't change. A change is sent again only if it was
    /// certainly not carried out.
    pub(crate) async fn call(
        &self,
        operation: Operation,
        request: &Request<Bytes>,
    ) -> Result<Response<Bytes>, CloudError> {
        let (mut waited, mut failures, mut is_refused) = (Duration::ZERO, 0, false);
        loop {
            let turn = self.with_bucket(operation, TokenBucket::take);
            let error = if waited + turn > MAX_WAIT {
                CloudError::new(ErrorKind::Throttled, operation.name, "RateLimit", "too many requests are waiting here")
            } else {
                sleep(turn).await;
                waited += turn;
                // On the heap: the futures of all actions contain it.
                match Box::pin(self.attempt(operation, request, is_refused)).await {
                    Ok(response) => return Ok(response),
                    Err(error) => error,
                }
            };
            failures += 1;
            let credentials_expired = error.kind == ErrorKind::Credentials && !is_refused;
            let is_repeatable = error.kind.is_transient() || operation.is_read && error.kind == ErrorKind::Unknown;
            let delay = error.retry_after.unwrap_or_default().max(if credentials_expired {
                Duration::ZERO
            } else {
                jittered(delay_after(failures - 1, BACKOFF), getrandom::u32())
            });
            if let Some(after) = error.retry_after {
                self.with_bucket(operation, |bucket, now| bucket.hold(now + after));
            }
            if failures >= operation.attempts.max(1 + u32::from(credentials_expired))
                || waited + delay > MAX_WAIT
                || !(is_repeatable || credentials_expired)
            {
                return Err(error);
            }
            is_refused |= credentials_expired;
            sleep(delay).await;
            waited += delay;
        }
    }

    fn with_bucket<T>(&self, operation: Operation, apply: impl FnOnce(&mut TokenBucket, std::time::Instant) -> T) -> T {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = buckets.entry(operation.name).or_insert_with(|| TokenBucket::new(operation.rate));
        apply(bucket, Instant::now().into_std())
    }

    async fn attempt(
        &self,
        operation: Operation,
        request: &Request<Bytes>,
        is_refused: bool,
    ) -> Result<Response<Bytes>, CloudError> {
        let mut request = request.clone();
        let credential = self.credentials.get(is_refused, self.source.fetch()).await?;
        self.source.authorize(credential, &mut request)?;
        let began = Instant::now();
        let outcome = match self.http.send(request).await {
            Ok(response) if response.status().is_success() => Ok(response),
            Ok(response) => {
                let error = (self.error)(operation.name, &response);
                let after = error.retry_after.or_else(|| retry_after(&response));
                Err(error.with_retry_after(after))
            }
            Err(HttpError::NotSent(text)) => {
                Err(CloudError::new(ErrorKind::Unavailable, operation.name, "NotReachable", &text))
            }
            Err(HttpError::NoResponse(text)) => {
                Err(CloudError::new(ErrorKind::Unknown, operation.name, "NoResponse", &text))
            }
        };
        let code = outcome.as_ref().map_or_else(|error| error.code.as_str(), |_| "OK");
        self.meter.record(operation.name, code, began.elapsed());
        outcome
    }
}

/// All items of a list. `page` reads the page with a token, the first one without, and returns its items and the token of the next one.
pub(crate) async fn pages<T, F: Future<Output = Result<(Vec<T>, Option<String>), CloudError>>>(
    operation: Operation,
    page: impl Fn(Option<String>) -> F,
) -> Result<Vec<T>, CloudError> {
    let (mut all, mut token) = (Vec::new(), None);
    for _ in 0..MAX_PAGES {
        let (items, next) = page(token).await?;
        all.extend(items);
        token = next.filter(|token| !token.is_empty());
        if token.is_none() {
            return Ok(all);
        }
    }
    Err(CloudError::new(ErrorKind::Invalid, operation.name, "TooManyPages", "the list doesn't end"))
}

/// Content of a response that was a success. Of a change it is not known what happened when it can't be read.
pub(crate) fn decode<T: DeserializeOwned>(
    operation: &'static str,
    response: &Response<Bytes>,
) -> Result<T, CloudError> {
    serde_json::from_slice(response.body())
        .map_err(|error| CloudError::new(ErrorKind::Unknown, operation, "Malformed", &error.to_string()))
}

/// `Retry-After` in seconds (RFC 9110 section 10.2.3); providers send no dates.
pub(crate) fn retry_after(response: &Response<Bytes>) -> Option<Duration> {
    let value = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    value.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_list_is_read_to_its_last_page_and_has_one() {
        const LIST: Operation = Operation::read("list");
        let two = |token: Option<String>| async move {
            Ok((vec![token.clone()], Some(if token.is_none() { "2" } else { "" }.to_owned())))
        };
        assert_eq!(pages(LIST, two).await, Ok(vec![None, Some("2".to_owned())]));
        let endless = pages(LIST, |_| async { Ok((vec![()], Some("next".to_owned()))) }).await;
        assert_eq!(endless.map_err(|error| error.code), Err("TooManyPages".to_owned()));
    }
}
