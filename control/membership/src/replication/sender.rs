//! Sender of session replication, to all peers: which one gets a record, when a worker lists its sessions for a full
//! sync of which one, and what counts as acknowledged. `SendState` has what is decided for one peer alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::session::record::ReplicationRecord;

use super::send_state::{ChunkRequest, EncodeFrame, SendState};
use super::status::ReplicationStatus;
use super::{ProtocolViolation, Release};

/// Sender to all peers.
#[derive(Clone, Debug)]
pub struct Sender {
    encode: EncodeFrame,
    peers: BTreeMap<Arc<str>, Peer>,
    /// Whether a membership view has been received.
    has_view: bool,
    /// Whether this process has taken its predecessor's place.
    has_taken_place: bool,
    /// Number of requests to workers.
    requests: u64,
    /// Workers with an outstanding request: their queues must not be read (see `send_state`).
    requested: Vec<bool>,
}

#[derive(Clone, Debug)]
struct Peer {
    /// Its id in the policy.
    id: Option<GatewayId>,
    outbound: SendState,
    /// Its incarnation at the last link.
    incarnation: Option<u64>,
    link: Option<u64>,
    published: Published,
    /// Sequence number of the last request for this peer.
    last_request: u64,
}

/// `in_sync_to`, `synced_frame`, `released` and `acknowledged_epoch` as last published.
type Published = (bool, Option<u64>, Option<Release>, u64);

/// A request to a worker to list sessions for a peer.
#[derive(Clone, Debug)]
pub struct ListRequest {
    pub peer: Arc<str>,
    /// Its id in the policy.
    pub target: GatewayId,
    pub chunk: ChunkRequest,
    /// The epoch of the last full sync that it has acknowledged.
    pub acknowledged_epoch: u64,
    /// The version of the policy of the round, once a worker has replied.
    pub policy: Option<Arc<str>>,
}

/// A worker's reply.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its replication epoch, and the view of the last change of active members.
    pub observed: (u64, u64),
    /// The version of its policy.
    pub policy: Arc<str>,
    pub records: Vec<ReplicationRecord>,
    /// Where the next chunk begins; `None`: this was the last one.
    pub cursor: Option<u64>,
}

/// The part of a peer's status that the sender decides.
#[derive(Clone, Debug)]
pub struct SenderStatus {
    published: Published,
    sent: u64,
    queued_bytes: usize,
    resyncs: u64,
}

impl SenderStatus {
    /// Updates the status of the peer.
    pub fn update(self, status: &mut ReplicationStatus) {
        (status.in_sync_to, status.synced_frame, status.released, status.acknowledged_epoch) = self.published;
        (status.sent, status.queued_bytes, status.resyncs) = (self.sent, self.queued_bytes, self.resyncs);
    }
}

/// Records that a peer has acknowledged: the worker that has sent them, the peer's id and the highest number.
pub type AcknowledgedRecords = (usize, GatewayId, u64);

impl Sender {
    /// A sender without peers.
    pub fn new(workers: usize, encode: EncodeFrame) -> Self {
        let peers = BTreeMap::new();
        Self { encode, peers, has_view: false, has_taken_place: false, requests: 0, requested: vec![false; workers] }
    }

    /// Sets the peers and the number of the view that this gateway uses.
    pub fn set_peers(&mut self, names: Vec<Arc<str>>, view: u64, replication_epoch: u64) {
        self.peers.retain(|name, _| names.contains(name));
        // Sessions left in the tables by a previous process were taken over elsewhere and may have ended: only their
        // changes are replicated. Unless this process has taken its place: what it has is its own.
        let is_inherited = !self.has_view && !self.has_taken_place;
        let acknowledged_epoch = if is_inherited { replication_epoch } else { 0 };
        self.has_view |= view > 0;
        let (workers, encode) = (self.requested.len(), self.encode);
        for name in names {
            let peer = self.peers.entry(name).or_insert_with(|| Peer::new(workers, acknowledged_epoch, encode));
            peer.outbound.set_view(view);
        }
    }

