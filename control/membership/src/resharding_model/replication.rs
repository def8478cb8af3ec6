//! Replication in a gateway's process: what `peer/replication/send_loop.rs`, `receiver.rs` and `peer/mesh.rs` do around
//! the real `SendState` and `ReceiveState`.

use std::collections::VecDeque;
use std::sync::Arc;

use vipgate_dataplane::session::record::ReplicationRecord;

use super::choices::Delay;
use super::coverage::Class;
use super::env::{Env, Invariant, Message, ProcessInput};
use super::frames;
use super::policies::{MAX_GATEWAYS, SHARDS, index_of};
use super::process::{Outgoing, Process, Sent};
use super::table::Record;
use crate::group_state::{PeerState, ReceivedEcho};
use crate::replication::receive_state::ReceiveState;
use crate::replication::send_state::{ChunkRequest, SendState};
use crate::replication::{NumberedFrame, Release};
use crate::succession::PeerProcess;
use crate::{Fingerprint, MembershipView};

/// A peer with an older view than ours for this many heartbeats is sent ours.
const STALE_VIEW_HEARTBEATS: u32 = 3;
/// How long frames wait for the view that the peer uses already.
const VIEW_TIMEOUT: u64 = 5000;

/// What a process knows of a peer in its view, and replication in both directions.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) outbound: SendState,
    /// The peer's process at the last link, and its certificate.
    pub(super) incarnation: Option<u64>,
    fingerprint: Option<Fingerprint>,
    pub(super) link: Option<usize>,
    pub(super) last_echo: Option<ReceivedEcho>,
    pub(super) echo_sent_at: Option<vipgate_dataplane::flow::time::Tick>,
    pub(super) stale_heartbeats: u32,
    pub(super) released: Option<Release>,
    /// `in_sync_to` and the acknowledged release as last published.
    published: (bool, Option<Release>),
    // Receiving.
    pub(super) inbound: Option<ReceiveState>,
    pub(super) inbox: VecDeque<NumberedFrame>,
    /// Since when the first frame waits for its view.
    pub(super) waits_since: Option<u64>,
    pub(super) is_in_sync_from: bool,
    pub(super) sync_view: u64,
    /// The acknowledged epoch when the peer's round began, and the last frame that the peer had applied then.
    pub(super) round_epoch: (u64, u64),
    /// The epoch of a round that had to keep sessions.
    pub(super) kept_in: Option<u64>,
    /// When to request a full sync after records were rejected; whether some were in this round.
    pub(super) retry_at: Option<u64>,
    pub(super) has_rejected: bool,
    /// Whether its last round was by another policy.
    pub(super) has_other_policy: bool,
}

impl Peer {
    fn new(acknowledged_epoch: u64) -> Self {
        Self {
            outbound: SendState::new(1, acknowledged_epoch, frames::encode),
            incarnation: None,
            fingerprint: None,
            link: None,
            last_echo: None,
            echo_sent_at: None,
            stale_heartbeats: 0,
            released: None,
            published: (false, None),
            inbound: None,
            inbox: VecDeque::new(),
            waits_since: None,
            is_in_sync_from: false,
            sync_view: 0,
            round_epoch: (0, 0),
            kept_in: None,
            retry_at: None,
            has_rejected: false,
            has_other_policy: false,
        }
    }

    fn state(&self) -> PeerState {
        PeerState {
            linked: self.link.is_some(),
            last_echo: self.last_echo,
            echo_sent_at: self.echo_sent_at,
            sync_view: self.is_in_sync_from.then_some(self.sync_view),
            in_sync_to: self.outbound.in_sync(),
            released: self.released.clone(),
            acknowledged_policy: self.outbound.released.as_ref().map(|release| release.policy.clone()),
        }
    }

    /// Whether frames are still to be applied.
    pub(super) fn has_frames(&self) -> bool {
        !self.inbox.is_empty()
    }
}

impl Process {
    pub(super) fn peer(&mut self, at: usize) -> Option<&mut Peer> {
        self.peers[at].as_deref_mut()
    }

