//! Send loop for all peers: reads the workers' replication queues, requests chunks of sessions from them for full
//! syncs, and passes frames to the links. What is sent when is decided by `membership::replication::Sender`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use vipgate_dataplane::replication::round::RecordChunk;
use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;
use vipgate_dataplane::worker::command::Command;

use crate::membership::replication::send_state::ChunkRequest;
use crate::membership::replication::sender::{ListRequest, Listed};
use crate::membership::replication::{Release, Sender};
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
    /// This process takes its predecessor's place: nothing counts as acknowledged that it hasn't sent itself.
    TakePlace,
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

type Reply = (Arc<str>, ChunkRequest, Result<Vec<RecordChunk>, usize>);

/// State of the send loop.
#[derive(Debug)]
pub(crate) struct SendLoop {
    workers: Arc<dyn Workers>,
    waker: Arc<ReplicationWaker>,
    /// Whether records are read as soon as they are queued: only those that arrive meanwhile are batched.
    sends_at_once: bool,
    status: StatusPublisher,
    sender: Sender,
    links: BTreeMap<Arc<str>, LinkHandle>,
    replies: JoinSet<Reply>,
}

impl SendLoop {
    pub(crate) fn new(
        workers: Arc<dyn Workers>,
        waker: Arc<ReplicationWaker>,
        sends_at_once: bool,
        status: StatusPublisher,
    ) -> Self {
        let sender = Sender::new(workers.count(), numbered::encode);
        let (links, replies) = (BTreeMap::new(), JoinSet::new());
        Self { workers, waker, sends_at_once, status, sender, links, replies }
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
            SendCommand::SetPeers(names, view) => {
                self.links.retain(|name, _| names.contains(name));
                self.sender.set_peers(names, view, self.workers.replication_epoch());
            }
            SendCommand::TakePlace => self.sender.take_place(),
            SendCommand::LinkUp { peer, link } => {
                if self.sender.link_up(&peer, link.id, link.incarnation) {
                    self.links.insert(peer, link);
                }
            }
            SendCommand::LinkDown { peer, link } => {
                if self.sender.link_down(&peer, link) {
                    self.links.remove(&peer);
                }
            }
            SendCommand::FramesAcknowledged { peer, link, number, rejected } => {
                match self.sender.frames_acknowledged(&peer, link, (number, rejected)) {
                    Ok(records) => {
                        for (worker, id, number) in records {
                            self.workers.replication_sender(worker).acknowledge(id, number);
                        }
                    }
                    Err(violation) => self.stop_link(&peer, violation.into()),
                }
            }
            SendCommand::Resync(peer) => self.sender.require_sync(&peer),
            SendCommand::RequestSync(peer) => {
                // Not needed without a link: the next one starts with a full sync.
                if let Some(link) = self.links.get(&peer) {
                    let _ = link.urgent.try_send(frame::encode(Kind::SyncRequest(SyncRequest {})));
                }
            }
            SendCommand::Release(peer, release) => self.sender.release(&peer, release),
        }
    }

    fn stop_link(&self, peer: &str, reason: LinkError) {
        if let Some(link) = self.links.get(peer) {
            // If the channel is full, the link is ending already.
            drop(link.stop.try_send(reason));
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
        let readable: Vec<usize> = (0..self.workers.count()).filter(|worker| self.sender.may_read(*worker)).collect();
        let mut reader = self.sender.reader(|name| self.workers.gateway_id(name));
        let (mut found, mut is_drained) = (false, true);
        for worker in readable {
            let queue = self.workers.replication_sender(worker);
            reader.records_lost(|gateway| queue.take_lost(gateway));
            let mut left = MAX_RECORDS_PER_WORKER;
            while left > 0
                && let Some(outgoing) = queue.pop()
            {
                left -= 1;
                reader.push(worker, outgoing.to, outgoing.number, &outgoing.record);
            }
            found |= left < MAX_RECORDS_PER_WORKER;
            is_drained &= left > 0;
        }
        if is_drained {
            self.sender.queues_drained();
        }
        found
    }

    fn send_requests(&mut self) {
        let id_of = |name: &str| self.workers.gateway_id(name);
        for request in self.sender.next_requests(id_of, |name| self.status.applied(name)) {
            // Before the worker lists: what it lists is on its way from then on.
            self.status.update(&request.peer, |status| status.replication.synced_frame = None);
            let workers = self.workers.clone();
            self.replies.spawn(async move {
                let ListRequest { peer, target, chunk: request, acknowledged_epoch, policy } = request;
                let chunk = RecordChunk {
                    target,
                    acknowledged_epoch,
                    cursor: Some(request.cursor),
                    records: Vec::with_capacity(MAX_RECORDS_APPLIED),
                    expected: request.expected,
                    policy,
                    observed: (0, 0),
                };
                let command =
                    move |reply: crossbeam::channel::Sender<RecordChunk>| Command::ListRecords { chunk, reply };
                (peer, request, request_all(&workers, vec![(request.worker, Box::new(command))], ()).await)
            });
        }
    }

    fn handle_reply(&mut self, (peer, request, reply): Reply) {
        match reply {
            Ok(chunks) => {
                for RecordChunk { observed, policy, records, cursor, .. } in chunks {
                    let listed = Listed { observed, policy: policy.unwrap_or_default(), records, cursor };
                    self.sender.listed(&peer, request, &listed);
                }
            }
            Err(worker) => {
                self.sender.list_failed(request);
                self.stop_link(&peer, LinkError::WorkerUnavailable(worker));
            }
        }
    }

    fn send(&mut self) {
        for (peer, link) in &self.links {
            while let Some(frame) = self.sender.next_frame(peer) {
                // The channel has capacity for the whole window. If it is closed, a command about that will follow.
                let _ = link.bulk.try_send(frame);
            }
        }
    }

    /// Publishes the status of each peer whose sync state has changed, or of all peers.
    fn publish_status(&mut self, all: bool) {
        for (name, status) in self.sender.status(all) {
            self.status.update(&name, |peer| status.update(&mut peer.replication));
        }
    }
}

#[cfg(test)]
mod tests;
