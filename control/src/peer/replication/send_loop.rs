//! Send loop for all peers: reads the workers' replication queues, requests chunks of sessions from them for full
//! syncs, and passes frames to the links. The decisions are made by `membership::replication::send_state`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::replication::round::RecordChunk;
use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;
use vipgate_dataplane::worker::command::Command;

use crate::membership::replication::Release;
use crate::membership::replication::send_state::{ChunkRequest, SendState};
use crate::peer::frame::{self, LinkError};
use crate::peer::proto::SyncRequest;
use crate::peer::proto::frame::Kind;
use crate::peer::replication::numbered;
use crate::peer::status::StatusPublisher;
use crate::peer::workers::{ReplicationWaker, Workers, request_all};

/// Minimum interval between reads of the replication queues while records arrive, so that they are batched. Timers have
/// the resolution of a millisecond, so records wait up to two.
const BATCH_INTERVAL: Duration = Duration::from_millis(1);
/// Interval between reads without a wake-up, since lost records cause none. Also the interval of status updates.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of records read from one worker before the next one.
const MAX_RECORDS_PER_WORKER: usize = 4096;

/// Commands to the send loop.
#[derive(Debug)]
pub(crate) enum SendCommand {
    /// Sets the peers and the number of the current view.
    SetPeers(Vec<Arc<str>>, u64),
    /// A link has come up.
    LinkUp { peer: Arc<str>, link: LinkHandle },
    /// A link has gone down.
    LinkDown { peer: Arc<str>, link: u64 },
    /// A peer has acknowledged all frames up to a number, some with rejected records if `refused`.
    FramesAcknowledged { peer: Arc<str>, link: u64, number: u64, rejected: bool },
    /// Starts a full sync to a peer.
    Resync(Arc<str>),
    /// Requests a full sync from a peer.
    RequestSync(Arc<str>),
    /// Notifies a peer that shards are released.
    Release(Arc<str>, Release),
}

/// The send loop's handle of a link.
#[derive(Clone, Debug)]
pub(crate) struct LinkHandle {
    /// Unique id of the link.
    pub(crate) id: u64,
    /// The peer's incarnation.
    pub(crate) incarnation: u64,
    /// Queue for numbered frames; its capacity is the window.
    pub(crate) bulk: mpsc::Sender<Vec<u8>>,
    /// Queue for frames that must not wait behind sessions.
    pub(crate) urgent: mpsc::Sender<Vec<u8>>,
    /// Closes the link.
    pub(crate) stop: mpsc::Sender<LinkError>,
}

#[derive(Debug)]
struct Peer {
    id: Option<GatewayId>,
    outbound: SendState,
    /// The peer's incarnation at the last link.
    incarnation: Option<u64>,
    link: Option<LinkHandle>,
    published: PublishedStatus,
    /// Sequence number of the last request for this peer.
    last_request: u64,
}

/// `in_sync_to`, `synced_frame`, `released` and `acknowledged_epoch` as last published.
type PublishedStatus = (bool, Option<u64>, Option<Release>, u64);

impl Peer {
    fn new(workers: usize, acknowledged_epoch: u64) -> Self {
        let outbound = SendState::new(workers, acknowledged_epoch, numbered::encode);
        Self {
            id: None,
            outbound,
            incarnation: None,
            link: None,
            published: PublishedStatus::default(),
            last_request: 0,
        }
    }

    /// A link has come up; it is ignored if a newer one exists.
    fn link_up(&mut self, link: LinkHandle) {
        if self.link.as_ref().is_some_and(|current| current.id >= link.id) {
            return;
        }
        let previous = self.incarnation.replace(link.incarnation);
        if previous.is_some_and(|previous| previous != link.incarnation) {
            self.outbound.peer_restarted();
        }
        self.outbound.link_up();
        self.link = Some(link);
    }

    /// The peer has applied all frames of a link up to a number, and rejected records of some if `rejected`.
    fn frames_acknowledged(&mut self, link: u64, number: u64, rejected: bool, workers: &dyn Workers) {
        let Some(current) = self.link.as_ref().filter(|current| current.id == link) else { return };
        if rejected {
            self.outbound.records_rejected(number);
        }
        match self.outbound.frames_acknowledged(number) {
            Ok(numbers) => {
                let Some(id) = self.id else { return };
                for (worker, number) in numbers.into_iter().enumerate().filter(|(_, number)| *number > 0) {
                    workers.replication_sender(worker).acknowledge(id, number);
                }
            }
            // If the channel is full, the link is ending already.
            Err(violation) => drop(current.stop.try_send(violation.into())),
        }
    }

    /// Looks up the peer's id in the policy, if unknown so far. No sessions were replicated to it until then.
    fn resolve_id(&mut self, name: &str, workers: &dyn Workers) {
        if self.id.is_none() {
            self.id = workers.gateway_id(name);
            if self.id.is_some() {
                self.outbound.require_sync();
            }
        }
    }
}

