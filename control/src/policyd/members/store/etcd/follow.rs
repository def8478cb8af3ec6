//! Follows what other servers write: everything once, then what comes after it; whatever ends the watch, from the beginning. What
//! comes late or twice does no harm: revisions say what is newer, and transactions what stands.

use std::time::Duration;

use etcd_client::{EventType, GetOptions, ResponseHeader, WatchOptions};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep, timeout};

use super::{Keys, Place, connect, explain};

/// How long a request may take.
const REQUEST: Duration = Duration::from_secs(2);
/// The first pause between attempts, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// So long nothing comes from a watch that is sound while any gateway beats; one without any loses nothing by being opened again.
const SILENCE: Duration = Duration::from_secs(20);

/// What stands somewhere.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) place: Place,
    pub(super) revision: i64,
    pub(super) value: Vec<u8>,
    /// Whether it was there before anybody looked.
    pub(super) is_old: bool,
}

/// Nobody listens any more.
struct Over;

/// Follows one member after the other until nobody listens any more.
pub(super) async fn follow(endpoints: Vec<String>, keys: Keys, sender: Sender<Seen>) {
    let mut pause = PAUSE.0;
    for endpoint in endpoints.iter().cycle() {
        let begun = Instant::now();
        let ended = tokio::select! {
            ended = follow_one(endpoint, &keys, &sender) => ended,
            () = sender.closed() => return,
        };
        let Ok(why) = ended else { return };
        tracing::debug!(endpoint, why, "other servers can't be followed");
        pause = if begun.elapsed() > PAUSE.1 { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        sleep(pause).await;
    }
}

/// Says why it has ended.
async fn follow_one(endpoint: &str, keys: &Keys, sender: &Sender<Seen>) -> Result<String, Over> {
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
        let Some(place) = keys.place(pair.key()) else { continue };
        let seen = Seen { place, revision: pair.mod_revision(), value: pair.value().to_vec(), is_old: true };
        sender.send(seen).await.map_err(|_| Over)?;
    }
    let next = all.header().map_or(0, ResponseHeader::revision) + 1;
    let options = WatchOptions::new().with_prefix().with_start_revision(next);
    let mut watching = client.watch_client();
    let mut watch = match timeout(REQUEST, watching.watch(keys.prefix.clone(), Some(options))).await {
        Ok(Ok(watch)) => watch,
        Ok(Err(error)) => return Ok(explain(&error)),
        Err(_) => return Ok("no answer".to_owned()),
    };
    loop {
        let response = match timeout(SILENCE, watch.message()).await {
            Ok(Ok(Some(response))) if !response.canceled() => response,
            Ok(Ok(_)) => return Ok("the watch has ended".to_owned()),
            Ok(Err(error)) => return Ok(explain(&error)),
            Err(_) => return Ok("nothing came".to_owned()),
        };
        // What is deleted by hand is noticed when it is in the way.
        let puts = response.events().iter().filter(|event| event.event_type() == EventType::Put);
        for pair in puts.filter_map(|event| event.kv()) {
            let Some(place) = keys.place(pair.key()) else { continue };
            let seen = Seen { place, revision: pair.mod_revision(), value: pair.value().to_vec(), is_old: false };
            sender.send(seen).await.map_err(|_| Over)?;
        }
    }
}
