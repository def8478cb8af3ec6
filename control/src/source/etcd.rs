//! etcd as a policy source: list and watch of the keys below a prefix.
//!
//! All keys are listed at one revision, then watched from the next one. Whatever ends the watch, all keys are listed
//! again: so compaction, a failed member and a restored cluster need no special handling, and no deletion is lost. Of
//! several members the first one that responds is used.
//! Limits: plain http, no authentication.

mod decode;
mod key;
pub(super) mod member;
pub(crate) mod shared_key;
#[cfg(test)]
pub(crate) mod tests;

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep};
use vipgate_common::{Backoff, LoggedErrors, jittered};

use self::member::{EtcdError, KeyRange, Member, Watch};
use super::{EntryContent, SourceEvent, SourceUpdate};
use crate::config::Etcd;

/// A watch of this duration resets the backoff.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(5);

/// Lists and watches the keys below the prefix until the receiver is dropped.
pub async fn watch_prefix(config: Etcd, events: Sender<SourceEvent>) {
    let keys = KeyRange::with_prefix(&config.prefix);
    let mut reflector = Reflector {
        endpoints: &config.endpoints,
        prefix: &config.prefix,
        keys,
        membership: config.membership_prefix(),
        events: &events,
        reported: LoggedErrors::default(),
        backoff: Backoff::default(),
    };
    tokio::select! {
        () = events.closed() => {}
        never = reflector.run() => match never {},
    }
}

struct Reflector<'a> {
    endpoints: &'a [String],
    /// The key prefix of manifests.
    prefix: &'a str,
    keys: KeyRange,
    /// The key prefix of membership records and of the record of addresses, which policy servers write. If `prefix` has
    /// no trailing slash, they are listed too.
    membership: String,
    events: &'a Sender<SourceEvent>,
    /// Errors reported since the last successful listing.
    reported: LoggedErrors,
    backoff: Backoff,
}

impl Reflector<'_> {
    async fn run(&mut self) -> Infallible {
        loop {
            match self.list().await {
                Ok((member, watch)) => {
                    let start = Instant::now();
                    let endpoint = member.endpoint().to_owned();
                    let error = self.watch(member, watch).await;
                    // Not reported: a member may be available for listing again.
                    tracing::debug!(endpoint, %error, "the watch has ended; listing all keys again");
                    if start.elapsed() >= BACKOFF_RESET_AFTER {
                        self.backoff.reset();
                    }
                }
                Err(error) => self.report_unreachable(&error).await,
            }
            sleep(jittered(self.backoff.next_delay(), getrandom::u32())).await;
        }
    }

    /// Lists all keys, sends them as a full update, and opens a watch from the next revision.
    async fn list(&mut self) -> Result<(Member, Watch), EtcdError> {
        let mut member = Member::connect_any(self.endpoints, &self.keys).await?;
        let changed = member.list().await.map_err(|error| error.at_member(&member))?;
        tracing::debug!(endpoint = member.endpoint(), texts = changed.len(), "listed all keys");
        self.reported.clear();
        self.send_update(SourceUpdate { full: true, changed, ..SourceUpdate::default() }).await;
        let watch = member.watch().await.map_err(|error| error.at_member(&member))?;
        Ok((member, watch))
    }

    /// Sends changes until the watch or the member fails.
    async fn watch(&self, mut member: Member, mut watch: Watch) -> EtcdError {
        let changes = async {
            loop {
                match watch.next().await {
                    Ok(response) if response.events().is_empty() => {}
                    Ok(response) => self.send_update(decode::decode_events(response.events())).await,
                    Err(error) => return error,
                }
            }
        };
        // An update dropped here, because its receiver is slow, is contained in the next listing.
        tokio::select! {
            error = changes => error,
            error = member.until_unhealthy() => error,
        }
    }

    /// Sends an update without what policy servers write; an entry whose key doesn't match its manifest becomes an error.
    async fn send_update(&self, mut update: SourceUpdate) {
        update.changed.retain(|(name, _)| !name.starts_with(&self.membership));
        update.removed.retain(|name| !name.starts_with(&self.membership));
        for (name, content) in &mut update.changed {
            let Ok(EntryContent::Text(text)) = content else { continue };
            let conflict = name.strip_prefix(self.prefix).and_then(|key| key::mismatch(key, text));
            if let Some(reason) = conflict {
                *content = Err(reason);
            }
        }
        if update.full || !update.changed.is_empty() || !update.removed.is_empty() {
            self.send(SourceEvent::Update(update)).await;
        }
    }

    async fn report_unreachable(&mut self, error: &EtcdError) {
        tracing::debug!(%error, "etcd is unreachable");
        let reason =
            format!("can't read etcd: {error}: check that it runs, has a leader and matches `source.etcd.endpoints`");
        if self.reported.is_new(&reason) {
            self.send(SourceEvent::Unreachable(reason)).await;
        }
    }

    async fn send(&self, event: SourceEvent) {
        // Fails when the receiver is dropped, which ends `follow`.
        let _ = self.events.send(event).await;
    }
}