    /// Shares nothing with the process that this one is a copy of.
    pub(super) fn detach(&mut self) {
        self.rounds = self.rounds.detached();
        for inbound in self.peers.iter_mut().flatten().filter_map(|peer| peer.inbound.as_mut()) {
            inbound.set_rounds(self.rounds.clone());
        }
    }

    pub(super) fn peer_states(&self) -> std::collections::BTreeMap<Arc<str>, PeerState> {
        let named = self.peer_view.members.iter().filter(|member| member.name != self.name);
        named.filter_map(|it| Some((it.name.clone(), self.peers[index_of(&it.name)].as_ref()?.state()))).collect()
    }

    /// See `Peers::set_view`.
    pub(super) fn set_peer_view(&mut self, view: Arc<MembershipView>, env: &mut Env) {
        let acknowledged_epoch = if self.has_peer_view { 0 } else { self.used.replication_epoch() };
        self.has_peer_view |= view.number > 0;
        self.set_named_processes(&view);
        let index = self.index;
        for at in (0..MAX_GATEWAYS).filter(|at| *at != index) {
            let member = view.members.iter().find(|member| index_of(&member.name) == at);
            let current = self.processes[at].as_ref().map(PeerProcess::current);
            let is_same_process = |peer: &Peer| {
                peer.incarnation == current && member.is_some_and(|it| peer.fingerprint == it.fingerprint)
            };
            if let Some(peer) = self.peer(at)
                && !is_same_process(peer)
                && let Some(link) = peer.link
            {
                env.close_link(link, self.index);
                self.link_down(link);
            }
            if member.is_none() {
                self.peers[at] = None;
                continue;
            }
            let peer = self.peers[at].get_or_insert_with(|| Box::new(Peer::new(acknowledged_epoch)));
            peer.outbound.set_view(view.number);
        }
        self.peer_view = view;
    }

    pub(super) fn is_linked(&self, peer: usize) -> bool {
        self.peers[peer].as_ref().is_some_and(|peer| peer.link.is_some())
    }

    pub(super) fn link_up(&mut self, other: (usize, u64), certificate: Fingerprint, link: usize) {
        let (rounds, name) = (self.rounds.clone(), self.peer_view.members.iter());
        let name = name.map(|member| member.name.clone()).find(|name| index_of(name) == other.0);
        let (Some(peer), Some(name)) = (self.peers[other.0].as_deref_mut(), name) else { return };
        if peer.incarnation.replace(other.1).is_some_and(|previous| previous != other.1) {
            peer.outbound.peer_restarted();
        }
        peer.outbound.link_up();
        (peer.fingerprint, peer.link) = (Some(certificate), Some(link));
        peer.inbound = Some(ReceiveState::new(name, rounds));
        peer.inbox.clear();
        (peer.waits_since, peer.is_in_sync_from) = (None, false);
        (peer.kept_in, peer.retry_at, peer.has_rejected) = (None, None, false);
        self.is_due = true;
    }

