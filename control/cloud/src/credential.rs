//! Credentials that end: fetched when they are needed, kept, and renewed before their end.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hyper::Request;
use jiff::Timestamp;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::error::{CloudError, ErrorKind};

/// Longest time that a credential is kept: those without an end are fetched again, too.
const MAX_LIFETIME: Duration = Duration::from_hours(24 * 365);

/// Where the credentials of an API come from, and what they do to a request.
pub(crate) trait Authorize: Send + Sync {
    /// A token, or keys.
    type Credential: Clone + Send + Sync;

    fn fetch(&self) -> impl Future<Output = Result<Expiring<Self::Credential>, CloudError>> + Send;

    /// Signs a request, or adds a token.
    fn authorize(&self, credential: Self::Credential, request: &mut Request<Bytes>) -> Result<(), CloudError>;
}

/// A credential with its end.
pub(crate) struct Expiring<T> {
    pub(crate) value: T,
    renew_at: Instant,
    ends_at: Instant,
}

impl<T> Expiring<T> {
    /// One that is valid for this time from now on. It is renewed `renew_before` its end, or when three quarters of its time are
    /// over, whichever is later.
    pub(crate) fn new(value: T, lifetime: Duration, renew_before: Duration) -> Self {
        let (now, lifetime) = (Instant::now(), lifetime.min(MAX_LIFETIME));
        let renew_at = now + lifetime.saturating_sub(renew_before.min(lifetime / 4));
        Self { value, renew_at, ends_at: now + lifetime }
    }
}

/// The credential that there is now.
pub(crate) struct Cache<T>(Mutex<Option<Expiring<T>>>);

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Cache<T> {
    /// The credential; what `fetch` returns if it ends soon, or was refused.
    pub(crate) async fn get(
        &self,
        is_refused: bool,
        fetch: impl Future<Output = Result<Expiring<T>, CloudError>>,
    ) -> Result<T, CloudError> {
        // One renewal at a time: the others wait for it, and find the new one.
        let mut kept = self.0.lock().await;
        let now = Instant::now();
        let usable = kept.as_ref().filter(|it| !is_refused && it.ends_at > now);
        if let Some(it) = usable.filter(|it| it.renew_at > now) {
            return Ok(it.value.clone());
        }
        match fetch.await {
            Ok(new) => Ok(kept.insert(new).value.clone()),
            Err(error) => {
                // One that is still valid is better than none.
                let Some(it) = usable else { return Err(error) };
                tracing::warn!(%error, "the credentials can't be renewed yet");
                Ok(it.value.clone())
            }
        }
    }
}

/// Content of a file that somebody else renews, as Kubernetes does for tokens of service accounts: read each time.
pub(crate) async fn read_file(operation: &'static str, file: &Path) -> Result<String, CloudError> {
    let content = tokio::fs::read_to_string(file).await.map_err(|error| {
        CloudError::new(ErrorKind::Credentials, operation, "File", &format!("{}: {error}", file.display()))
    })?;
    Ok(content.trim().to_owned())
}

/// Time until an end that is said in RFC 3339; `None`: it isn't.
pub(crate) fn time_until(end: &str) -> Option<Duration> {
    let left = end.parse::<Timestamp>().ok()?.as_second() - Timestamp::now().as_second();
    Some(Duration::from_secs(u64::try_from(left).unwrap_or_default()))
}

/// Type of a form in a request.
pub(crate) const FORM: &str = "application/x-www-form-urlencoded";

/// A form, encoded.
pub(crate) fn form(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lifetime: Duration) -> Expiring<()> {
        Expiring::new((), lifetime, Duration::from_mins(5))
    }

    #[test]
    fn credentials_are_renewed_before_their_end() {
        for renew_before in [Duration::from_mins(5), Duration::from_secs(225)] {
            let long = Expiring::new((), Duration::from_hours(1), renew_before);
            assert_eq!(long.ends_at - long.renew_at, renew_before);
        }
        let short = of(Duration::from_secs(8));
        assert_eq!(short.ends_at - short.renew_at, Duration::from_secs(2));
        let endless = of(Duration::MAX);
        assert!(endless.ends_at > endless.renew_at);
    }

    #[tokio::test]
    async fn credentials_that_cannot_be_renewed_are_used_until_they_end() {
        let (now, cache) = (Instant::now(), Cache::default());
        let [past, future] = [now, now + Duration::from_hours(1)];
        let new = |value: u8, renew_at, ends_at| async move { Ok(Expiring { value, renew_at, ends_at }) };
        let failure = || async { Err(CloudError::new(ErrorKind::Unavailable, "x", "x", "")) };
        assert!(cache.get(false, failure()).await.is_err());
        assert_eq!(cache.get(false, new(1, future, future)).await.ok(), Some(1));
        assert_eq!(cache.get(false, new(2, future, future)).await.ok(), Some(1), "kept");
        assert!(cache.get(true, failure()).await.is_err(), "what was refused isn't used");
        assert_eq!(cache.get(true, new(3, past, future)).await.ok(), Some(3));
        assert_eq!(cache.get(false, failure()).await.ok(), Some(3), "better than none");
        assert_eq!(cache.get(false, new(4, past, past)).await.ok(), Some(4));
        assert!(cache.get(false, failure()).await.is_err(), "it has ended");
    }

    #[test]
    fn an_end_is_a_time_of_rfc_3339() {
        assert!(time_until("2999-01-01T00:00:00Z").is_some_and(|left| left > Duration::from_hours(24)));
        assert_eq!(time_until("2001-01-01T00:00:00Z"), Some(Duration::ZERO));
        assert_eq!(time_until("soon"), None);
    }
}
