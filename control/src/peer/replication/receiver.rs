//! Receiver task of one link: passes frames to `membership::replication::Receiver`, and does what that decides: workers
//! apply and purge records, the peer gets acknowledgements and requests.

use std::sync::Arc;

use crossbeam::channel::Sender;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use vipgate_dataplane::replication::round::PurgeChunk;
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::worker::command::Command;

use crate::membership::replication::Receiver;
use crate::membership::replication::receiver::{Effect, Failure, Input, Purged};
use crate::membership::replication::sync_rounds::SyncRounds;
use crate::peer::PeerEvent;
use crate::peer::frame::{self, LinkError};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Ack, SyncRequest};
use crate::peer::replication::numbered;
use crate::peer::status::StatusPublisher;
use crate::peer::view::PeerView;
use crate::peer::workers::{ApplyGuard, ApplyLocks, WorkerRequest, Workers, request_all};

/// Applies the records received over one link.
#[derive(Debug)]
pub(crate) struct RecordReceiver<'a> {
    pub(crate) peer: Arc<str>,
    pub(crate) workers: Arc<dyn Workers>,
    pub(crate) sync_rounds: SyncRounds,
    pub(crate) apply_locks: &'a ApplyLocks,
    pub(crate) status: StatusPublisher,
    pub(crate) events: mpsc::Sender<PeerEvent>,
    /// The view that the workers use.
    pub(crate) view: watch::Receiver<Arc<PeerView>>,
    /// Queue for acknowledgements and sync requests.
    pub(crate) outgoing: mpsc::Sender<Vec<u8>>,
    /// Whether this gateway's name is the lower one of both.
    pub(crate) is_first: bool,
}

