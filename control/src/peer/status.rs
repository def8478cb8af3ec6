//! Status of all links, published to its consumers over a watch channel.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use vipgate_dataplane::flow::time::Tick;

use super::frame::LinkError;
use crate::membership::group_state::{PeerState, ReceivedEcho};
use crate::membership::replication::ReplicationStatus;
use crate::membership::succession::KnownSuccessor;

/// Status of all peers in the view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersStatus {
    /// Peers by name.
    pub peers: BTreeMap<Arc<str>, PeerStatus>,
    /// Connections rejected before the peer was authenticated.
    pub unauthenticated: u64,
}

/// Status of one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Whether the link is up.
    pub linked: bool,
    /// Time of the last change of `linked`; `None` if the link was never up.
    pub since: Option<Tick>,
    /// The negotiated protocol version.
    pub version: u32,
    /// Round-trip time of the last heartbeat. Only active members get echoes.
    pub rtt: Option<Duration>,
    /// Heartbeats that were due and not received.
    pub heartbeats_missed: u64,
    /// How often the peer was rejected.
    pub rejections: u64,
    /// How often a link has failed or couldn't be established.
    pub failures: u64,
    /// Reason of the last failure.
    pub last_failure: Option<LinkError>,
    /// The last of our heartbeats that the peer has echoed.
    pub last_echo: Option<ReceivedEcho>,
    /// When we last echoed one of its heartbeats, or slightly later; never before the peer sent that heartbeat.
    pub echo_sent_at: Option<Tick>,
    /// Its process, if that has succeeded the one in the view.
    pub successor: Option<KnownSuccessor>,
    /// Session replication in both directions.
    pub replication: ReplicationStatus,
}

impl From<&PeerStatus> for PeerState {
    fn from(status: &PeerStatus) -> Self {
        let (last_echo, echo_sent_at) = (status.last_echo, status.echo_sent_at);
        Self { last_echo, echo_sent_at, ..Self::of(status.linked, &status.replication) }
    }
}

/// Publishes the status; used by all parts of the links.
#[derive(Clone, Debug)]
pub(super) struct StatusPublisher(watch::Sender<Arc<PeersStatus>>);

impl StatusPublisher {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(Arc::default()))
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<PeersStatus>> {
        self.0.subscribe()
    }

    /// Sets the peers; removes the status of all others.
    pub(super) fn set_peers(&self, names: &[Arc<str>]) {
        self.0.send_modify(|status| {
            let status = Arc::make_mut(status);
            status.peers.retain(|name, _| names.contains(name));
            for name in names {
                status.peers.entry(name.clone()).or_default();
            }
        });
    }

    /// The last frame of a peer that is applied.
    pub(super) fn applied(&self, name: &str) -> u64 {
        self.0.borrow().peers.get(name).map_or(0, |peer| peer.replication.applied)
    }

    /// Waits until the peer has acknowledged a full sync of a later epoch.
    pub(super) async fn wait_for_epoch_after(&self, name: &str, epoch: u64) {
        // `self` holds the sender, so the channel doesn't close.
        let _ = self.subscribe().wait_for(|status| acknowledged_epoch(status, name) > epoch).await;
    }

    /// Updates the status of a peer, and notifies receivers of a change. Ignores gateways that aren't in the view.
    pub(super) fn update(&self, name: &str, change: impl FnOnce(&mut PeerStatus)) {
        self.change(name, change);
    }

    /// The same; returns the result, `None` of a gateway that isn't in the view.
    pub(super) fn change<T>(&self, name: &str, change: impl FnOnce(&mut PeerStatus) -> T) -> Option<T> {
        let mut result = None;
        self.0.send_if_modified(|status| {
            let Some(current) = status.peers.get(name) else { return false };
            let mut updated = current.clone();
            result = Some(change(&mut updated));
            if updated == *current {
                return false;
            }
            if let Some(entry) = Arc::make_mut(status).peers.get_mut(name) {
                *entry = updated;
            }
            true
        });
        result
    }

    /// Counts a rejected connection of an unauthenticated peer.
    pub(super) fn count_unauthenticated(&self) {
        self.0.send_modify(|status| Arc::make_mut(status).unauthenticated += 1);
    }

    /// Records that a link has failed or couldn't be established.
    pub(super) fn record_failure(&self, name: &str, reason: &LinkError) {
        self.update(name, |peer| {
            peer.failures += 1;
            peer.rejections += u64::from(reason.is_rejection());
            peer.last_failure = Some(reason.clone());
        });
    }
}

fn acknowledged_epoch(status: &PeersStatus, name: &str) -> u64 {
    status.peers.get(name).map_or(0, |peer| peer.replication.acknowledged_epoch)
}