type Reply = (Arc<str>, ChunkRequest, Result<Vec<RecordChunk>, usize>);

/// State of the send loop.
#[derive(Debug)]
pub(crate) struct SendLoop {
    workers: Arc<dyn Workers>,
    waker: Arc<ReplicationWaker>,
    /// Whether records are read as soon as they are queued: only those that arrive meanwhile are batched.
    sends_at_once: bool,
    status: StatusPublisher,
    peers: BTreeMap<Arc<str>, Peer>,
    /// Whether a membership view has been received.
    has_view: bool,
    /// Number of requests sent.
    requests: u64,
    /// Workers with an outstanding request: their queues must not be read (see `send_state`).
    requested: Vec<bool>,
    replies: JoinSet<Reply>,
}

impl SendLoop {
    pub(crate) fn new(
        workers: Arc<dyn Workers>,
        waker: Arc<ReplicationWaker>,
        sends_at_once: bool,
        status: StatusPublisher,
    ) -> Self {
        let requested = vec![false; workers.count()];
        let (peers, replies) = (BTreeMap::new(), JoinSet::new());
        Self { workers, waker, sends_at_once, status, peers, has_view: false, requests: 0, requested, replies }
    }

    /// Runs until the command channel is closed.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<SendCommand>,
        mut link_commands: mpsc::Receiver<SendCommand>,
    ) {
        let (mut next_read, mut next_publish) = (Instant::now(), Instant::now());
        loop {
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(command) => {
                        self.handle_command(command);
                        next_read = next_read.min(Instant::now() + BATCH_INTERVAL);
                    }
                    None => return,
                },
                Some(command) = link_commands.recv() => self.handle_command(command),
                Some(reply) = self.replies.join_next() => {
                    if let Ok(reply) = reply {
                        self.handle_reply(reply);
                    }
                    next_read = Instant::now();
                }
                () = self.waker.notified() => next_read = Instant::now(),
                () = sleep_until(next_read) => {}
            }
            let now = Instant::now();
            if next_read <= now {
                next_read = now + self.read_queues();
            }
            self.send_requests();
            self.send();
            let is_due = next_publish <= now;
            if is_due {
                next_publish = now + IDLE_INTERVAL;
            }
            self.publish_status(is_due);
        }
    }

    fn handle_command(&mut self, command: SendCommand) {
        match command {
            SendCommand::SetPeers(names, view) => self.set_peers(names, view),
            SendCommand::LinkUp { peer, link } => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.link_up(link);
                }
            }
            SendCommand::LinkDown { peer, link } => {
                if let Some(peer) = self.peers.get_mut(&peer)
                    && peer.link.take_if(|current| current.id == link).is_some()
                {
                    peer.outbound.link_down();
                }
            }
            SendCommand::FramesAcknowledged { peer, link, number, rejected } => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.frames_acknowledged(link, number, rejected, &*self.workers);
                }
            }
            SendCommand::Resync(peer) => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.outbound.require_sync();
                }
            }
            SendCommand::RequestSync(peer) => {
                // Not needed without a link: the next one starts with a full sync.
                if let Some(link) = self.peers.get(&peer).and_then(|peer| peer.link.as_ref()) {
                    let _ = link.urgent.try_send(frame::encode(Kind::SyncRequest(SyncRequest {})));
                }
            }
            SendCommand::Release(peer, release) => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.outbound.release(release);
                }
            }
        }
    }

    fn set_peers(&mut self, names: Vec<Arc<str>>, view: u64) {
        self.peers.retain(|name, _| names.contains(name));
        let workers = self.workers.count();
        // Sessions left in the tables by a previous process were taken over elsewhere and may have ended: only their
        // changes are replicated.
        let acknowledged_epoch = if self.has_view { 0 } else { self.workers.replication_epoch() };
        self.has_view |= view > 0;
        for name in names {
            let peer = self.peers.entry(name).or_insert_with(|| Peer::new(workers, acknowledged_epoch));
            peer.outbound.set_view(view);
        }
    }

    /// Reads the replication queues; returns the time until the next read.
    fn read_queues(&mut self) -> Duration {
        if !self.sends_at_once && self.drain() {
            return BATCH_INTERVAL;
        }
        // Records queued from here on wake the loop.
        self.waker.arm();
        if self.drain() { BATCH_INTERVAL } else { IDLE_INTERVAL }
    }

    /// Reads a bounded number of records from each worker; returns whether there were any.
    fn drain(&mut self) -> bool {
        for (name, peer) in &mut self.peers {
            peer.resolve_id(name, &*self.workers);
        }
        let mut by_id: BTreeMap<GatewayId, &mut SendState> =
            self.peers.values_mut().filter_map(|peer| Some((peer.id?, &mut peer.outbound))).collect();
        let (mut found, mut is_drained) = (false, true);
        for worker in (0..self.requested.len()).filter(|&worker| !self.requested[worker]) {
            let sender = self.workers.replication_sender(worker);
            for (&gateway, outbound) in &mut by_id {
                if sender.take_lost(gateway) {
                    outbound.require_sync();
                }
            }
            let mut left = MAX_RECORDS_PER_WORKER;
            while left > 0
                && let Some(outgoing) = sender.pop()
            {
                left -= 1;
                // A gateway that isn't in the view yet gets a full sync when it is added.
                if let Some(outbound) = by_id.get_mut(&outgoing.to) {
                    outbound.push(worker, outgoing.number, &outgoing.record);
                }
            }
            found |= left < MAX_RECORDS_PER_WORKER;
            is_drained &= left > 0;
        }
        if is_drained && !self.requested.contains(&true) {
            // There are no records for peers that aren't in the policy.
            for peer in self.peers.values_mut() {
                peer.outbound.queues_drained();
            }
        }
        found
    }

    fn send_requests(&mut self) {
        // Least recently served peer first, so that a peer with many sessions or repeated syncs doesn't delay others.
        let mut peers: Vec<(&Arc<str>, &mut Peer)> = self.peers.iter_mut().collect();
        peers.sort_by_key(|(_, peer)| peer.last_request);
        for (name, peer) in peers {
            peer.resolve_id(name, &*self.workers);
            peer.outbound.set_applied(self.status.applied(name));
            while let Some(request) = peer.outbound.next_request() {
                // Before the worker lists: what it lists is on its way from then on.
                self.status.update(name, |status| status.replication.synced_frame = None);
                let Some(target) = peer.id else {
                    // Nothing is replicated to a gateway that isn't in the policy.
                    peer.outbound.request_sent();
                    peer.outbound.add_chunk(request, &[], None);
                    continue;
                };
                if self.requested[request.worker] {
                    break;
                }
                self.requested[request.worker] = true;
                peer.outbound.request_sent();
                self.requests += 1;
                peer.last_request = self.requests;
                let (workers, name) = (self.workers.clone(), name.clone());
                let (acknowledged_epoch, policy) = (peer.outbound.acknowledged_epoch, peer.outbound.round_policy());
                self.replies.spawn(async move {
                    let chunk = RecordChunk {
                        target,
                        acknowledged_epoch,
                        cursor: Some(request.cursor),
                        records: Vec::with_capacity(MAX_RECORDS_APPLIED),
                        expected: request.expected,
                        policy,
                        observed: (0, 0),
                    };
                    let command = move |reply: Sender<RecordChunk>| Command::ListRecords { chunk, reply };
                    (name, request, request_all(&workers, vec![(request.worker, Box::new(command))], ()).await)
                });
            }
        }
    }

    fn handle_reply(&mut self, (name, request, reply): Reply) {
        self.requested[request.worker] = false;
        let Some(peer) = self.peers.get_mut(&name) else { return };
        match reply {
            Ok(chunks) => {
                for chunk in chunks {
                    peer.outbound.check_ownership(request, chunk.observed, &chunk.policy.unwrap_or_default());
                    peer.outbound.add_chunk(request, &chunk.records, chunk.cursor);
                }
            }
            Err(worker) => {
                // The full sync can't be completed without this worker's sessions: restart it on a new link.
                if let Some(link) = &peer.link {
                    drop(link.stop.try_send(LinkError::WorkerUnavailable(worker)));
                }
            }
        }
    }

    fn send(&mut self) {
        for peer in self.peers.values_mut() {
            let Some(link) = &peer.link else { continue };
            while let Some(frame) = peer.outbound.next_frame() {
                // The channel has capacity for the whole window. If it is closed, a command about that will follow.
                let _ = link.bulk.try_send(frame);
            }
        }
    }

    /// Publishes the status of each peer whose sync state has changed, or of all peers.
    fn publish_status(&mut self, all: bool) {
        for (name, peer) in &mut self.peers {
            let outbound = &peer.outbound;
            let (synced_frame, epoch) = (outbound.synced_frame(), outbound.acknowledged_epoch);
            let now = (outbound.in_sync(), synced_frame, outbound.released.clone(), epoch);
            if all || now != peer.published {
                peer.published = now.clone();
                self.status.update(name, |status| {
                    let status = &mut status.replication;
                    (status.in_sync_to, status.synced_frame, status.released, status.acknowledged_epoch) = now;
                    (status.sent, status.queued_bytes, status.resyncs) =
                        (outbound.sent, outbound.queued(), outbound.resyncs);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
