//! Policy source of a gateway: manifests in files that it compiles itself, or a policy server. Both deliver incremental
//! updates and receive a reply, applied or rejected; the next update is relative to the last applied one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::PolicySet;
use vipgate_policy::compiler::GatewayLocality;

use crate::source;
use crate::source::files::WatchedFiles;
use crate::source::ingest::{SourceIngester, join_result};
use crate::state::files::{FileCommand, FileSourceHandle};
use crate::xds::client::ClientEvent;
use crate::xds::resource::version_of;
use crate::xds::store::PolicyUpdate;

/// Maximum number of pending updates.
pub(super) const MAX_PENDING_EVENTS: usize = 4;
/// Time for the policy server's client to close its connection and write its cache; it waits less long for the disk.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// A subscription to the policy source.
pub(crate) struct PolicySubscription {
    events: mpsc::Receiver<ClientEvent>,
    /// The file source, with `policy.files`.
    pub(crate) files: Option<FileSourceHandle>,
    /// The running client, with `policy.server`.
    client: Option<JoinHandle<()>>,
}

impl PolicySubscription {
    /// A subscription to the events of a policy server's client.
    pub(super) fn server(events: mpsc::Receiver<ClientEvent>) -> Self {
        Self { events, files: None, client: None }
    }

    /// Sets the policy server's client, which ends with the subscription.
    pub(super) fn set_client(&mut self, client: JoinHandle<()>) {
        self.client = Some(client);
    }

    /// A subscription to files, and their current policy, unless they are empty or one can't be read at the moment. The
    /// files are read again when they change, if they are watched, or on request.
    pub(crate) async fn files(
        files: WatchedFiles,
        locality: GatewayLocality,
        ingester: SourceIngester,
    ) -> (Self, Option<PolicyUpdate>) {
        let (mut files, subscription) = FileSource::new(files, locality, ingester);
        files.read().await;
        let update = files.difference().await;
        if update.is_some() {
            // The gateway exits if the initial policy is invalid.
            files.record_outcome(Ok(()));
        }
        tokio::spawn(files.follow());
        (subscription, update)
    }

    /// Waits for the next event. Cancel-safe.
    pub(crate) async fn next(&mut self) -> ClientEvent {
        match self.events.recv().await {
            Some(event) => event,
            // The sender ends only at shutdown.
            None => std::future::pending().await,
        }
    }

    /// Ends the subscription; waits until the client has closed its connection and written its cache.
    pub(super) async fn close(self) {
        // The client ends when its receiver is dropped.
        drop(self.events);
        if let Some(client) = self.client {
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, client).await;
        }
    }
}

/// Manifests in files, and the policy of them that is in force.
struct FileSource {
    locality: GatewayLocality,
    files: WatchedFiles,
    ingester: SourceIngester,
    /// The policy after the last accepted update; the next one is relative to it.
    in_force: Arc<PolicySet>,
    /// The policy after the last update that was sent.
    sent: Arc<PolicySet>,
    /// Whether that update was rejected.
    is_rejected: bool,
    events: mpsc::Sender<ClientEvent>,
    commands: mpsc::Receiver<FileCommand>,
}

impl FileSource {
    fn new(files: WatchedFiles, locality: GatewayLocality, ingester: SourceIngester) -> (Self, PolicySubscription) {
        let (events, received) = mpsc::channel(MAX_PENDING_EVENTS);
        let (command_sender, commands) = mpsc::channel(1);
        let handle = FileSourceHandle { status: ingester.status(), commands: command_sender };
        let files = Self {
            files,
            locality,
            ingester,
            in_force: Arc::default(),
            sent: Arc::default(),
            is_rejected: false,
            events,
            commands,
        };
        (files, PolicySubscription { events: received, files: Some(handle), client: None })
    }

    /// Sends an update for each change, until the receiver is dropped.
    async fn follow(mut self) {
        loop {
            tokio::select! {
                suspects = self.files.suspects() => {
                    if let Some(update) = self.files.refresh(suspects).await {
                        self.ingester.ingest([source::SourceEvent::Update(update)]).await;
                        self.send_update().await;
                    }
                }
                Some(command) = self.commands.recv() => match command {
                    FileCommand::Reload(reply) => {
                        self.read().await;
                        self.send_update().await;
                        let _ = reply.send(());
                    }
                    FileCommand::AcceptEmpty(reply) => {
                        let accepted = self.ingester.accept_empty().await;
                        self.send_update().await;
                        // Fails when the client has disconnected.
                        let _ = reply.send(accepted);
                    }
                },
                () = self.ingester.due() => {
                    self.ingester.recompile().await;
                    self.send_update().await;
                }
                () = self.events.closed() => return,
            }
        }
    }

    /// Reads all files and compiles what has changed.
    async fn read(&mut self) {
        let update = self.files.read().await;
        self.ingester.ingest([source::SourceEvent::Update(update)]).await;
    }

    /// Sends the difference to the policy in force, if any, and waits until it is applied or rejected.
    async fn send_update(&mut self) {
        let Some(update) = self.difference().await else { return };
        let (reply, replied) = oneshot::channel();
        if self.events.send(ClientEvent::Update(Box::new(update), reply)).await.is_ok()
            && let Ok(outcome) = replied.await
        {
            // An update that is held is in force with a later one.
            self.record_outcome(outcome.map(drop).map_err(drop));
        }
    }

    /// The difference to the policy in force; `None` if there is none, or no policy yet.
    async fn difference(&mut self) -> Option<PolicyUpdate> {
        let placement = self.ingester.status().compiled.load().placement.clone()?;
        let (locality, in_force, is_rejected) = (self.locality.clone(), self.in_force.clone(), self.is_rejected);
        let work = tokio::task::spawn_blocking(move || {
            let set = placement.policy_for(Some(&locality), &version_of(&placement));
            // After a rejection, an empty update clears the error.
            let differs = is_rejected || set != *in_force;
            let update = differs.then(|| PolicyUpdate {
                update_count: 1,
                change: PolicyChange::between(&in_force, &set),
                peers: placement.peers.clone(),
            });
            (Arc::new(set), update)
        });
        let (set, update) = join_result(work.await);
        self.sent = set;
        update
    }

    /// Records whether the last update was applied or rejected.
    fn record_outcome(&mut self, outcome: Result<(), ()>) {
        self.is_rejected = outcome.is_err();
        if outcome.is_ok() {
            self.in_force = self.sent.clone();
        }
    }
}

#[cfg(test)]
mod tests;
