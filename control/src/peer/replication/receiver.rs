//! Receiver task of one link: passes records to the workers frame by frame, and acknowledges each frame when they have
//! applied it.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use vipgate_common::Backoff;
use vipgate_dataplane::replication::round::PurgeChunk;
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::worker::command::Command;

use crate::membership::replication::Release;
use crate::membership::replication::receive_state::{Action, ReceiveState};
use crate::membership::replication::sync_rounds::SyncRounds;
use crate::peer::PeerEvent;
use crate::peer::frame::{self, LinkError};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Ack, SyncRequest};
use crate::peer::replication::numbered;
use crate::peer::status::{ReplicationStatus, StatusPublisher};
use crate::peer::view::PeerView;
use crate::peer::workers::{ApplyGuard, ApplyLocks, WorkerRequest, Workers, request_all};

/// Timeout for receiving the view that the peer uses already.
const VIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay of the full sync that is requested after records were rejected for lack of capacity, or a round couldn't remove
/// what it hadn't listed. Doubles each time, up to a minute: the table may stay full.
pub(crate) const RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// Schedules full syncs after rejected records.
#[derive(Debug)]
struct RetrySchedule {
    due: Option<Instant>,
    backoff: Backoff,
    /// During a round: whether records were rejected since its start. The full sync is requested after its end, since a
    /// request would abort it.
    in_round: Option<bool>,
}

impl RetrySchedule {
    fn new(min_delay: Duration) -> Self {
        Self { due: None, backoff: Backoff::new((min_delay, MAX_RETRY_DELAY)), in_round: None }
    }

    fn rejected(&mut self, now: Instant) {
        match &mut self.in_round {
            Some(in_round) => *in_round = true,
            None => _ = self.due.get_or_insert(now + self.backoff.peek()),
        }
    }

    fn requested(&mut self) {
        self.due = None;
        self.backoff.next_delay();
    }

    fn round_begins(&mut self) {
        (self.due, self.in_round) = (None, Some(false));
    }

    fn round_ends(&mut self, now: Instant) {
        if self.in_round.take() == Some(true) {
            self.rejected(now);
        } else {
            self.backoff.halve();
        }
    }

    /// Waits until a full sync is due; forever while no records were rejected.
    async fn due(&self) {
        match self.due {
            Some(due) => sleep_until(due).await,
            None => std::future::pending().await,
        }
    }
}

/// State of the current sync round, and of full syncs that are to be requested.
#[derive(Debug)]
struct RoundState {
    /// The epoch of the last full sync that the peer had acknowledged when the round began.
    acknowledged_epoch: u64,
    /// The last frame of this gateway that the peer had applied then; 0: none.
    applied: u64,
    /// The same for a round that had to keep sessions that it didn't list.
    kept_in: Option<u64>,
    retry: RetrySchedule,
}

/// Result of the purge at the end of a round.
#[derive(Clone, Copy, Debug, Default)]
struct Purged {
    removed: u64,
    /// The active members have changed since the round began.
    outdated: bool,
    /// The peer has another policy.
    has_other_policy: bool,
    /// Why sessions were kept that the round didn't list; `None`: none were.
    kept: Option<Kept>,
}

