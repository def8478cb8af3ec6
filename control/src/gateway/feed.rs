//! Where the gateway's policy comes from: files that it compiles itself, or a server that has done so. Both offer changes, and
//! are answered whether they are in force: what is in force is what the next change is computed from.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::spec::PolicySet;

use crate::policy::{Follower, Viewer};
use crate::source;
use crate::source::files::Reader;
use crate::source::intake::{Intake, SourceStatus, finished};
use crate::source::store::{Accepted, Store};
use crate::xds::book::Offer;
use crate::xds::client::Event;
use crate::xds::resource::version_of;

/// Updates that wait for the control thread.
pub(super) const EVENTS: usize = 4;

/// The source of policy.
pub(crate) struct Feed {
    events: mpsc::Receiver<Event>,
    /// Where policy comes from files.
    pub(crate) files: Option<FilesHandle>,
}

/// What can be asked of policy in files.
#[derive(Clone, Debug)]
pub struct FilesHandle {
    /// How the files stand.
    pub status: Arc<SourceStatus>,
    orders: mpsc::Sender<Order>,
}

/// What the task that follows files is told to do.
#[derive(Debug)]
enum Order {
    /// Read them again; answered when what they say is in force, or refused.
    Read(oneshot::Sender<()>),
    /// Take them at their word where they are empty.
    AcceptEmpty(oneshot::Sender<Result<Accepted, String>>),
}

impl Feed {
    /// A policy server's client, which sends what it has to say.
    pub(super) fn server(events: mpsc::Receiver<Event>) -> Self {
        Self { events, files: None }
    }

    /// Files, and what they say now, unless that is nothing. They are read again when the follower says so, which was made before
    /// so that what changes in between is not missed, and when somebody asks for it.
    pub(crate) async fn files(
        paths: Vec<PathBuf>,
        viewer: Viewer,
        allow_empty: bool,
        follower: Option<Follower>,
    ) -> (Self, Option<Offer>) {
        let (mut files, feed) = Files::new(paths, viewer, allow_empty);
        files.read().await;
        let offer = files.difference().await;
        if offer.is_some() {
            // Whoever can't put the first policy in force doesn't go on.
            files.took(Ok(()));
        }
        tokio::spawn(files.follow(follower));
        (feed, offer)
    }

    /// Waits for something to happen. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> Event {
        match self.events.recv().await {
            Some(event) => event,
            // Whoever follows ends only with the process; until then there is nothing to wait for.
            None => std::future::pending().await,
        }
    }
}

impl FilesHandle {
    /// Reads the files again; done when what they say is in force, or refused.
    pub(crate) async fn read(&self) {
        let (answer, answered) = oneshot::channel();
        if self.orders.send(Order::Read(answer)).await.is_ok() {
            // Fails when the gateway stops.
            let _ = answered.await;
        }
    }

    /// Takes the files at their word where they are empty. Done when what that comes to is in force.
    ///
    /// # Errors
    /// When they are empty nowhere, or the gateway stops.
    pub async fn accept_empty(&self) -> Result<Accepted, String> {
        let stopping = || "the gateway is stopping".to_owned();
        let (answer, answered) = oneshot::channel();
        self.orders.send(Order::AcceptEmpty(answer)).await.map_err(|_| stopping())?;
        answered.await.map_err(|_| stopping())?
    }
}

/// Manifests in files, and what of them is in force.
struct Files {
    viewer: Viewer,
    reader: Reader,
    intake: Intake,
    /// What the last change that was taken came to, the first one included: changes are what differs from it.
    in_force: Arc<PolicySet>,
    /// What was offered last.
    offered: Arc<PolicySet>,
    /// Whether what was offered last was refused.
    is_refused: bool,
    events: mpsc::Sender<Event>,
    orders: mpsc::Receiver<Order>,
}

impl Files {
    fn new(paths: Vec<PathBuf>, viewer: Viewer, allow_empty: bool) -> (Self, Feed) {
        let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let intake = Intake::new(format!("files {}", names.join(", ")), Store::new(allow_empty));
        let (events, received) = mpsc::channel(EVENTS);
        let (ordered, orders) = mpsc::channel(1);
        let handle = FilesHandle { status: intake.status(), orders: ordered };
        let files = Self {
            reader: Reader::new(paths),
            viewer,
            intake,
            in_force: Arc::default(),
            offered: Arc::default(),
            is_refused: false,
            events,
            orders,
        };
        (files, Feed { events: received, files: Some(handle) })
    }

    /// Offers what changes, until nobody listens any more.
    async fn follow(mut self, mut follower: Option<Follower>) {
        loop {
            tokio::select! {
                () = changed(&mut follower) => {
                    self.read().await;
                    self.offer().await;
                }
                Some(order) = self.orders.recv() => match order {
                    Order::Read(done) => {
                        self.read().await;
                        self.offer().await;
                        let _ = done.send(());
                    }
                    Order::AcceptEmpty(answer) => {
                        let accepted = self.intake.accept_empty().await;
                        self.offer().await;
                        // Whoever asked may have gone; what is done is done.
                        let _ = answer.send(accepted);
                    }
                },
                () = self.events.closed() => return,
            }
        }
    }

    /// Reads and compiles what has changed.
    async fn read(&mut self) {
        let mut reader = std::mem::take(&mut self.reader);
        let work = tokio::task::spawn_blocking(move || {
            let update = reader.read();
            (reader, update)
        });
        let (reader, update) = finished(work.await);
        self.reader = reader;
        self.intake.take([source::Event::Update(update)]).await;
    }

    /// Offers what differs from what is in force, and waits until it is taken or refused.
    async fn offer(&mut self) {
        let Some(offer) = self.difference().await else { return };
        let (answer, answered) = oneshot::channel();
        if self.events.send(Event::Offer(Box::new(offer), answer)).await.is_ok()
            && let Ok(outcome) = answered.await
        {
            self.took(outcome.map_err(|_| ()));
        }
    }

    /// What differs from what is in force; none if nothing does, or if there is no policy yet.
    async fn difference(&mut self) -> Option<Offer> {
        let deal = self.intake.status().compiled.load().deal.clone()?;
        let (viewer, in_force, is_refused) = (self.viewer.clone(), self.in_force.clone(), self.is_refused);
        let work = tokio::task::spawn_blocking(move || {
            let set = deal.part_of(Some(&viewer), &version_of(&deal));
            // After a refusal it is said again that all is as it was.
            let differs = is_refused || set != *in_force;
            let offer = differs.then(|| Offer {
                updates: 1,
                change: PolicyChange::between(&in_force, &set),
                peers: deal.peers.clone(),
            });
            (Arc::new(set), offer)
        });
        let (set, offer) = finished(work.await);
        self.offered = set;
        offer
    }

    /// What was offered last is in force, or was refused.
    fn took(&mut self, outcome: Result<(), ()>) {
        self.is_refused = outcome.is_err();
        if outcome.is_ok() {
            self.in_force = self.offered.clone();
        }
    }
}

/// Waits until files have changed; for ever if nobody follows them.
async fn changed(follower: &mut Option<Follower>) {
    match follower {
        Some(follower) => drop(follower.changed().await),
        None => std::future::pending().await,
    }
}
