//! Policy source of a gateway: a policy server, or manifests in files, for which the gateway is its own server: the same
//! store, compiler, publications and resources, with a channel in the place of the stream. Both deliver incremental updates
//! and receive a reply, applied or rejected; the next update is relative to the last applied one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use vipgate_common::{Task, spawn_blocking};
use vipgate_policy::compiler::{GatewayLocality, Placement};

use crate::source;
use crate::source::files::WatchedFiles;
use crate::source::ingest::SourceIngester;
use crate::state::files::{FileCommand, FileSourceHandle};
use crate::xds::client::{self, ClientEvent};
use crate::xds::publication::Publication;
use crate::xds::store::{PolicyUpdate, ResourceStore, StageError};

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
    client: Option<Task>,
    /// The running file source.
    _server: Option<Task>,
}

impl PolicySubscription {
    /// A subscription to the events of a policy server's client.
    pub(super) fn server(events: mpsc::Receiver<ClientEvent>) -> Self {
        Self { events, files: None, client: None, _server: None }
    }

    /// Sets the policy server's client, which ends with the subscription.
    pub(super) fn set_client(&mut self, client: Task) {
        self.client = Some(client);
    }

    /// A subscription to files, and their current policy, unless they are empty or one can't be read at the moment. The
    /// files are read again when they change, if they are watched, or on request.
    ///
    /// # Errors
    /// If the resources of the policy don't fit together.
    pub(crate) async fn files(
        files: WatchedFiles,
        locality: GatewayLocality,
        ingester: SourceIngester,
    ) -> Result<(Self, Option<PolicyUpdate>), StageError> {
        let (mut server, events, files) = LocalServer::new(files, locality, ingester);
        server.read().await;
        let update = server.publish().await?;
        if update.is_some() {
            // The gateway exits if the initial policy is invalid.
            server.gateway.record_outcome(true);
        }
        let server = Some(Task::spawn(server.follow()));
        Ok((Self { events, files: Some(files), client: None, _server: server }, update))
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

/// A policy server for this gateway alone: compiles manifests in files, and publishes the result.
struct LocalServer {
    files: WatchedFiles,
    ingester: SourceIngester,
    gateway: Subscriber,
    events: mpsc::Sender<ClientEvent>,
    commands: mpsc::Receiver<FileCommand>,
}

impl LocalServer {
    /// The server, and what its gateway has of it.
    fn new(
        files: WatchedFiles,
        locality: GatewayLocality,
        ingester: SourceIngester,
    ) -> (Self, mpsc::Receiver<ClientEvent>, FileSourceHandle) {
        let (events, received) = mpsc::channel(MAX_PENDING_EVENTS);
        let (command_sender, commands) = mpsc::channel(1);
        let handle = FileSourceHandle { status: ingester.status(), commands: command_sender };
        let gateway = Subscriber { locality, ..Subscriber::default() };
        (Self { files, ingester, gateway, events, commands }, received, handle)
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
        match self.publish().await {
            Ok(None) => {}
            Ok(Some(update)) => {
                if let Ok(outcome) = client::apply(&self.events, update).await {
                    // An update that is held is in force with a later one.
                    self.gateway.record_outcome(outcome.is_ok());
                }
            }
            Err(error) => {
                self.gateway.record_outcome(false);
                // Fails when the gateway stops.
                let _ = self.events.send(ClientEvent::Rejected(error.to_string())).await;
            }
        }
    }

    /// Publishes the compiled policy; returns what the gateway lacks of it, if anything. `None` also if there is no policy
    /// yet.
    async fn publish(&mut self) -> Result<Option<PolicyUpdate>, StageError> {
        let Some(placement) = self.ingester.status().compiled.load().placement.clone() else { return Ok(None) };
        let mut gateway = std::mem::take(&mut self.gateway);
        let (update, gateway) = spawn_blocking(move || (gateway.publish(placement), gateway)).await;
        self.gateway = gateway;
        update
    }
}

/// The gateway as the one subscriber of its own server.
#[derive(Debug, Default)]
struct Subscriber {
    locality: GatewayLocality,
    /// The resources in force, and what the last update changes, until there is a reply.
    store: ResourceStore,
    last: Arc<Publication>,
    /// The publication of the last accepted update; the next update is relative to it.
    in_force: Arc<Publication>,
    /// Whether the last update was rejected.
    is_rejected: bool,
}

impl Subscriber {
    /// Publishes a placement; returns what the gateway lacks of it, if anything.
    ///
    /// # Errors
    /// If a resource is invalid, or doesn't fit to others.
    fn publish(&mut self, placement: Arc<Placement>) -> Result<Option<PolicyUpdate>, StageError> {
        if let Some(next) = self.last.next(placement) {
            next.log_left_out(&self.last);
            self.last = Arc::new(next);
        }
        let changed = self.last.changed_since(&self.in_force);
        // After a rejection, an empty update clears the error.
        if changed.is_empty() && !self.is_rejected {
            self.in_force = self.last.clone();
            return Ok(None);
        }
        // Of an update without a reply.
        self.store.discard();
        self.store.stage_resources(self.last.stored(changed))?;
        self.store.check_consistency()?;
        Ok(Some(self.store.update_for(&self.locality)))
    }

    /// Records whether the last update was applied or rejected.
    fn record_outcome(&mut self, is_applied: bool) {
        self.is_rejected = !is_applied;
        if is_applied {
            self.store.commit();
            self.in_force = self.last.clone();
        } else {
            self.store.discard();
        }
    }
}

#[cfg(test)]
mod tests;
