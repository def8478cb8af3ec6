//! etcd as a source: the keys below a prefix are names, their values are texts.
//!
//! Everything is read at one revision, then what comes after it is watched. Whatever ends a watch is mended in one way:
//! read everything again. A compacted history, a member that died, an etcd that was restored from a backup need no
//! cases of their own then, and no deletion is lost. Of several members the first one that answers is followed.
//! Limits: plain http and no passwords.

mod backoff;
mod key;
mod member;
#[cfg(test)]
pub(crate) mod tests;
mod text;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep};

use self::backoff::Backoff;
use self::member::{Failure, Keys, Member, Watch};
use super::{Event, Update};
use crate::config::Etcd;

/// A watch that lasted this long was a good one: after it there is no reason to wait long.
const STEADY: Duration = Duration::from_secs(5);

/// Follows the keys below the prefix until nobody listens any more.
pub async fn follow(config: Etcd, events: Sender<Event>) {
    let keys = Keys::below(&config.prefix);
    let mut follower = Follower {
        endpoints: &config.endpoints,
        prefix: &config.prefix,
        keys,
        members: config.members_prefix(),
        events: &events,
        told: BTreeSet::new(),
        backoff: Backoff::new(),
    };
    tokio::select! {
        () = events.closed() => {}
        never = follower.run() => match never {},
    }
}

struct Follower<'a> {
    endpoints: &'a [String],
    /// What the names of manifests follow in their keys.
    prefix: &'a str,
    keys: Keys,
    /// What the keys begin with that servers write themselves: under a prefix without a slash, they are among those that are read.
    members: String,
    events: &'a Sender<Event>,
    /// Why etcd couldn't be asked since it was last read.
    told: BTreeSet<String>,
    backoff: Backoff,
}

impl Follower<'_> {
    async fn run(&mut self) -> Infallible {
        loop {
            match self.start().await {
                Ok((member, watch)) => {
                    let began = Instant::now();
                    let endpoint = member.endpoint().to_owned();
                    let failure = self.tell_changes(member, watch).await;
                    // No loss yet: another member, or the same one, may well be there to be read again.
                    tracing::debug!(endpoint, %failure, "the watch has ended, all keys are read again");
                    if began.elapsed() >= STEADY {
                        self.backoff = Backoff::new();
                    }
                }
                Err(failure) => self.tell_lost(&failure).await,
            }
            sleep(self.backoff.pause()).await;
        }
    }

    /// Reads everything, tells it, and watches what comes after it.
    async fn start(&mut self) -> Result<(Member, Watch), Failure> {
        let mut member = Member::first(self.endpoints, &self.keys).await?;
        let changed = member.read().await.map_err(|failure| failure.of(&member))?;
        tracing::debug!(endpoint = member.endpoint(), texts = changed.len(), "all keys are read");
        self.told.clear();
        self.tell(Update { whole: true, changed, ..Update::default() }).await;
        let watch = member.watch().await.map_err(|failure| failure.of(&member))?;
        Ok((member, watch))
    }

    /// Tells what changes, until something is wrong with the watch or with the member.
    async fn tell_changes(&self, mut member: Member, mut watch: Watch) -> Failure {
        let tell = async {
            loop {
                match watch.next().await {
                    Ok(response) if response.events().is_empty() => {}
                    Ok(response) => self.tell(text::update(response.events())).await,
                    Err(failure) => return failure,
                }
            }
        };
        // An update that is dropped here because its receiver was slow is part of what is read next.
        tokio::select! {
            failure = tell => failure,
            failure = member.silence() => failure,
        }
    }

    /// Tells what is there or has changed, but for what is no manifest.
    async fn tell(&self, mut update: Update) {
        update.changed.retain(|(name, _)| !name.starts_with(&self.members));
        update.gone.retain(|name| !name.starts_with(&self.members));
        for (name, text) in &mut update.changed {
            let conflict = text.as_ref().ok().and_then(|text| key::conflict(name.strip_prefix(self.prefix)?, text));
            if let Some(reason) = conflict {
                *text = Err(reason);
            }
        }
        if update.whole || !update.changed.is_empty() || !update.gone.is_empty() {
            self.send(Event::Update(update)).await;
        }
    }

    async fn tell_lost(&mut self, failure: &Failure) {
        tracing::debug!(%failure, "etcd can't be asked");
        let reason = format!(
            "etcd can't be asked: {failure}: see whether it runs, has a leader and is what `source.etcd.endpoints` names"
        );
        if self.told.insert(reason.clone()) {
            self.send(Event::Lost(reason)).await;
        }
    }

    async fn send(&self, event: Event) {
        // Fails when nobody listens any more, and that ends everything here.
        let _ = self.events.send(event).await;
    }
}