    /// This process takes its predecessor's place: nothing counts as acknowledged that it hasn't sent itself.
    pub fn take_place(&mut self) {
        self.has_taken_place = true;
        self.peers.values_mut().for_each(|peer| peer.outbound.disinherit());
    }

    /// A link has come up; whether it is used: not if a newer one exists.
    pub fn link_up(&mut self, peer: &str, link: u64, incarnation: u64) -> bool {
        let Some(peer) = self.peers.get_mut(peer) else { return false };
        if peer.link.is_some_and(|current| current >= link) {
            return false;
        }
        let previous = peer.incarnation.replace(incarnation);
        if previous.is_some_and(|previous| previous != incarnation) {
            peer.outbound.peer_restarted();
        }
        peer.outbound.link_up();
        peer.link = Some(link);
        true
    }

    /// A link has gone down; whether it was in use.
    pub fn link_down(&mut self, peer: &str, link: u64) -> bool {
        let Some(peer) = self.peers.get_mut(peer) else { return false };
        let was_used = peer.link.take_if(|current| *current == link).is_some();
        if was_used {
            peer.outbound.link_down();
        }
        was_used
    }

    /// A peer has applied all frames of a link up to a number, and rejected records of some if `is_rejected`.
    ///
    /// # Errors
    /// If the frame was never sent: the link must be closed.
    pub fn frames_acknowledged(
        &mut self,
        peer: &str,
        link: u64,
        (number, is_rejected): (u64, bool),
    ) -> Result<Vec<AcknowledgedRecords>, ProtocolViolation> {
        let Some(peer) = self.peers.get_mut(peer).filter(|peer| peer.link == Some(link)) else { return Ok(Vec::new()) };
        if is_rejected {
            peer.outbound.records_rejected(number);
        }
        let numbers = peer.outbound.frames_acknowledged(number)?;
        let numbers = numbers.into_iter().enumerate().filter(|(_, number)| *number > 0);
        let id = peer.id;
        Ok(numbers.filter_map(|(worker, number)| Some((worker, id?, number))).collect())
    }

