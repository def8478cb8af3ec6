//! A process's links to its peers: messages around the real `Sender` and `Receiver`, heartbeats and their echoes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use vipgate_dataplane::flow::time::Tick;

use super::coverage::Class;
use super::env::{Env, Invariant, Message};
use super::frames;
use super::policies::{MAX_GATEWAYS, NAMES, index_of};
use super::process::Process;
use crate::group_state::{PeerState, ReceivedEcho};
use crate::member;
use crate::replication::receiver::{Effect, Failure, Input};
use crate::replication::{NumberedFrame, Receiver, ReplicationStatus};
use crate::succession::PeerProcess;
use crate::{Fingerprint, MembershipView};

/// A peer with an older view than ours for this many heartbeats is sent ours.
const STALE_VIEW_HEARTBEATS: u32 = 3;

/// A peer in the view, and the link to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    /// Its process at the last link, and the certificate of that.
    pub(super) incarnation: Option<u64>,
    fingerprint: Option<Fingerprint>,
    pub(super) link: Option<usize>,
    last_echo: Option<ReceivedEcho>,
    echo_sent_at: Option<Tick>,
    stale_heartbeats: u32,
    receiver: Option<Receiver>,
    /// Frames that the receiver isn't ready for yet.
    inbox: VecDeque<NumberedFrame>,
    pub(super) replication: ReplicationStatus,
}

impl Peer {
    fn state(&self) -> PeerState {
        let (last_echo, echo_sent_at) = (self.last_echo, self.echo_sent_at);
        PeerState { last_echo, echo_sent_at, ..PeerState::of(self.link.is_some(), &self.replication) }
    }

    /// Whether frames are still to be applied.
    pub(super) fn has_frames(&self) -> bool {
        !self.inbox.is_empty() || self.receiver.as_ref().is_some_and(|receiver| !receiver.is_ready())
    }

    fn close(&mut self) {
        (self.link, self.receiver) = (None, None);
        self.inbox.clear();
        self.replication.link_down();
    }
}

impl Process {
    fn peer(&mut self, at: usize) -> Option<&mut Peer> {
        self.peers[at].as_deref_mut()
    }

    /// Shares nothing with the process that this one is a copy of.
    pub(super) fn detach(&mut self) {
        self.latest = self.latest.detached();
        self.used = self.latest.clone();
        self.rounds = self.rounds.detached();
        for receiver in self.peers.iter_mut().flatten().filter_map(|peer| peer.receiver.as_mut()) {
            receiver.set_rounds(self.rounds.clone());
        }
    }

    pub(super) fn peer_states(&self) -> BTreeMap<Arc<str>, PeerState> {
        let named = self.peer_view.members.iter().filter(|member| member.name != self.name);
        named.filter_map(|it| Some((it.name.clone(), self.peers[index_of(&it.name)].as_ref()?.state()))).collect()
    }

