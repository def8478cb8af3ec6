//! Samples of a gateway's counters, and rates between two samples.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::admin::proto::{DropsReply, StatusReply, VipsReply};
use crate::admin::{Client, ClientError};

/// Limit of the history: a point for each column of a wide screen.
const MAX_HISTORY: usize = 240;

/// A gateway's state at one time.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) status: StatusReply,
    pub(super) drops: DropsReply,
    pub(super) vips: VipsReply,
}

impl Sample {
    /// Queries the gateway.
    pub(super) async fn take(client: &mut Client) -> Result<Self, ClientError> {
        let (drops, mut vips) = (client.drops().await?, client.vips().await?);
        vips.vips.sort_by(|one, other| other.sessions.cmp(&one.sessions).then_with(|| one.address.cmp(&other.address)));
        Ok(Self { at: Instant::now(), status: client.status().clone(), drops, vips })
    }

    fn packets(&self) -> u64 {
        self.status.workers.iter().flat_map(|worker| worker.packets.values()).sum()
    }

    /// Sum over the workers.
    fn sum(&self, of: impl Fn(&crate::admin::proto::WorkerStatus) -> u64) -> u64 {
        self.status.workers.iter().map(of).sum()
    }
}

/// State of the view.
#[derive(Debug, Default)]
pub(super) struct ViewState {
    pub(super) current: Option<Sample>,
    pub(super) previous: Option<Sample>,
    /// Packets per second, oldest first.
    pub(super) history: VecDeque<u64>,
    /// Updates are paused.
    pub(super) paused: bool,
    /// Error of the last update.
    pub(super) error: Option<String>,
    /// Scroll offset in the list of VIPs.
    pub(super) scroll: usize,
}

impl ViewState {
    /// Adds a sample.
    pub(super) fn add(&mut self, sample: Sample) {
        self.error = None;
        // Counters of another process start at zero, and before the initial policy no worker counts anything.
        let is_comparable = |now: &Sample| now.status.pid == sample.status.pid && !now.status.workers.is_empty();
        self.previous = self.current.take().filter(is_comparable);
        self.current = Some(sample);
        if let Some(rate) = self.rate(Sample::packets) {
            self.history.push_back(rate);
            if self.history.len() > MAX_HISTORY {
                self.history.pop_front();
            }
        }
    }

    /// Increase per second; `None` before the second sample with workers.
    pub(super) fn rate(&self, of: impl Fn(&Sample) -> u64) -> Option<u64> {
        let (now, before) = (self.current.as_ref()?, self.previous.as_ref()?);
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let increase = of(now).saturating_sub(of(before));
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a displayed value"
        )]
        Some((increase as f64 / seconds).round() as u64)
    }

    /// Packets and bytes per second of a direction.
    pub(super) fn direction_rates(&self, direction: &str) -> Option<(u64, u64)> {
        let of = |map: &BTreeMap<String, u64>| map.get(direction).copied().unwrap_or(0);
        let packets = self.rate(|sample| sample.sum(|worker| of(&worker.packets)))?;
        let bytes = self.rate(|sample| sample.sum(|worker| of(&worker.bytes)))?;
        Some((packets, bytes))
    }

    /// Increase per second of a counter of one worker.
    pub(super) fn worker_rate(
        &self,
        number: u32,
        of: impl Fn(&crate::admin::proto::WorkerStatus) -> u64,
    ) -> Option<u64> {
        self.rate(|sample| sample.status.workers.iter().find(|it| it.worker == number).map_or(0, &of))
    }

    /// Opened and ended sessions per second.
    pub(super) fn session_rates(&self) -> Option<(u64, u64)> {
        let opened = self.rate(|sample| sample.sum(|worker| worker.sessions_created))?;
        let ended = self.rate(|sample| sample.sum(|worker| worker.sessions_ended))?;
        Some((opened, ended))
    }

    /// Drops per second for a reason.
    pub(super) fn drop_rate(&self, reason: &str) -> Option<u64> {
        self.rate(|sample| sample.drops.drops.iter().find(|drop| drop.reason == reason).map_or(0, |drop| drop.packets))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::admin::proto::WorkerStatus;

    #[test]
    fn rates_are_absent_before_the_second_sample_with_workers() {
        let start = Instant::now();
        let sample = |seconds, pid, packets: Option<u64>| {
            let of_worker = |count| WorkerStatus {
                packets: [("egress".to_owned(), count)].into(),
                sessions_created: count,
                ..WorkerStatus::default()
            };
            let workers = packets.map(of_worker).into_iter().collect();
            Sample {
                at: start + Duration::from_secs(seconds),
                status: StatusReply { pid, workers, ..StatusReply::default() },
                drops: DropsReply::default(),
                vips: VipsReply::default(),
            }
        };
        let mut board = ViewState::default();
        // Two without a policy, two with workers, and one of the next process.
        for (seconds, pid, packets, expected) in [
            (0, 1, None, None),
            (1, 1, None, None),
            (2, 1, Some(900), None),
            (3, 1, Some(1000), Some(100)),
            (4, 2, Some(50), None),
        ] {
            board.add(sample(seconds, pid, packets));
            assert_eq!(board.direction_rates("egress").map(|(packets, _)| packets), expected, "at {seconds} s");
            assert_eq!(board.session_rates().map(|(opened, _)| opened), expected, "at {seconds} s");
            assert_eq!(board.drop_rate("ttl").is_some(), expected.is_some(), "at {seconds} s");
        }
        assert_eq!(board.history, [100]);
    }
}