    /// A full sync to a peer is necessary.
    pub fn require_sync(&mut self, peer: &str) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.outbound.require_sync();
        }
    }

    /// A peer has to know that this gateway has released shards.
    pub fn release(&mut self, peer: &str, release: Release) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.outbound.release(release);
        }
    }

    /// Whether a worker's replication queue may be read.
    pub fn may_read(&self, worker: usize) -> bool {
        self.requested.get(worker) == Some(&false)
    }

    /// Reads the workers' queues; `id_of` looks up a gateway in the policy.
    pub fn reader(&mut self, id_of: impl Fn(&str) -> Option<GatewayId>) -> Reader<'_> {
        self.peers.iter_mut().for_each(|(name, peer)| peer.resolve_id(name, &id_of));
        let by_id = self.peers.values_mut().filter_map(|peer| Some((peer.id?, &mut peer.outbound)));
        Reader(by_id.collect())
    }

    /// All replication queues that may be read were read to their end.
    pub fn queues_drained(&mut self) {
        if !self.requested.contains(&true) {
            // There are no records for peers that aren't in the policy.
            self.peers.values_mut().for_each(|peer| peer.outbound.queues_drained());
        }
    }

    /// The requests to workers that are due. `applied` is the last frame of a peer that is applied here.
    pub fn next_requests(
        &mut self,
        id_of: impl Fn(&str) -> Option<GatewayId>,
        applied: impl Fn(&str) -> u64,
    ) -> Vec<ListRequest> {
        let mut due = Vec::new();
        // Least recently served peer first, so that a peer with many sessions or repeated syncs doesn't delay others.
        let mut peers: Vec<(&Arc<str>, &mut Peer)> = self.peers.iter_mut().collect();
        peers.sort_by_key(|(_, peer)| peer.last_request);
        for (name, peer) in peers {
            peer.resolve_id(name, &id_of);
            peer.outbound.set_applied(applied(name));
            while let Some(chunk) = peer.outbound.next_request() {
                let Some(target) = peer.id else {
                    // Nothing is replicated to a gateway that isn't in the policy.
                    peer.outbound.request_sent();
                    peer.outbound.add_chunk(chunk, &[], None);
                    continue;
                };
                if self.requested[chunk.worker] {
                    break;
                }
                self.requested[chunk.worker] = true;
                peer.outbound.request_sent();
                self.requests += 1;
                peer.last_request = self.requests;
                let (acknowledged_epoch, policy) = (peer.outbound.acknowledged_epoch, peer.outbound.round_policy());
                due.push(ListRequest { peer: name.clone(), target, chunk, acknowledged_epoch, policy });
            }
        }
        due
    }

    /// A worker has replied.
    pub fn listed(&mut self, peer: &str, request: ChunkRequest, listed: &Listed) {
        self.requested[request.worker] = false;
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.outbound.check_ownership(request, listed.observed, &listed.policy);
            peer.outbound.add_chunk(request, &listed.records, listed.cursor);
        }
    }

    /// A worker hasn't replied: its sessions are necessary for the full sync, which a new link has to begin again.
    pub fn list_failed(&mut self, request: ChunkRequest) {
        self.requested[request.worker] = false;
    }

    /// The next frame to send to a peer, if the window permits.
    pub fn next_frame(&mut self, peer: &str) -> Option<Vec<u8>> {
        self.peers.get_mut(peer)?.outbound.next_frame()
    }

    /// The status of each peer whose sync state has changed, or of all peers.
    pub fn status(&mut self, all: bool) -> Vec<(Arc<str>, SenderStatus)> {
        let mut changed = Vec::new();
        for (name, peer) in &mut self.peers {
            let outbound = &peer.outbound;
            let (synced_frame, epoch) = (outbound.synced_frame(), outbound.acknowledged_epoch);
            let published = (outbound.in_sync(), synced_frame, outbound.released.clone(), epoch);
            if all || published != peer.published {
                peer.published = published.clone();
                let (sent, queued_bytes, resyncs) = (outbound.sent, outbound.queued(), outbound.resyncs);
                changed.push((name.clone(), SenderStatus { published, sent, queued_bytes, resyncs }));
            }
        }
        changed
    }
}

impl Peer {
    fn new(workers: usize, acknowledged_epoch: u64, encode: EncodeFrame) -> Self {
        let outbound = SendState::new(workers, acknowledged_epoch, encode);
        Self { id: None, outbound, incarnation: None, link: None, published: Published::default(), last_request: 0 }
    }

    /// Looks up the peer's id in the policy, if unknown so far. No sessions were replicated to it until then.
    fn resolve_id(&mut self, name: &str, id_of: impl Fn(&str) -> Option<GatewayId>) {
        if self.id.is_none() {
            self.id = id_of(name);
            if self.id.is_some() {
                self.outbound.require_sync();
            }
        }
    }
}

/// Takes records from the workers' queues.
#[derive(Debug)]
pub struct Reader<'a>(BTreeMap<GatewayId, &'a mut SendState>);

impl Reader<'_> {
    /// Requires full syncs for which records were lost in a worker's queue.
    pub fn records_lost(&mut self, is_lost: impl Fn(GatewayId) -> bool) {
        self.0.iter_mut().filter(|(id, _)| is_lost(**id)).for_each(|(_, outbound)| outbound.require_sync());
    }

    /// A record from a worker's queue. A gateway that isn't in the view yet gets a full sync when it is added.
    pub fn push(&mut self, worker: usize, to: GatewayId, number: u64, record: &ReplicationRecord) {
        if let Some(outbound) = self.0.get_mut(&to) {
            outbound.push(worker, number, record);
        }
    }
}

#[cfg(test)]
mod tests;
