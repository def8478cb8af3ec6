//! Against a server in this process that says and hears what each test wants.

mod cached;
mod crowds;
mod follows;
mod large;
mod refuses;
mod returns;
mod server;
mod unreachable;

use std::path::Path;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::server::{Server, Talk};
use super::*;
use crate::policy::Viewer;
use crate::xds::fixtures::{Told, deal, ip, key, response, responses};
use crate::xds::resource::Kind;

/// Far more than anything takes on a slow machine.
const LONG: Duration = Duration::from_secs(20);
/// So long nothing happens where nothing should.
const SILENCE: Duration = Duration::from_millis(200);

/// The gateway, which is where its configuration says.
fn viewer() -> Viewer {
    Viewer { name: "g1".into(), node: "n1".into(), zone: "z1".into(), ..Viewer::default() }
}

/// A gateway that follows a server and answers as the test wants.
struct Gateway {
    events: mpsc::Receiver<Event>,
    status: Arc<ArcSwap<ServerStatus>>,
    task: JoinHandle<()>,
}

/// A server at this port, and a cache in this directory.
fn plain(port: u16, folder: &Path) -> PolicyServer {
    let cache = folder.join("policy.cache");
    PolicyServer { url: format!("http://127.0.0.1:{port}"), ca: None, cert: None, key: None, cache }
}

impl Gateway {
    /// One that follows, and what its cache knew.
    fn start(server: PolicyServer) -> (Self, Option<Offer>) {
        let (sender, events) = mpsc::channel(4);
        let (client, offer) = Client::open(viewer(), server, sender);
        let status = client.status();
        (Self { events, status, task: tokio::spawn(client.run()) }, offer)
    }

    async fn event(&mut self) -> Event {
        timeout(LONG, self.events.recv()).await.expect("an event in time").expect("the client lives")
    }

    async fn offer(&mut self) -> (Offer, Answer) {
        match self.event().await {
            Event::Offer(offer, answer) => (*offer, answer),
            Event::Refused(reason) => panic!("refused: {reason}"),
        }
    }

    /// Puts the next offer in force.
    async fn takes(&mut self) -> Offer {
        let (offer, answer) = self.offer().await;
        answer.send(Ok(())).unwrap();
        offer
    }

    async fn refused(&mut self) -> String {
        match self.event().await {
            Event::Refused(reason) => reason,
            Event::Offer(offer, _) => panic!("an offer: {offer:?}"),
        }
    }

    async fn hears_nothing_for(&mut self, long: Duration) -> bool {
        timeout(long, self.events.recv()).await.is_err()
    }

    /// Waits for a status.
    async fn is(&self, what: impl Fn(&ServerStatus) -> bool) -> ServerStatus {
        let wait = async {
            loop {
                let status = self.status.load_full();
                if what(&status) {
                    return (*status).clone();
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, wait).await.expect("a status in time")
    }

    /// Ends, and leaves its cache to others.
    async fn stop(self) {
        drop(self.events);
        timeout(LONG, self.task).await.expect("it ends").unwrap();
    }
}

/// A gateway that has put in force what a server has.
struct Pair {
    gateway: Gateway,
    server: Server,
    talk: Talk,
    folder: TempDir,
}

impl Pair {
    /// That has nothing yet.
    async fn new() -> Self {
        let (folder, mut server) = (tempfile::tempdir().unwrap(), Server::start());
        let (gateway, offer) = Gateway::start(plain(server.port, folder.path()));
        assert!(offer.is_none());
        let mut talk = server.talk().await;
        talk.subscriptions().await;
        Self { gateway, server, talk, folder }
    }

    async fn with(told: &Told) -> Self {
        let mut pair = Self::new().await;
        pair.talk.tell(told, &Told::default()).await;
        pair.gateway.takes().await;
        for _ in Kind::ALL {
            pair.talk.accepted().await;
        }
        pair
    }
}
