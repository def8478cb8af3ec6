//! Receiver of session replication, of one link: what workers do with each frame, when it is acknowledged, and when
//! another full sync is requested. One frame at a time: the next one waits until the last one is acknowledged.

use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use vipgate_dataplane::session::record::ReplicationRecord;

use super::receive_state::{Action, ReceiveState};
pub use super::retry::RETRY_DELAY;
use super::retry::RetrySchedule;
use super::status::ReplicationStatus;
use super::sync_rounds::SyncRounds;
use super::{NumberedFrame, ProtocolViolation, Release};

/// Timeout for receiving the view that the peer uses already.
pub const VIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// An input of the receiver.
#[derive(Clone, Debug)]
pub enum Input {
    /// The next frame, only while the receiver is ready; and how many standby sessions the workers have evicted so far.
    Frame { frame: NumberedFrame, evicted: u64 },
    /// Workers have applied records, and have rejected so many for lack of capacity.
    Applied { rejected: u64 },
    /// Workers have purged standby sessions.
    Purged(Purged),
    /// Time has passed, this gateway uses another view, or the sender's part of the status has changed.
    Tick,
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Workers apply records; [`Input::Applied`] follows.
    Apply {
        records: Vec<ReplicationRecord>,
        /// The number that their standby sessions get.
        round: u8,
    },
    /// Workers purge standby sessions that a round hasn't listed; [`Input::Purged`] follows.
    Purge {
        round: u8,
        /// The view of the peer.
        view: u64,
        /// The version of its policy; empty: this gateway isn't in it.
        policy: Arc<str>,
        /// The epoch of the last full sync of this gateway that the peer had acknowledged when the round began; 0: none.
        acknowledged_epoch: u64,
    },
    /// Acknowledges all frames up to this one.
    Acknowledge { number: u64, is_rejected: bool },
    /// Requests a full sync.
    RequestSync,
    /// The peer has released shards.
    Released(Release),
    /// The standby sessions from the peer are complete.
    Synced,
}

/// Result of the purge at the end of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    pub removed: u64,
    /// The active members have changed since the round began.
    pub outdated: bool,
    /// The peer has another policy.
    pub has_other_policy: bool,
    /// Whether sessions were kept that the round didn't list.
    pub kept: bool,
}

/// Why the link must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    #[error(transparent)]
    Protocol(#[from] ProtocolViolation),
    /// The peer uses a view that this gateway hasn't received in time.
    #[error("the peer uses view {0}, which this gateway hasn't received")]
    UnknownView(u64),
}

/// What the receiver waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Frame,
    /// The owner of a shard decides how its records are applied: so a round waits until this gateway uses its view.
    View {
        view: u64,
        until: Instant,
        /// The last frame of this gateway that the peer had applied.
        applied: u64,
    },
    Applied,
    Purged {
        round: u8,
        view: u64,
        needs_resync: bool,
        in_flight: bool,
    },
}

/// Receiver of one link.
#[derive(Clone, Debug)]
pub struct Receiver {
    inbound: ReceiveState,
    step: Step,
    /// The frame that isn't acknowledged yet, and how many records were rejected since the one before.
    number: u64,
    rejected: u64,
    /// Standby sessions that the workers had evicted before the last frame.
    evicted: u64,
    /// The epoch of the last full sync that the peer had acknowledged when the round began.
    acknowledged_epoch: u64,
    /// The last frame of this gateway that the peer had applied then; 0: none.
    applied: u64,
    /// `acknowledged_epoch` of a round that had to keep sessions that it didn't list.
    kept_in: Option<u64>,
    retry: RetrySchedule,
}

impl Receiver {
    /// Of a new link to a peer. `is_first`: whether this gateway's name is the lower one of both.
    pub fn new(peer: Arc<str>, rounds: SyncRounds, evicted: u64, is_first: bool) -> Self {
        // Another delay at each end, so that rounds in both directions that have met don't meet again.
        let retry_delay = if is_first { RETRY_DELAY } else { RETRY_DELAY * 3 / 2 };
        Self {
            inbound: ReceiveState::new(peer, rounds),
            step: Step::Frame,
            number: 0,
            rejected: 0,
            evicted,
            acknowledged_epoch: 0,
            applied: 0,
            kept_in: None,
            retry: RetrySchedule::new(retry_delay),
        }
    }

    /// Whether it takes the next frame.
    pub fn is_ready(&self) -> bool {
        self.step == Step::Frame
    }

    /// The view that this gateway has to use before the frame can be processed.
    pub fn awaited_view(&self) -> Option<u64> {
        if let Step::View { view, .. } = self.step { Some(view) } else { None }
    }

    /// A full sync of this gateway by a later epoch is awaited.
    pub fn awaited_epoch(&self) -> Option<u64> {
        self.kept_in.filter(|_| self.is_ready())
    }

