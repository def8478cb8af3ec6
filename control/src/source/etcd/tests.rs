//! Tests against real etcd servers.

mod failures;
pub(crate) mod server;
mod updates;

use std::collections::BTreeMap;
use std::sync::Arc;

use etcd_client::{TxnOp, WatchOptions};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::server::{EtcdServer, TEST_TIMEOUT, free_port};
use super::*;

type Texts = BTreeMap<Arc<str>, Result<EntryContent, String>>;

/// Receives events and tracks the state.
struct TestClient {
    events: Receiver<SourceEvent>,
    task: JoinHandle<()>,
    texts: Texts,
}

impl TestClient {
    fn connect(endpoints: impl Into<Vec<String>>) -> Self {
        let (sender, events) = channel(4);
        let config = Etcd { endpoints: endpoints.into(), prefix: "/vipgate/".into() };
        Self { events, task: tokio::spawn(watch_prefix(config, sender)), texts: Texts::new() }
    }

    async fn next(&mut self) -> SourceEvent {
        let event = timeout(TEST_TIMEOUT, self.events.recv()).await.expect("an event in time").expect("the task runs");
        if let SourceEvent::Update(update) = &event {
            if update.full {
                self.texts.clear();
            }
            self.texts.extend(update.changed.iter().cloned());
            self.texts.retain(|name, _| !update.removed.contains(name));
        }
        event
    }

    /// The next event, which must be a change.
    async fn change(&mut self) -> SourceUpdate {
        match self.next().await {
            SourceEvent::Update(update) if !update.full => update,
            other => panic!("not a change: {other:?}"),
        }
    }

    /// The next event, which must be unreachability.
    async fn unreachable(&mut self) -> String {
        match self.next().await {
            SourceEvent::Unreachable(reason) => reason,
            SourceEvent::Update(update) => panic!("not unreachable: {update:?}"),
        }
    }

    /// The next event other than unreachability, which must be a full update.
    async fn full_update(&mut self) -> SourceUpdate {
        loop {
            match self.next().await {
                SourceEvent::Update(update) if update.full => return update,
                SourceEvent::Update(update) => panic!("not a full update: {update:?}"),
                SourceEvent::Unreachable(_) => {}
            }
        }
    }

    fn has(&self, texts: &[(&str, &str)]) -> bool {
        self.texts == texts.iter().map(|(name, text)| ((*name).into(), Ok((*text).into()))).collect()
    }

    async fn is_quiet(&mut self) -> bool {
        timeout(Duration::from_millis(300), self.events.recv()).await.is_err()
    }
}

fn ok_texts(texts: &[(&str, &str)]) -> Vec<(Arc<str>, Result<EntryContent, String>)> {
    texts.iter().map(|(name, text)| ((*name).into(), Ok((*text).into()))).collect()
}