impl RecordReceiver<'_> {
    /// Runs until the first error.
    pub(crate) async fn run(self, mut frames: mpsc::Receiver<Kind>) -> LinkError {
        match self.process(&mut frames).await {
            Ok(()) => LinkError::ShuttingDown,
            Err(reason) => reason,
        }
    }

    async fn process(&self, frames: &mut mpsc::Receiver<Kind>) -> Result<(), LinkError> {
        let guard = self.apply_locks.lock(&self.peer).await;
        let (peer, rounds) = (self.peer.clone(), self.sync_rounds.clone());
        let mut receiver = Receiver::new(peer, rounds, self.evicted(), self.is_first);
        loop {
            let input = tokio::select! {
                kind = frames.recv(), if receiver.is_ready() => match kind {
                    Some(kind) => Input::Frame { frame: numbered::decode(&kind)?, evicted: self.evicted() },
                    None => return Ok(()),
                },
                () = self.view_reached(receiver.awaited_view()) => Input::Tick,
                () = self.acknowledged_after(receiver.awaited_epoch()) => Input::Tick,
                () = wait_until(receiver.deadline()) => Input::Tick,
            };
            self.handle(&mut receiver, input, &guard).await?;
        }
    }

    /// Passes an input to the receiver, and then what the workers reply.
    async fn handle(&self, receiver: &mut Receiver, input: Input, guard: &ApplyGuard) -> Result<(), LinkError> {
        let mut next = Some(input);
        while let Some(input) = next.take() {
            let (now, view) = (Instant::now().into_std(), self.view.borrow().number);
            let effects = self
                .status
                .change(&self.peer, |peer| receiver.input(now, input, view, &mut peer.replication))
                // It isn't in the view any more.
                .ok_or(LinkError::UntrustedCertificate)??;
            for effect in effects {
                next = self.perform(effect, guard).await?;
            }
        }
        Ok(())
    }

    /// Does what the receiver decides; returns the workers' reply.
    async fn perform(&self, effect: Effect, guard: &ApplyGuard) -> Result<Option<Input>, LinkError> {
        match effect {
            Effect::Apply { records, round } => {
                let rejected = self.apply(records, round, guard).await?;
                return Ok(Some(Input::Applied { rejected }));
            }
            Effect::Purge { round, view, policy, acknowledged_epoch } => {
                let purged = self.purge((round, view, &policy), acknowledged_epoch, guard).await?;
                tracing::debug!(event = "round_ends", gateway = &*self.peer, view, acknowledged_epoch, ?purged);
                return Ok(Some(Input::Purged(purged)));
            }
            Effect::Acknowledge { number, is_rejected } => {
                self.send(Kind::Ack(Ack { number, refused: is_rejected }))?;
            }
            Effect::RequestSync => self.send(Kind::SyncRequest(SyncRequest {}))?,
            Effect::Released(release) => {
                self.emit(PeerEvent::Released { gateway: self.peer.clone(), release }).await;
            }
            Effect::Synced => self.emit(PeerEvent::Synced { gateway: self.peer.clone() }).await,
        }
        Ok(None)
    }

    /// Waits until the peer has acknowledged a full sync of a later epoch; forever without an epoch.
    async fn acknowledged_after(&self, epoch: Option<u64>) {
        match epoch {
            Some(epoch) => self.status.wait_for_epoch_after(&self.peer, epoch).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until this gateway uses a view; forever without one.
    async fn view_reached(&self, view: Option<u64>) {
        let Some(view) = view else { return std::future::pending().await };
        if self.view.clone().wait_for(|own| own.number >= view).await.is_err() {
            // All links end.
            std::future::pending::<()>().await;
        }
    }

    /// Number of standby sessions that the workers have evicted for lack of capacity.
    fn evicted(&self) -> u64 {
        (0..self.workers.count()).map(|worker| self.workers.replication_sender(worker).evicted()).sum()
    }

    fn send(&self, kind: Kind) -> Result<(), LinkError> {
        self.outgoing.try_send(frame::encode(kind)).map_err(|_| LinkError::SendQueueFull)
    }

    /// Passes records to the workers; returns the number of records rejected for lack of capacity.
    async fn apply(&self, records: Vec<ReplicationRecord>, round: u8, guard: &ApplyGuard) -> Result<u64, LinkError> {
        // A peer that isn't in the policy owns no shards, so its records don't matter.
        let Some(source) = self.workers.gateway_id(&self.peer) else { return Ok(0) };
        let mut by_worker: Vec<Vec<ReplicationRecord>> = vec![Vec::new(); self.workers.count()];
        for record in records {
            by_worker[self.workers.worker_of(&record)].push(record);
        }
        let mut requests: Vec<WorkerRequest<Vec<ReplicationRecord>>> = Vec::new();
        for (worker, records) in by_worker.into_iter().enumerate().filter(|(_, records)| !records.is_empty()) {
            let command = move |reply| Command::ApplyRecords { records, round, source, reply };
            requests.push((worker, Box::new(command)));
        }
        let rejected =
            request_all(&self.workers, requests, guard.clone()).await.map_err(LinkError::WorkerUnavailable)?;
        Ok(rejected.iter().map(|records| records.len() as u64).sum())
    }

    async fn purge(
        &self,
        (round, view, policy): (u8, u64, &Arc<str>),
        acknowledged_epoch: u64,
        guard: &ApplyGuard,
    ) -> Result<Purged, LinkError> {
        let mut purged = Purged::default();
        // A peer that isn't in the policy owns nothing.
        let Some(owner) = self.workers.gateway_id(&self.peer) else { return Ok(purged) };
        for worker in 0..self.workers.count() {
            let mut chunk = PurgeChunk::first(owner, (round, view, policy.clone()), acknowledged_epoch);
            while chunk.cursor.is_some() {
                let command = move |reply: Sender<PurgeChunk>| Command::PurgeStandby { chunk, reply };
                let replies = request_all(&self.workers, vec![(worker, Box::new(command))], guard.clone())
                    .await
                    .map_err(LinkError::WorkerUnavailable)?;
                chunk = replies.into_iter().next().ok_or(LinkError::WorkerUnavailable(worker))?;
            }
            purged.removed += chunk.removed;
            purged.outdated |= chunk.outdated;
            purged.has_other_policy |= chunk.has_other_policy;
            purged.kept |= chunk.kept;
        }
        Ok(purged)
    }

    async fn emit(&self, event: PeerEvent) {
        // Without a receiver, the event isn't needed.
        let _ = self.events.send(event).await;
    }
}

impl From<Failure> for LinkError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Protocol(violation) => violation.into(),
            Failure::UnknownView(_) => Self::Connection(failure.to_string()),
        }
    }
}

/// Waits until a deadline; forever without one.
async fn wait_until(deadline: Option<std::time::Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