    /// When a [`Input::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        match self.step {
            Step::Frame => self.retry.due,
            Step::View { until, .. } => Some(until),
            Step::Applied | Step::Purged { .. } => None,
        }
    }

    /// Processes an input; `view` is the one that this gateway uses.
    ///
    /// # Errors
    /// When the link must be closed.
    pub fn input(
        &mut self,
        now: Instant,
        input: Input,
        view: u64,
        status: &mut ReplicationStatus,
    ) -> Result<Vec<Effect>, Failure> {
        let mut effects = Vec::new();
        match input {
            Input::Frame { frame, evicted } => {
                // Standby sessions that a full table has evicted are missing here, whichever peer has sent them.
                self.rejected = evicted - std::mem::replace(&mut self.evicted, evicted);
                self.frame(now, frame, status, &mut effects)?;
            }
            Input::Applied { rejected } => {
                self.rejected += rejected;
                self.finish(now, false, status, &mut effects);
            }
            Input::Purged(purged) => {
                self.purged(now, purged, status, &mut effects);
                // By its own policy, this gateway may give up what the peer regards as safe here.
                self.finish(now, purged.has_other_policy, status, &mut effects);
            }
            Input::Tick => self.request_if_due(now, status, &mut effects),
        }
        self.begin_round_if_due(now, view, status, &mut effects)?;
        Ok(effects)
    }

    /// Processes a frame, and finishes it unless workers or a view are awaited.
    fn frame(
        &mut self,
        now: Instant,
        frame: NumberedFrame,
        status: &mut ReplicationStatus,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let (number, action) = self.inbound.process(frame)?;
        self.number = number;
        match action {
            Action::BeginRound { view, applied } => {
                status.in_sync_from = false;
                self.step = Step::View { view, until: now + VIEW_TIMEOUT, applied };
            }
            Action::Apply { records, round } => {
                status.received += records.len() as u64;
                self.step = Step::Applied;
                effects.push(Effect::Apply { records, round });
            }
            Action::Purge { round, view, policy, needs_resync } => {
                // What a full sync of this gateway lists may still be on its way, though workers treat it as sent.
                let in_flight = !status.is_synced_by(self.applied);
                let acknowledged_epoch = if in_flight { 0 } else { self.acknowledged_epoch };
                self.step = Step::Purged { round, view, needs_resync, in_flight };
                effects.push(Effect::Purge { round, view, policy, acknowledged_epoch });
            }
            Action::Released(release) => {
                status.peer_has_released(&release);
                effects.push(Effect::Released(release));
                self.finish(now, false, status, effects);
            }
        }
        Ok(())
    }

    /// Begins a round once this gateway uses its view.
    fn begin_round_if_due(
        &mut self,
        now: Instant,
        used: u64,
        status: &mut ReplicationStatus,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Step::View { view, until, applied } = self.step else { return Ok(()) };
        if used < view {
            return if now < until { Ok(()) } else { Err(Failure::UnknownView(view)) };
        }
        (self.acknowledged_epoch, self.applied, self.kept_in) = (status.acknowledged_epoch, applied, None);
        self.retry.round_begins();
        self.finish(now, false, status, effects);
        Ok(())
    }

    /// A round has ended: the standby sessions are complete, or another full sync is requested, now or later.
    fn purged(&mut self, now: Instant, purged: Purged, status: &mut ReplicationStatus, effects: &mut Vec<Effect>) {
        let Step::Purged { round, view, needs_resync, in_flight } = self.step else { return };
        if !purged.outdated && !purged.has_other_policy && !purged.kept {
            self.inbound.end_round(round);
        }
        self.retry.round_ends(now);
        if purged.has_other_policy || (purged.kept && in_flight) {
            // Not at once: one of both gets the other one's policy later, or never; and rounds in both directions would
            // meet again and again.
            self.retry.rejected(now);
        }
        // Kept sessions don't matter here: none of the peer's sessions is missing.
        status.in_sync_from = !purged.outdated && !needs_resync;
        (status.has_other_policy, status.sync_view) = (purged.has_other_policy, view);
        status.purged += purged.removed;
        if purged.kept && !in_flight && !purged.outdated {
            // An immediate full sync would list the same sessions: the peer must get the kept ones first.
            self.kept_in = Some(self.acknowledged_epoch);
        } else if needs_resync || purged.outdated {
            effects.push(Effect::RequestSync);
        } else {
            effects.push(Effect::Synced);
        }
    }

    /// Acknowledges the frame; not as complete if records were rejected, or may be given up.
    fn finish(&mut self, now: Instant, may_give_up: bool, status: &mut ReplicationStatus, effects: &mut Vec<Effect>) {
        let is_rejected = std::mem::take(&mut self.rejected) > 0;
        if is_rejected {
            self.retry.rejected(now);
        }
        self.step = Step::Frame;
        status.applied = self.number;
        effects.push(Effect::Acknowledge { number: self.number, is_rejected: is_rejected || may_give_up });
    }

    /// Requests a full sync that is due.
    fn request_if_due(&mut self, now: Instant, status: &ReplicationStatus, effects: &mut Vec<Effect>) {
        if !self.is_ready() {
            return;
        }
        if self.kept_in.take_if(|epoch| status.acknowledged_epoch > *epoch).is_some() {
            effects.push(Effect::RequestSync);
        }
        if self.retry.due.is_some_and(|due| now >= due) {
            self.retry.requested();
            effects.push(Effect::RequestSync);
        }
    }

    /// Takes the round numbers of a copied gateway.
    #[cfg(test)]
    pub(crate) fn set_rounds(&mut self, rounds: SyncRounds) {
        self.inbound.set_rounds(rounds);
    }
}
