//! Against real servers of etcd.

mod lost;
pub(crate) mod server;
mod told;

use std::collections::BTreeMap;
use std::sync::Arc;

use etcd_client::{TxnOp, WatchOptions};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::server::{LONG, Server, free_port};
use super::*;

type Texts = BTreeMap<Arc<str>, Result<String, String>>;

/// What one who listens knows.
struct Listener {
    events: Receiver<Event>,
    follower: JoinHandle<()>,
    texts: Texts,
}

impl Listener {
    fn to(endpoints: impl Into<Vec<String>>) -> Self {
        let (sender, events) = channel(4);
        let config = Etcd { endpoints: endpoints.into(), prefix: "/vipgate/".into() };
        Self { events, follower: tokio::spawn(follow(config, sender)), texts: Texts::new() }
    }

    async fn next(&mut self) -> Event {
        let event = timeout(LONG, self.events.recv()).await.expect("an event in time").expect("the follower lives");
        if let Event::Update(update) = &event {
            if update.whole {
                self.texts.clear();
            }
            self.texts.extend(update.changed.iter().cloned());
            self.texts.retain(|name, _| !update.gone.contains(name));
        }
        event
    }

    /// The next event, which is a change.
    async fn change(&mut self) -> Update {
        match self.next().await {
            Event::Update(update) if !update.whole => update,
            other => panic!("no change: {other:?}"),
        }
    }

    /// The next event, which is a loss.
    async fn lost(&mut self) -> String {
        match self.next().await {
            Event::Lost(reason) => reason,
            Event::Update(update) => panic!("no loss: {update:?}"),
        }
    }

    /// The next event that is no loss; it is all there is.
    async fn whole(&mut self) -> Update {
        loop {
            match self.next().await {
                Event::Update(update) if update.whole => return update,
                Event::Update(update) => panic!("a part: {update:?}"),
                Event::Lost(_) => {}
            }
        }
    }

    fn knows(&self, texts: &[(&str, &str)]) -> bool {
        self.texts == texts.iter().map(|(name, text)| ((*name).into(), Ok((*text).into()))).collect()
    }

    async fn is_quiet(&mut self) -> bool {
        timeout(Duration::from_millis(300), self.events.recv()).await.is_err()
    }
}

fn good(texts: &[(&str, &str)]) -> Vec<(Arc<str>, Result<String, String>)> {
    texts.iter().map(|(name, text)| ((*name).into(), Ok((*text).into()))).collect()
}
