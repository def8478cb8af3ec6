//! The task that writes Events. One that is repeated increases the count of the first one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event as ApiEvent, EventSource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_common::{LoggedErrors, TokenBucket};

use super::{ObjectEvent, ObjectEvents};
use crate::config::KubernetesSource;
use crate::policyd::leader::WRITE_RATE;
use crate::source::kubernetes::{ReusedClient, request};

/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of Events whose counts are remembered; the API server forgets Events after an hour.
const MAX_REMEMBERED: usize = 4096;
/// Maximum length of an object's name in that of an Event, which has a suffix and at most 253 characters.
const MAX_NAME: usize = 230;
/// The component that Events are from.
const COMPONENT: &str = "vipgate-policyd";

struct Recorder {
    client: ReusedClient,
    queue: Arc<ObjectEvents>,
    /// How often each Event was written, by name.
    counts: HashMap<String, i32>,
    bucket: TokenBucket,
    reported: LoggedErrors,
}

/// Writes recorded Events until `stop` is set. One that can't be written is lost.
pub(in crate::policyd) async fn run(
    source: KubernetesSource,
    queue: Arc<ObjectEvents>,
    mut stop: watch::Receiver<bool>,
) {
    let mut recorder = Recorder {
        client: ReusedClient::new(source),
        queue,
        counts: HashMap::new(),
        bucket: TokenBucket::new(WRITE_RATE),
        reported: LoggedErrors::default(),
    };
    tokio::select! {
        () = recorder.write_all() => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

impl Recorder {
    async fn write_all(&mut self) {
        loop {
            let event = self.queue.next().await;
            sleep(self.bucket.take(Instant::now())).await;
            match self.write(&event).await {
                Ok(()) => {
                    self.queue.written.increment();
                    self.reported.clear();
                }
                Err(error) => {
                    self.queue.failed.increment();
                    self.report(&error);
                    self.client.discard();
                }
            }
        }
    }

    async fn write(&mut self, event: &ObjectEvent) -> Result<(), String> {
        let client = self.client.get().await.map_err(|error| error.to_string())?;
        let events: Api<ApiEvent> = Api::namespaced(client, event.object.event_namespace());
        let (name, now) = (event_name(event), Timestamp::now());
        if self.counts.len() >= MAX_REMEMBERED && !self.counts.contains_key(&name) {
            self.counts.clear();
        }
        if let Entry::Occupied(mut count) = self.counts.entry(name.clone()) {
            let next = count.get().saturating_add(1);
            let patch = Patch::Merge(json!({"count": next, "lastTimestamp": Time(now)}));
            match request(REQUEST_TIMEOUT, events.patch(&name, &PatchParams::default(), &patch)).await {
                Ok(_) => {
                    count.insert(next);
                    return Ok(());
                }
                // The API server has forgotten it.
                Err(error) if error.code() == Some(404) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        let api_event = api_event(event, name.clone(), now);
        match request(REQUEST_TIMEOUT, events.create(&PostParams::default(), &api_event)).await {
            // Another server, or this one before a restart, has written the same.
            Err(error) if error.code() != Some(409) => return Err(error.to_string()),
            Ok(_) | Err(_) => {}
        }
        self.counts.insert(name, 1);
        Ok(())
    }

    fn report(&mut self, error: &str) {
        if self.reported.is_new(error) {
            tracing::warn!(
                event = "event_failed",
                error,
                "an Event can't be written: check the API server and the account's rights (`create` and `patch` of \
                 events)"
            );
        }
    }
}

/// A name that is the same for the same Event on every server.
fn event_name(event: &ObjectEvent) -> String {
    let mut hasher = DefaultHasher::new();
    event.hash(&mut hasher);
    let name = &event.object.name;
    format!("{}.{:016x}", &name[..name.floor_char_boundary(MAX_NAME)], hasher.finish())
}

fn api_event(event: &ObjectEvent, name: String, now: Timestamp) -> ApiEvent {
    ApiEvent {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(event.object.event_namespace().to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: event.object.to_api(),
        type_: Some(if event.is_warning { "Warning" } else { "Normal" }.to_owned()),
        reason: Some(event.reason.clone()),
        message: Some(event.message.clone()),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        count: Some(1),
        source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: None }),
        ..ApiEvent::default()
    }
}