/// Why a purge has kept sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// The peer may not have received them yet.
    Unacknowledged,
    /// A full sync of this gateway, which may have listed them, hadn't reached the peer when its round began.
    SyncInFlight,
}

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
    /// The delay of the first full sync that is requested after records were rejected.
    pub(crate) retry_delay: Duration,
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
        let mut inbound = ReceiveState::new(self.peer.clone(), self.sync_rounds.clone());
        let retry = RetrySchedule::new(self.retry_delay);
        let mut round = RoundState { acknowledged_epoch: 0, applied: 0, kept_in: None, retry };
        let mut evicted = self.evicted();
        loop {
            let kind = tokio::select! {
                kind = frames.recv() => match kind {
                    Some(kind) => kind,
                    None => return Ok(()),
                },
                () = self.acknowledged_after(round.kept_in) => {
                    round.kept_in = None;
                    self.send(Kind::SyncRequest(SyncRequest {}))?;
                    continue;
                }
                () = round.retry.due() => {
                    round.retry.requested();
                    self.send(Kind::SyncRequest(SyncRequest {}))?;
                    continue;
                }
            };
            // Standby sessions that a full table has evicted are missing here, whichever peer has sent them.
            let now_evicted = self.evicted();
            let mut rejected = now_evicted - std::mem::replace(&mut evicted, now_evicted);
            let (number, action) = inbound.process(numbered::decode(&kind)?)?;
            match action {
                Action::BeginRound { view, applied } => self.begin_round(view, applied, &mut round).await?,
                Action::Apply { records, round } => {
                    let count = records.len() as u64;
                    rejected += self.apply(records, round, &guard).await?;
                    self.update_status(|status| status.received += count);
                }
                Action::Purge { round: number, view, policy, needs_resync } => {
                    // What a full sync of this gateway lists may still be on its way, though workers treat it as sent.
                    let in_flight = !self.status.is_synced_by(&self.peer, round.applied);
                    let epoch = if in_flight { 0 } else { round.acknowledged_epoch };
                    let mut purged = self.purge(number, view, &policy, epoch, &guard).await?;
                    if in_flight {
                        purged.kept = purged.kept.map(|_| Kept::SyncInFlight);
                    }
                    if !purged.outdated && !purged.has_other_policy && purged.kept.is_none() {
                        inbound.end_round(number);
                    }
                    self.end_round(view, needs_resync, purged, &mut round).await?;
                }
                Action::Released(release) => self.released(release).await,
            }
            if rejected > 0 {
                tracing::debug!(event = "records_rejected", gateway = &*self.peer, rejected);
                round.retry.rejected(Instant::now());
            }
            self.update_status(|status| status.applied = number);
            self.send(Kind::Ack(Ack { number, refused: rejected > 0 }))?;
        }
    }

    /// The peer has released shards.
    async fn released(&self, release: Release) {
        self.update_status(|status| {
            let view = status.peer_released.take().map_or(0, |last| last.view).max(release.view);
            status.peer_released = Some(Release { view, ..release.clone() });
        });
        self.emit(PeerEvent::Released { gateway: self.peer.clone(), release }).await;
    }

    /// A sync round begins under a view.
    async fn begin_round(&self, view: u64, applied: u64, round: &mut RoundState) -> Result<(), LinkError> {
        self.update_status(|status| status.in_sync_from = false);
        self.wait_for_view(view).await?;
        (round.acknowledged_epoch, round.kept_in) = (self.status.acknowledged_epoch(&self.peer), None);
        round.applied = applied;
        round.retry.round_begins();
        let acknowledged_epoch = round.acknowledged_epoch;
        tracing::debug!(event = "round_begins", gateway = &*self.peer, view, acknowledged_epoch);
        Ok(())
    }

    /// A sync round has ended, and sessions that it hasn't listed are purged: reports that the standby sessions are
    /// complete, or requests another full sync.
    async fn end_round(
        &self,
        view: u64,
        needs_resync: bool,
        purged: Purged,
        round: &mut RoundState,
    ) -> Result<(), LinkError> {
        tracing::debug!(event = "round_ends", gateway = &*self.peer, view, again = needs_resync, ?purged);
        round.retry.round_ends(Instant::now());
        if purged.has_other_policy || purged.kept == Some(Kept::SyncInFlight) {
            // Not at once: one of both gets the other one's policy later, or never; and rounds in both directions would
            // meet again and again.
            round.retry.rejected(Instant::now());
        }
        self.update_status(|status| {
            // Kept sessions don't matter here: none of the peer's sessions is missing.
            status.in_sync_from = !purged.outdated && !needs_resync;
            status.has_other_policy = purged.has_other_policy;
            status.sync_view = view;
            status.purged += purged.removed;
        });
        if purged.kept == Some(Kept::Unacknowledged) && !purged.outdated {
            // An immediate full sync would list the same sessions: the peer must get the kept ones first.
            round.kept_in = Some(round.acknowledged_epoch);
        } else if needs_resync || purged.outdated {
            self.send(Kind::SyncRequest(SyncRequest {}))?;
        } else {
            self.emit(PeerEvent::Synced { gateway: self.peer.clone() }).await;
        }
        Ok(())
    }

    /// Waits until the peer has acknowledged a full sync of a later epoch; forever without an epoch.
    async fn acknowledged_after(&self, epoch: Option<u64>) {
        match epoch {
            Some(epoch) => self.status.wait_for_epoch_after(&self.peer, epoch).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until this gateway uses the peer's view, since the owner of a shard decides how its records are applied.
    async fn wait_for_view(&self, view: u64) -> Result<(), LinkError> {
        let mut own = self.view.clone();
        let reached = timeout(VIEW_TIMEOUT, own.wait_for(|own| own.number >= view)).await;
        match reached {
            Ok(_) => Ok(()),
            Err(_) => {
                Err(LinkError::Connection(format!("the peer uses view {view}, which this gateway hasn't received")))
            }
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
        round: u8,
        view: u64,
        policy: &Arc<str>,
        acknowledged_epoch: u64,
        guard: &ApplyGuard,
    ) -> Result<Purged, LinkError> {
        let mut purged = Purged::default();
        // A peer that isn't in the policy owns nothing.
        let Some(owner) = self.workers.gateway_id(&self.peer) else { return Ok(purged) };
        for worker in 0..self.workers.count() {
            let mut chunk = PurgeChunk {
                owner,
                round,
                view,
                policy: policy.clone(),
                acknowledged_epoch,
                cursor: Some(0),
                removed: 0,
                outdated: false,
                has_other_policy: false,
                kept: false,
            };
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
            purged.kept = purged.kept.or(chunk.kept.then_some(Kept::Unacknowledged));
        }
        Ok(purged)
    }

    fn update_status(&self, change: impl FnOnce(&mut ReplicationStatus)) {
        self.status.update(&self.peer, |peer| change(&mut peer.replication));
    }

    async fn emit(&self, event: PeerEvent) {
        // Without a receiver, the event isn't needed.
        let _ = self.events.send(event).await;
    }
}

#[cfg(test)]
mod tests;
