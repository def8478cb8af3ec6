//! How links stand, for everybody who decides by it or shows it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use vipgate_dataplane::time::Tick;

use super::frame::Broken;

/// All other gateways of the view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersStatus {
    /// By name.
    pub peers: BTreeMap<Arc<str>, PeerStatus>,
    /// Connections that were refused before it was known whose they are.
    pub strangers: u64,
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Whether there is a link.
    pub linked: bool,
    /// Since when it is so; `None`: there never was one.
    pub since: Option<Tick>,
    /// The version that both speak.
    pub version: u32,
    /// From our last beat to its echo. A gateway that doesn't serve is not echoed.
    pub rtt: Option<Duration>,
    /// Beats that should have come and didn't.
    pub beats_missed: u64,
    /// How often it was refused.
    pub refused: u64,
    /// How often a link has ended, or couldn't be made.
    pub failures: u64,
    /// Why, the last time.
    pub last_failure: Option<Broken>,
    /// The last of our beats that it has echoed.
    pub echoed: Option<Echoed>,
    /// When we last echoed a beat of it, or a little later: never earlier than it sent that beat.
    pub promised: Option<Tick>,
    /// Copies of sessions, both ways.
    pub copies: CopiesStatus,
}

/// A beat of ours that has come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Echoed {
    /// When it was sent, or a little earlier.
    pub sent: Tick,
    /// The view that who echoed it went by.
    pub view: u64,
}

/// Copies of sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopiesStatus {
    /// We have all that it told since the link came up.
    pub in_sync_from: bool,
    /// The view by which it began to tell that; 0: it has told nothing.
    pub synced_by: u64,
    /// It has all that we have to tell, as far as it has acknowledged, since the last time that something could be missing.
    pub in_sync_to: bool,
    /// The replication epoch in which we told all, the last time that it has all of that; 0: there was none.
    pub told_by: u64,
    /// Sessions sent, those of telling all included.
    pub sent: u64,
    /// Sessions taken in.
    pub taken: u64,
    /// Copies forgotten, since they were named no more.
    pub forgotten: u64,
    /// Bytes that wait to be sent.
    pub queued: usize,
    /// How often all was told.
    pub resyncs: u64,
    /// The view up to which we have let go of what it takes from us, and it knows.
    pub released: Option<u64>,
    /// The view up to which it has.
    pub released_by: Option<u64>,
}

/// Where the parts write it.
#[derive(Clone, Debug)]
pub(super) struct Board(watch::Sender<Arc<PeersStatus>>);

impl Board {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(Arc::default()))
    }

    pub(super) fn watch(&self) -> watch::Receiver<Arc<PeersStatus>> {
        self.0.subscribe()
    }

    /// These gateways there are, and no others.
    pub(super) fn keep(&self, names: &[Arc<str>]) {
        self.0.send_modify(|status| {
            let status = Arc::make_mut(status);
            status.peers.retain(|name, _| names.contains(name));
            for name in names {
                status.peers.entry(name.clone()).or_default();
            }
        });
    }

    /// The replication epoch in which a gateway was told all last.
    pub(super) fn told_by(&self, name: &str) -> u64 {
        told_by(&self.0.borrow(), name)
    }

    /// Waits until it was told all in a later one.
    pub(super) async fn told_after(&self, name: &str, epoch: u64) {
        // It is ours, so it doesn't close.
        let _ = self.watch().wait_for(|status| told_by(status, name) > epoch).await;
    }

    /// Changes what is known of a gateway, and tells if that made a difference. One that isn't of the view is passed over.
    pub(super) fn update(&self, name: &str, change: impl FnOnce(&mut PeerStatus)) {
        self.0.send_if_modified(|status| {
            let Some(before) = status.peers.get(name) else { return false };
            let mut after = before.clone();
            change(&mut after);
            if after == *before {
                return false;
            }
            if let Some(place) = Arc::make_mut(status).peers.get_mut(name) {
                *place = after;
            }
            true
        });
    }

    /// Somebody was refused.
    pub(super) fn stranger(&self) {
        self.0.send_modify(|status| Arc::make_mut(status).strangers += 1);
    }

    /// A link has ended, or wasn't made.
    pub(super) fn failed(&self, name: &str, why: &Broken) {
        self.update(name, |peer| {
            peer.failures += 1;
            peer.refused += u64::from(why.is_refusal());
            peer.last_failure = Some(why.clone());
        });
    }
}

fn told_by(status: &PeersStatus, name: &str) -> u64 {
    status.peers.get(name).map_or(0, |peer| peer.copies.told_by)
}
