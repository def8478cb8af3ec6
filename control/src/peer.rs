//! Links between gateways: one mutually authenticated TLS connection per pair, for heartbeats and session replication.
//!
//! `identity` and `handshakes` authenticate peers, `tunnel_key` derives tunnel keys, `frame` and `record` encode
//! messages, `link` runs one connection, `mesh` all of them; `replication` is the protocol on top. Membership,
//! ownership of shards, succession and failover are decided elsewhere.

mod failure_log;
mod frame;
mod handshakes;
mod identity;
mod link;
mod mesh;
mod record;
mod replication;
mod status;
#[cfg(test)]
mod tests;
mod tunnel_key;
mod view;
mod workers;

/// Items used by fuzz targets.
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz {
    pub(crate) use super::frame::{encode as write_frame, read as read_frame};
    pub(crate) use crate::peer::record::{decode, encode};
    pub(crate) use crate::peer::replication::numbered::decode as decode_numbered;
}

/// Generated protobuf messages.
#[expect(clippy::pedantic, reason = "generated")]
pub mod proto {
    tonic::include_proto!("vipgate.peer.v1");
}

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::replication::lease::MAX_LEASE_MS;

pub use self::frame::LinkError;
pub use self::identity::{Fingerprint, Identities, Identity, IdentityError};
use self::mesh::SharedState;
use self::replication::send_loop::{SendCommand, SendLoop};
use self::status::StatusPublisher;
pub use self::status::{PeerStatus, PeersStatus};
#[cfg(test)]
pub(crate) use self::tests::session_record;
pub use self::tunnel_key::{TagKeys, TunnelEnd, TunnelKey, TunnelSecret};
pub use self::view::{PeerMember, PeerView};
use self::workers::ApplyLocks;
pub use self::workers::{ReplicationWaker, Workers};
use crate::membership;
use crate::membership::replication::sync_rounds::SyncRounds;
pub use crate::membership::replication::{Release, ReplicationStatus};
use crate::membership::succession::{Claim, KnownSuccessor};

/// Lowest and highest supported protocol version. The version of the previous release is always included.
pub const PROTOCOL_VERSIONS: (u32, u32) = (1, 1);
/// Capacity of the event queue.
const EVENT_QUEUE: usize = 1024;
/// Capacity of the queue of commands from links to the send loop.
const COMMAND_QUEUE: usize = 1024;

/// Configuration of the links.
#[derive(Debug)]
pub struct PeerConfig {
    /// The name of this gateway.
    pub name: Arc<str>,
    /// This process, as reported to the policy server, and its predecessors.
    pub claim: Claim,
    /// Certificate and key of this process, and those of its predecessor.
    pub identities: Identities,
    /// The processes of peers that the previous process of this gateway has accepted as successors.
    pub successors: BTreeMap<Arc<str>, KnownSuccessor>,
    /// Listen address for peers.
    pub listen: SocketAddr,
    /// Heartbeat interval; after four intervals without a frame, a link is down.
    pub heartbeat: Duration,
    /// Lowest and highest protocol version: [`PROTOCOL_VERSIONS`].
    pub versions: (u32, u32),
    /// The workers that hold the sessions.
    pub workers: Arc<dyn Workers>,
    /// Wakes the send loop when a worker has queued records.
    pub waker: Arc<ReplicationWaker>,
    /// Whether records are sent as soon as they are queued, instead of batched for a millisecond.
    pub sends_at_once: bool,
    /// The workers' clock.
    pub clock: fn() -> Tick,
}

/// Events of the links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// The standby sessions from a gateway are complete: a full sync from it has ended.
    Synced {
        /// The peer.
        gateway: Arc<str>,
    },
    /// A gateway has released shards, and all their sessions have been received.
    Released {
        /// The peer.
        gateway: Arc<str>,
        /// What it has released.
        release: Release,
    },
    /// A peer has sent the membership view that it received from the policy server, since ours is older.
    RelayedView {
        /// The peer.
        gateway: Arc<str>,
        view: Arc<membership::MembershipView>,
    },
}

