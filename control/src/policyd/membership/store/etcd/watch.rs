//! etcd watch of other servers' writes: reads all keys, then watches from the next revision; starts again when the
//! watch ends. Late or duplicate events are harmless: revisions order them, and transactions compare revisions.

use std::time::Duration;

use etcd_client::{EventType, GetOptions, ResponseHeader, WatchOptions};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep, timeout};
use vipgate_common::Backoff;

use super::{KeyKind, Keys, connect, explain};

/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay between attempts; a longer watch resets it.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// A watch without events for this long is opened again: while any gateway sends heartbeats, a working watch has
/// events.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// A key with its value, as read or watched.
#[derive(Clone, Debug)]
pub(super) struct ObservedWrite {
    pub(super) kind: KeyKind,
    pub(super) revision: i64,
    pub(super) value: Vec<u8>,
    /// Whether it was in the store before the watch: its age is unknown.
    pub(super) is_initial: bool,
}

/// The receiver was dropped.
struct ReceiverDropped;

/// Watches one etcd endpoint after the other until the receiver is dropped.
pub(super) async fn watch(endpoints: Vec<String>, keys: Keys, sender: Sender<ObservedWrite>) {
    let mut backoff = Backoff::new(RETRY_DELAY);
    for endpoint in endpoints.iter().cycle() {
        let started = Instant::now();
        let end = tokio::select! {
            end = watch_endpoint(endpoint, &keys, &sender) => end,
            () = sender.closed() => return,
        };
        let Ok(error) = end else { return };
        tracing::debug!(endpoint, error, "the watch of the membership store has ended");
        if started.elapsed() > RETRY_DELAY.1 {
            backoff.reset();
        }
        sleep(backoff.next_delay()).await;
    }
}

/// Watches an endpoint; returns the error that ended the watch.
async fn watch_endpoint(
    endpoint: &str,
    keys: &Keys,
    sender: &Sender<ObservedWrite>,
) -> Result<String, ReceiverDropped> {
    let client = match connect(endpoint).await {
        Ok(client) => client,
        Err(error) => return Ok(explain(&error)),
    };
    let all = client.kv_client().get(keys.prefix.clone(), Some(GetOptions::new().with_prefix())).await;
    let all = match all {
        Ok(all) => all,
        Err(error) => return Ok(explain(&error)),
    };
    for pair in all.kvs() {
        let Some(kind) = keys.parse(pair.key()) else { continue };
        let write =
            ObservedWrite { kind, revision: pair.mod_revision(), value: pair.value().to_vec(), is_initial: true };
        sender.send(write).await.map_err(|_| ReceiverDropped)?;
    }
    let next = all.header().map_or(0, ResponseHeader::revision) + 1;
    let options = WatchOptions::new().with_prefix().with_start_revision(next);
    let mut watch_client = client.watch_client();
    let mut watch = match timeout(REQUEST_TIMEOUT, watch_client.watch(keys.prefix.clone(), Some(options))).await {
        Ok(Ok(watch)) => watch,
        Ok(Err(error)) => return Ok(explain(&error)),
        Err(_) => return Ok("no response".to_owned()),
    };
    loop {
        let response = match timeout(IDLE_TIMEOUT, watch.message()).await {
            Ok(Ok(Some(response))) if !response.canceled() => response,
            Ok(Ok(_)) => return Ok("the watch has ended".to_owned()),
            Ok(Err(error)) => return Ok(explain(&error)),
            Err(_) => return Ok("no events".to_owned()),
        };
        // Deletions by an operator show as a conflict of the next transaction.
        let puts = response.events().iter().filter(|event| event.event_type() == EventType::Put);
        for pair in puts.filter_map(|event| event.kv()) {
            let Some(kind) = keys.parse(pair.key()) else { continue };
            let write =
                ObservedWrite { kind, revision: pair.mod_revision(), value: pair.value().to_vec(), is_initial: false };
            sender.send(write).await.map_err(|_| ReceiverDropped)?;
        }
    }
}