    pub(super) fn link_down(&mut self, link: usize) {
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.link == Some(link)) {
            peer.link = None;
            peer.outbound.link_down();
            peer.inbound = None;
            peer.inbox.clear();
            (peer.waits_since, peer.is_in_sync_from) = (None, false);
            self.is_due = true;
        }
    }

    /// A message of a peer.
    pub(super) fn receive(&mut self, link: usize, message: Message, env: &mut Env) {
        let from = (0..MAX_GATEWAYS).find(|at| self.peers[*at].as_ref().is_some_and(|peer| peer.link == Some(link)));
        let Some(from) = from.filter(|_| !env.is_link_broken(link)) else { return };
        match message {
            Message::Heartbeat { sent, view } => self.echo(from, link, (sent, view), env),
            Message::Echo { sent, view } => {
                let is_unreachable = self.status.authority == crate::status::Authority::Unreachable;
                let Some(peer) = self.peer(from) else { return };
                peer.last_echo = Some(ReceivedEcho { sent, view });
                self.is_due |= is_unreachable;
            }
            Message::RelayedView(view) => self.apply_relayed_view(view, env),
            Message::SyncRequest => {
                let Some(peer) = self.peer(from) else { return };
                peer.outbound.require_sync();
                env.count(Class::SyncRequested);
            }
            Message::Frame(bytes) => {
                let Some(peer) = self.peer(from) else { return };
                peer.inbox.push_back(frames::decode(&bytes));
                self.process_inbox(from, env);
            }
            Message::Acknowledgement { number, is_rejected } => self.acknowledged(from, number, is_rejected, env),
        }
    }

    /// See `LinkTasks::echo` and `send_view_if_stale`.
    fn echo(
        &mut self,
        from: usize,
        link: usize,
        (sent, view): (vipgate_dataplane::flow::time::Tick, u64),
        env: &mut Env,
    ) {
        let (own_view, promised) = (self.peer_view.clone(), self.group.view().clone());
        let (index, is_promised) = (self.index, self.promise(from, env));
        let Some(peer) = self.peer(from) else { return };
        if is_promised {
            peer.echo_sent_at = Some(env.tick());
            env.send_to_peer(link, index, Message::Echo { sent, view: promised.number });
        }
        peer.stale_heartbeats = if view < own_view.number { peer.stale_heartbeats + 1 } else { 0 };
        if peer.stale_heartbeats >= STALE_VIEW_HEARTBEATS {
            peer.stale_heartbeats = 0;
            env.send_to_peer(link, index, Message::RelayedView(own_view));
        }
    }

    /// See `Peer::frames_acknowledged` and the acknowledgements in `ReplicationQueue::flush`.
    fn acknowledged(&mut self, from: usize, number: u64, is_rejected: bool, env: &mut Env) {
        let Some(peer) = self.peer(from) else { return };
        if is_rejected {
            peer.outbound.records_rejected(number);
        }
        match peer.outbound.frames_acknowledged(number) {
            Ok(numbers) => self.acknowledged[from] = self.acknowledged[from].max(numbers[0]),
            Err(violation) => return env.violate(Invariant::Protocol, || format!("{violation} of {from}")),
        }
        while let Some(sent) = self.unacknowledged.pop_front_if(|it| self.acknowledged[it.to] >= it.number) {
            self.table.acknowledge(sent.id, sent.to, &self.used);
        }
    }

    pub(super) fn request_sync(&mut self, peer: usize, env: &mut Env) {
        if let Some(link) = self.peers[peer].as_ref().and_then(|peer| peer.link) {
            env.send_to_peer(link, self.index, Message::SyncRequest);
        }
    }

    /// Requests and timeouts that are due by time.
    pub(super) fn check_timers(&mut self, env: &mut Env) {
        for at in 0..MAX_GATEWAYS {
            let Some(peer) = self.peer(at) else { continue };
            let is_overdue = peer.retry_at.is_some_and(|due| env.now >= due);
            let has_waited = peer.waits_since.is_some_and(|since| env.now >= since + VIEW_TIMEOUT);
            let link = peer.link;
            if is_overdue {
                peer.retry_at = None;
                self.request_sync(at, env);
            }
            if let Some(link) = link.filter(|_| has_waited) {
                env.close_link(link, self.index);
                self.link_down(link);
            }
        }
    }

    /// The send loop: reads the replication queue, starts full syncs, sends frames.
    pub(super) fn replicate(&mut self, env: &mut Env) {
        loop {
            if !self.is_listing {
                while let Some(Outgoing { to, number, record }) = self.queue.pop_front() {
                    if let Some(peer) = self.peer(to) {
                        peer.outbound.push(0, number, &record);
                    }
                }
                self.peers.iter_mut().flatten().for_each(|peer| peer.outbound.queues_drained());
            }
            if !self.start_listing(env) {
                break;
            }
        }
        for at in 0..MAX_GATEWAYS {
            let index = self.index;
            let Some(peer) = self.peer(at) else { continue };
            if let Some(link) = peer.link {
                while let Some(bytes) = peer.outbound.next_frame() {
                    env.send_to_peer(link, index, Message::Frame(bytes));
                }
            }
            let is_acknowledged = peer.kept_in.is_some_and(|epoch| peer.outbound.acknowledged_epoch > epoch);
            let published = (peer.outbound.in_sync(), peer.outbound.released.clone());
            let is_new = published != peer.published;
            peer.published = published;
            if is_acknowledged {
                peer.kept_in = None;
                self.request_sync(at, env);
            }
            self.is_due |= is_new;
        }
    }

    /// Requests a list of sessions from the worker; whether it has replied at once.
    fn start_listing(&mut self, env: &mut Env) -> bool {
        for at in 0..MAX_GATEWAYS {
            let is_listing = self.is_listing;
            let Some(peer) = self.peer(at) else { continue };
            let Some(request) = peer.outbound.next_request().filter(|_| !is_listing) else { continue };
            peer.outbound.request_sent();
            self.is_listing = true;
            let delay = env.delay(Delay::Listing);
            if delay == 0 {
                self.list(at, request, env);
                return true;
            }
            env.schedule_for(self.id(), env.now + delay, ProcessInput::List { peer: at, request });
        }
        false
    }

    /// The worker lists a slice of its sessions for a peer: those of a shard.
    pub(super) fn list(&mut self, at: usize, request: ChunkRequest, env: &mut Env) {
        self.is_listing = false;
        let Some(peer) = self.peers[at].as_deref_mut() else { return };
        let (epoch, since) = (self.used.replication_epoch(), self.used.active_since);
        let (begun_by, expected) = request.expected;
        let version: Arc<str> = self.used.policy.to_string().into();
        let is_same_policy = peer.outbound.round_policy().is_none_or(|it| it == version);
        let is_consistent = since <= begun_by && is_same_policy && expected.is_none_or(|expected| expected == epoch);
        let (mut records, mut cursor) = (Vec::new(), Some(request.cursor));
        if is_consistent {
            let shard = request.cursor as usize;
            records = self.table.list(shard, at, peer.outbound.acknowledged_epoch, &self.used);
            cursor = Some(request.cursor + 1).filter(|next| *next < SHARDS as u64);
        }
        let records: Vec<ReplicationRecord> = records.into_iter().map(Record::encode).collect();
        peer.outbound.check_ownership(request, (epoch, since), &version);
        peer.outbound.add_chunk(request, &records, cursor);
        if !is_consistent {
            env.count(Class::SyncAborted);
        }
    }

    /// Queues a session's record for its replica targets; see `ReplicationQueue::send_record`.
    pub(super) fn send_record(&mut self, id: u32) {
        let connected = (0..MAX_GATEWAYS).filter(|at| self.used.is_connected(*at)).map(|at| 1 << at).sum();
        if let Some((record, targets)) = self.table.record_to_send(id, &self.used, connected) {
            self.queue_record(record, targets, true);
        }
    }

    /// Whether the record of a session waits until it can be sent.
    pub(super) fn has_queued(&self, session: u32) -> bool {
        self.queue.iter().map(|it| Record::decode(&it.record)).any(|it| it.id == session && !it.is_ended)
    }

    /// A session has ended here.
    pub(super) fn send_end(&mut self, record: Record) {
        let connected: u8 = (0..MAX_GATEWAYS).filter(|at| self.used.is_connected(*at)).map(|at| 1 << at).sum();
        self.queue_record(record, self.used.replica_targets(record.shard) & connected, false);
    }

    fn queue_record(&mut self, record: Record, targets: u8, is_tracked: bool) {
        for to in (0..MAX_GATEWAYS).filter(|to| targets >> to & 1 == 1) {
            self.last_numbers[to] += 1;
            let number = self.last_numbers[to];
            self.queue.push_back(Outgoing { to, number, record: record.encode() });
            if is_tracked {
                self.unacknowledged.push_back(Sent { to, number, id: record.id });
            }
        }
    }
}
