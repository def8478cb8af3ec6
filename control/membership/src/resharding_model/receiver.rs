//! Receiving in a gateway's process: frames of peers, and what they do to its sessions. Mirrors
//! `peer/replication/receiver.rs` around the real `ReceiveState`.

use vipgate_dataplane::session::record::ReplicationRecord;

use super::coverage::Class;
use super::engine::Owner;
use super::env::{Env, Invariant, Message};
use super::policies::{MAX_GATEWAYS, index_of, number_of};
use super::process::Process;
use super::table::{Applied, Record};
use crate::replication::receive_state::Action;
use crate::replication::{NumberedFrame, Release};

/// Delay of the full sync that is requested after records were rejected.
const RETRY_DELAY: u64 = 1000;

impl Process {
    pub(super) fn process_inboxes(&mut self, env: &mut Env) {
        (0..MAX_GATEWAYS).for_each(|at| self.process_inbox(at, env));
    }

    /// See `RecordReceiver::process`.
    pub(super) fn process_inbox(&mut self, at: usize, env: &mut Env) {
        let (view, index, mut has_begun) = (self.peer_view.number, self.index, false);
        while let Some(peer) = self.peer(at)
            && let Some(link) = peer.link
            && let Some(frame) = peer.inbox.front()
        {
            if let NumberedFrame::SyncBegin { view: of_peer, .. } = frame {
                has_begun |= std::mem::take(&mut peer.is_in_sync_from);
                if *of_peer > view {
                    peer.waits_since.get_or_insert(env.now);
                    break;
                }
            }
            peer.waits_since = None;
            let (Some(frame), Some(inbound)) = (peer.inbox.pop_front(), &mut peer.inbound) else { break };
            let (number, action) = match inbound.process(frame) {
                Ok(processed) => processed,
                Err(violation) => {
                    return env.violate(Invariant::Protocol, || format!("frame of {at} at {index}: {violation}"));
                }
            };
            let is_rejected = self.act(at, action, env);
            if let Some(peer) = self.peer(at) {
                peer.outbound.set_applied(number);
            }
            env.send_to_peer(link, index, Message::Acknowledgement { number, is_rejected });
        }
        self.is_due |= has_begun;
    }

    /// Acts on a frame; whether it has rejected records.
    fn act(&mut self, at: usize, action: Action, env: &mut Env) -> bool {
        match action {
            Action::BeginRound { applied, .. } => {
                let Some(peer) = self.peer(at) else { return false };
                peer.round_epoch = (peer.outbound.acknowledged_epoch, applied);
                peer.kept_in = None;
                (peer.retry_at, peer.has_rejected) = (None, false);
                false
            }
            Action::Apply { records, round } => self.apply(at, &records, round, env),
            Action::Purge { round, view, policy, needs_resync } => {
                self.end_round(at, (round, view, number_of(&policy)), needs_resync, env);
                false
            }
            Action::Released(release) => {
                let Some(peer) = self.peer(at) else { return false };
                let view = peer.released.take().map_or(0, |last| last.view).max(release.view);
                peer.released = Some(Release { view, ..release.clone() });
                let name = self.peer_view.members.iter().map(|member| &member.name).find(|name| index_of(name) == at);
                if let Some(name) = name {
                    self.group.mark_released(name.clone(), &release);
                }
                self.is_due = true;
                false
            }
        }
    }

    fn apply(&mut self, at: usize, records: &[ReplicationRecord], round: u8, env: &mut Env) -> bool {
        let mut is_rejected = false;
        let count = self.table.entries.len();
        let mut inserted = 0;
        for record in records.iter().map(Record::decode) {
            match self.table.apply(&record, round, at, &self.used) {
                Applied::Inserted => {
                    inserted += 1;
                    if self.used.owner(record.shard) == Owner::This {
                        self.send_record(record.id);
                    }
                }
                Applied::Rejected => {
                    is_rejected = true;
                }
                Applied::Older => env.count(Class::RecordOlder),
                Applied::Updated | Applied::Ignored => {}
            }
        }
        env.has_removed_sessions |= self.table.entries.len() < count + inserted;
        if let Some(peer) = self.peer(at).filter(|_| is_rejected) {
            peer.has_rejected = true;
            peer.retry_at.get_or_insert(env.now + RETRY_DELAY);
        }
        is_rejected
    }

    /// See `RecordReceiver::purge` and `end_round`.
    fn end_round(&mut self, at: usize, (round, view, policy): (u8, u64, u32), needs_resync: bool, env: &mut Env) {
        // Another one at each end, so that rounds in both directions don't meet again.
        let retry_delay = if self.index < at { RETRY_DELAY } else { RETRY_DELAY * 3 / 2 };
        let Some(peer) = self.peers[at].as_deref_mut() else { return };
        // What a round of ours lists may still be on its way.
        let (epoch, applied) = peer.round_epoch;
        let is_certain = peer.outbound.synced_frame().is_some_and(|end| end <= applied);
        let epoch = if is_certain { epoch } else { 0 };
        let purged = self.table.purge(at, (round, view, policy), epoch, &self.used);
        let is_complete = !purged.is_outdated && !purged.has_other_policy && !purged.has_kept;
        if let Some(inbound) = peer.inbound.as_ref().filter(|_| is_complete) {
            inbound.end_round(round);
        }
        peer.has_other_policy = purged.has_other_policy;
        if purged.has_other_policy {
            peer.retry_at = Some(env.now + retry_delay);
            env.count(Class::OtherPolicy);
        }
        peer.is_in_sync_from = !purged.is_outdated && !needs_resync;
        peer.sync_view = view;
        env.has_removed_sessions |= purged.removed > 0;
        env.counts.add(Class::Purged, purged.removed as u64);
        if purged.has_kept && !purged.is_outdated {
            if is_certain {
                peer.kept_in = Some(epoch);
            } else {
                peer.retry_at = Some(env.now + retry_delay);
            }
            env.count(Class::Kept);
        } else if needs_resync || purged.is_outdated {
            env.count(Class::Outdated);
            self.request_sync(at, env);
        } else {
            env.count(Class::SyncCompleted);
        }
        self.is_due = true;
    }
}