/// Errors when starting the links.
#[derive(Debug, Error)]
pub enum PeerError {
    /// The port is in use, or the address isn't local.
    #[error("peer.port: cannot listen on {address} for other gateways: {error}")]
    Listen {
        /// The listen address.
        address: SocketAddr,
        /// Error of the kernel.
        #[source]
        error: io::Error,
    },
    /// The certificate can't be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// All links of this gateway. They end when it is dropped.
#[derive(Debug)]
pub struct Peers {
    shared: Arc<SharedState>,
    commands: mpsc::UnboundedSender<SendCommand>,
    local_addr: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Peers {
    /// Opens the listening port; links come up with the first view. Needs a tokio runtime. Events must be received:
    /// links block while the queue is full.
    ///
    /// # Errors
    /// When the port can't be opened or the certificate can't be used.
    pub fn start(config: PeerConfig) -> Result<(Self, mpsc::Receiver<PeerEvent>), PeerError> {
        let listen_error = |error| PeerError::Listen { address: config.listen, error };
        let listener = mesh::bind(&config).map_err(listen_error)?;
        let address = listener.local_addr().map_err(listen_error)?;
        let board = StatusPublisher::new();
        let (commands, command_receiver) = mpsc::unbounded_channel();
        let (links, link_command_receiver) = mpsc::channel(COMMAND_QUEUE);
        let (events, receiver) = mpsc::channel(EVENT_QUEUE);
        let pump = SendLoop::new(config.workers.clone(), config.waker.clone(), config.sends_at_once, board.clone());
        let shared = Arc::new(SharedState {
            view: watch::Sender::new(Arc::default()),
            promised_view: watch::Sender::new(Arc::default()),
            status: board,
            sync_rounds: SyncRounds::default(),
            apply_locks: ApplyLocks::default(),
            events,
            send_commands: links,
            pins: Arc::default(),
            handshakes: Arc::default(),
            registry: std::sync::Mutex::default(),
            lease_ms: AtomicU32::new(MAX_LEASE_MS),
            started: (config.clock)(),
            config,
        });
        let acceptors = mesh::acceptors(&shared)?;
        let mut tasks = JoinSet::new();
        tasks.spawn(pump.run(command_receiver, link_command_receiver));
        tasks.spawn(mesh::listen(shared.clone(), listener, acceptors));
        tasks.spawn(mesh::dial_all(shared.clone()));
        Ok((Self { shared, commands, local_addr: address, _tasks: tasks }, receiver))
    }

    /// The local address, with the port that the kernel has chosen if none was configured.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Sets the view by which heartbeats of peers are echoed: the latest one that this gateway has received, be it
    /// applied or not. An echo is a promise that the peer stays the owner of its shards for a TTL. Older views are
    /// ignored.
    pub fn set_promised_view(&self, view: &Arc<PeerView>) {
        self.shared.promised_view.send_if_modified(|promised| {
            let is_new = view.number >= promised.number && *view != *promised;
            if is_new {
                promised.clone_from(view);
            }
            is_new
        });
    }

    /// Sets how long leases last; until then, as long as they may at all.
    pub fn set_lease_duration(&self, duration: Duration) {
        let ms = u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        self.shared.lease_ms.store(ms.min(MAX_LEASE_MS), Relaxed);
    }

    /// Applies a membership view: opens and closes links. Older views are ignored.
    pub fn set_view(&self, view: &Arc<PeerView>) {
        self.set_promised_view(view);
        if view.number < self.shared.view.borrow().number {
            return;
        }
        let others =
            view.members.iter().map(|member| member.name.clone()).filter(|name| *name != self.shared.config.name);
        // Before any link comes up.
        self.send_command(SendCommand::SetPeers(others.collect(), view.number));
        self.shared.apply_view(view);
    }

    /// This process takes its predecessor's place: nothing counts as acknowledged that it hasn't sent itself.
    pub fn take_place(&self) {
        self.send_command(SendCommand::TakePlace);
    }

    /// Starts a full sync to a peer, since the assignment of replica targets has changed.
    pub fn resync(&self, gateway: &str) {
        self.send_command(SendCommand::Resync(gateway.into()));
    }

    /// Requests a full sync from a peer, since standby sessions may have been lost here.
    pub fn request_sync(&self, gateway: &str) {
        self.send_command(SendCommand::RequestSync(gateway.into()));
    }

    /// Notifies a peer that this gateway has released shards. Sent after all records queued so far and after a pending
    /// full sync; repeated over the next link.
    pub fn release(&self, gateway: &str, release: Release) {
        self.send_command(SendCommand::Release(gateway.into(), release));
    }

    /// Status of all links.
    pub fn status(&self) -> watch::Receiver<Arc<PeersStatus>> {
        self.shared.status.subscribe()
    }

    fn send_command(&self, command: SendCommand) {
        // The send loop lives as long as `self`.
        let _ = self.commands.send(command);
    }
}
