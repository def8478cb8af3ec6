//! The worker of a process: its replication queue, and its replies to the real `Sender` and `Receiver`.

use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::replication::round::RecordChunk;
use vipgate_dataplane::session::record::ReplicationRecord;

use super::choices::Delay;
use super::coverage::Class;
use super::env::{Env, Message, ProcessInput};
use super::policies::{NAMES, index_of};
use super::process::Process;
use super::table::{Outgoing, live_session_of};
use crate::replication::receiver::{Input, Purged};
use crate::replication::sender::{AcknowledgedRecords, ListRequest, Listed};

/// The id by which the sender knows a gateway: its number.
#[expect(clippy::unnecessary_wraps, reason = "real gateways may not be in the policy")]
fn id_of(name: &str) -> Option<GatewayId> {
    Some(GatewayId(index_of(name) as u8))
}

impl Process {
    /// Reads the replication queue, starts full syncs, sends frames.
    pub(super) fn replicate(&mut self, env: &mut Env) {
        loop {
            if self.sender.may_read(0) {
                let mut reader = self.sender.reader(id_of);
                while let Some(Outgoing { to, number, record }) = self.table.outgoing.pop_front() {
                    reader.push(0, GatewayId(to as u8), number, &record);
                }
                self.sender.queues_drained();
            }
            if !self.start_listing(env) {
                break;
            }
        }
        for (peer, name) in self.peers.iter().zip(NAMES) {
            let Some(link) = peer.as_ref().and_then(|peer| peer.link) else { continue };
            while let Some(bytes) = self.sender.next_frame(name) {
                env.send_to_peer(link, self.index, Message::Frame(bytes));
            }
        }
        for (name, status) in self.sender.status(false) {
            let at = index_of(&name);
            let Some(peer) = &mut self.peers[at] else { continue };
            status.update(&mut peer.replication);
            self.is_due = true;
            self.receiver_input(at, Input::Tick, env);
        }
    }

    /// Requests lists of sessions from the worker; whether it has replied at once.
    fn start_listing(&mut self, env: &mut Env) -> bool {
        let peers = &self.peers;
        let applied = |name: &str| peers[index_of(name)].as_ref().map_or(0, |peer| peer.replication.applied);
        let mut has_replied = false;
        for request in self.sender.next_requests(id_of, applied) {
            if let Some(peer) = &mut self.peers[index_of(&request.peer)] {
                // What the worker lists is on its way from then on.
                peer.replication.synced_frame = None;
            }
            let delay = env.delay(Delay::Listing);
            if delay == 0 {
                self.list(&request, env);
                has_replied = true;
            } else {
                let input = ProcessInput::List { request: Box::new(request) };
                env.schedule_for(self.id(), env.now + delay, input);
            }
        }
        has_replied
    }

    /// The worker lists some of its sessions for a peer.
    pub(super) fn list(&mut self, request: &ListRequest, env: &mut Env) {
        let (chunk, of_peer) = (request.chunk, (request.acknowledged_epoch, request.policy.clone()));
        let target = request.target.0.into();
        let listed = self.table.list(target, (chunk.cursor, chunk.expected), of_peer, &self.used, env);
        let RecordChunk { observed, policy, records, cursor, .. } = listed;
        if cursor == Some(chunk.cursor) {
            env.count(Class::SyncAborted);
        }
        self.sender.listed(
            &request.peer,
            chunk,
            &Listed { observed, policy: policy.unwrap_or_default(), records, cursor },
        );
    }

    /// Applies records of a peer; returns how many were rejected.
    pub(super) fn apply(&mut self, at: usize, records: &[ReplicationRecord], round: u8, env: &mut Env) -> u64 {
        let applied = self.table.apply(records, (round, at), &self.used, env);
        env.counts.add(Class::RecordOlder, applied.older);
        env.has_removed_sessions = true;
        applied.rejected
    }

    /// Purges standby sessions that a round of a peer hasn't listed.
    pub(super) fn purge(
        &mut self,
        at: usize,
        (round, view, policy): (u8, u64, &str),
        acknowledged_epoch: u64,
        env: &mut Env,
    ) -> Purged {
        let chunk = self.table.purge(at, (round, view, policy.into()), acknowledged_epoch, &self.used, env);
        env.has_removed_sessions |= chunk.removed > 0;
        env.counts.add(Class::Purged, chunk.removed);
        env.counts.add(Class::Kept, chunk.kept.into());
        env.counts.add(Class::Outdated, chunk.outdated.into());
        env.counts.add(Class::OtherPolicy, chunk.has_other_policy.into());
        Purged {
            removed: chunk.removed,
            outdated: chunk.outdated,
            has_other_policy: chunk.has_other_policy,
            kept: chunk.kept,
        }
    }

    /// Marks sessions as replicated.
    pub(super) fn acknowledge_records(&mut self, records: &[AcknowledgedRecords], env: &Env) {
        for (_, id, number) in records {
            self.table.acknowledge(id.0.into(), *number, &self.used, env);
        }
    }

    /// Whether the record of a session waits until it can be sent.
    pub(super) fn has_queued(&self, session: u32) -> bool {
        self.table.outgoing.iter().any(|it| live_session_of(&it.record) == Some(session))
    }
}