    /// Links are for this view from here on: those to other processes or with other certificates are closed.
    pub(super) fn set_peer_view(&mut self, view: Arc<MembershipView>, env: &mut Env) {
        let others = view.members.iter().map(|member| member.name.clone()).filter(|name| *name != self.name);
        self.sender.set_peers(others.collect(), view.number, self.used.replication_epoch());
        self.set_named_processes(&view);
        let index = self.index;
        for at in (0..MAX_GATEWAYS).filter(|at| *at != index) {
            let member = view.member(NAMES[at]);
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
            } else {
                self.peers[at].get_or_insert_default();
            }
        }
        self.peer_view = view;
        // Frames may wait for this view.
        self.receivers_tick(env);
    }

    pub(super) fn is_linked(&self, peer: usize) -> bool {
        self.peers[peer].as_ref().is_some_and(|peer| peer.link.is_some())
    }

    pub(super) fn link_up(&mut self, other: (usize, u64), certificate: Fingerprint, link: usize) {
        let rounds = self.rounds.clone();
        let (Some(peer), Some(member)) = (self.peers[other.0].as_deref_mut(), self.peer_view.member(NAMES[other.0]))
        else {
            return;
        };
        self.sender.link_up(&member.name, link as u64, other.1);
        (peer.incarnation, peer.fingerprint, peer.link) = (Some(other.1), Some(certificate), Some(link));
        peer.receiver = Some(Receiver::new(member.name.clone(), rounds, 0, self.index < other.0));
        peer.inbox.clear();
        peer.replication.link_up();
        self.is_due = true;
    }

    pub(super) fn link_down(&mut self, link: usize) {
        for (at, peer) in self.peers.iter_mut().enumerate() {
            if let Some(peer) = peer.as_mut().filter(|peer| peer.link == Some(link)) {
                peer.close();
                self.sender.link_down(NAMES[at], link as u64);
                self.is_due = true;
            }
        }
    }

    pub(super) fn send_heartbeats_to_peers(&mut self, env: &mut Env) {
        let message = Message::Heartbeat { sent: env.tick(), view: self.peer_view.number };
        for link in self.peers.iter().flatten().filter_map(|peer| peer.link) {
            env.send_to_peer(link, self.index, message.clone());
        }
    }

    /// A message of a peer.
    pub(super) fn receive(&mut self, link: usize, message: Message, env: &mut Env) {
        let from = (0..MAX_GATEWAYS).find(|at| self.peers[*at].as_ref().is_some_and(|peer| peer.link == Some(link)));
        let Some(from) = from.filter(|_| !env.is_link_broken(link)) else { return };
        match message {
            Message::Heartbeat { sent, view } => self.echo(from, link, (sent, view), env),
            Message::Echo { sent, view } => {
                let is_reachable = self.status.authority == crate::status::Authority::Reachable;
                let Some(peer) = self.peer(from) else { return };
                peer.last_echo = Some(ReceivedEcho { sent, view });
                // Else it decides nothing: the next input is early enough.
                self.is_due |= !is_reachable || self.member.state().has_taken_place();
            }
            Message::RelayedView(view) => self.apply_relayed_view(view, env),
            Message::SyncRequest => {
                self.sender.require_sync(NAMES[from]);
                env.count(Class::SyncRequested);
            }
            Message::Frame(bytes) => {
                let Some(peer) = self.peer(from) else { return };
                peer.inbox.push_back(frames::decode(&bytes));
                self.process_inbox(from, env);
            }
            Message::Acknowledgement { number, is_rejected } => {
                match self.sender.frames_acknowledged(NAMES[from], link as u64, (number, is_rejected)) {
                    Ok(records) => self.acknowledge_records(&records, env),
                    Err(violation) => env.violate(Invariant::Protocol, || format!("{violation} of {from}")),
                }
            }
        }
    }

    /// Echoes a heartbeat, and relays our view to a peer that has missed it.
    fn echo(&mut self, from: usize, link: usize, (sent, view): (Tick, u64), env: &mut Env) {
        let (own_view, promised) = (self.peer_view.clone(), self.member.state().view().number);
        let (index, is_promised) = (self.index, self.promise(from, env));
        let Some(peer) = self.peer(from) else { return };
        if is_promised {
            peer.echo_sent_at = Some(env.tick());
            env.send_to_peer(link, index, Message::Echo { sent, view: promised });
        }
        peer.stale_heartbeats = if view < own_view.number { peer.stale_heartbeats + 1 } else { 0 };
        if peer.stale_heartbeats >= STALE_VIEW_HEARTBEATS {
            peer.stale_heartbeats = 0;
            env.send_to_peer(link, index, Message::RelayedView(own_view));
        }
    }

    pub(super) fn request_sync(&mut self, peer: usize, env: &mut Env) {
        if let Some(link) = self.peers[peer].as_ref().and_then(|peer| peer.link) {
            env.send_to_peer(link, self.index, Message::SyncRequest);
        }
    }

    /// Time has passed, or this gateway uses another view.
    pub(super) fn receivers_tick(&mut self, env: &mut Env) {
        for at in 0..MAX_GATEWAYS {
            self.receiver_input(at, Input::Tick, env);
            self.process_inbox(at, env);
        }
    }

    fn process_inbox(&mut self, at: usize, env: &mut Env) {
        while let Some(peer) = self.peer(at)
            && peer.receiver.as_ref().is_some_and(Receiver::is_ready)
            && let Some(frame) = peer.inbox.pop_front()
        {
            self.receiver_input(at, Input::Frame { frame, evicted: 0 }, env);
        }
    }

    pub(super) fn receiver_input(&mut self, at: usize, input: Input, env: &mut Env) {
        let view = self.peer_view.number;
        let mut next = Some(input);
        while let Some(input) = next.take() {
            let Some(Peer { receiver: Some(receiver), replication, link: Some(link), .. }) = self.peer(at) else {
                return;
            };
            let (was_in_sync, link) = (replication.in_sync_from, *link);
            let effects = receiver.input(env.instant(), input, view, replication);
            let has_changed = was_in_sync != replication.in_sync_from;
            self.is_due |= has_changed;
            match effects {
                Ok(effects) => effects.into_iter().for_each(|effect| next = self.receiver_effect(at, effect, env)),
                Err(Failure::UnknownView(_)) => {
                    env.close_link(link, self.index);
                    self.link_down(link);
                }
                Err(Failure::Protocol(violation)) => {
                    let index = self.index;
                    env.violate(Invariant::Protocol, || format!("frame of {at} at {index}: {violation}"));
                }
            }
        }
    }

    /// Does what a receiver decides; returns the worker's reply.
    fn receiver_effect(&mut self, at: usize, effect: Effect, env: &mut Env) -> Option<Input> {
        match effect {
            Effect::Apply { records, round } => {
                let rejected = self.apply(at, &records, round, env);
                return Some(Input::Applied { rejected });
            }
            Effect::Purge { round, view, policy, acknowledged_epoch } => {
                return Some(Input::Purged(self.purge(at, (round, view, &policy), acknowledged_epoch, env)));
            }
            Effect::Acknowledge { number, is_rejected } => {
                if let Some(link) = self.peers[at].as_ref().and_then(|peer| peer.link) {
                    env.send_to_peer(link, self.index, Message::Acknowledgement { number, is_rejected });
                }
            }
            Effect::RequestSync => self.request_sync(at, env),
            Effect::Released(release) => {
                if let Some(gateway) = self.peer_view.member(NAMES[at]).map(|member| member.name.clone()) {
                    self.input(member::Input::Released { gateway, release }, env);
                }
            }
            Effect::Synced => {
                env.count(Class::SyncCompleted);
                self.is_due = true;
            }
        }
        None
    }
}
