//! What was seen at one moment, and what two moments say together.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::admin::proto::{DropsReply, StatusReply, VipsReply};
use crate::admin::{Client, ClientError};

/// Rates that are remembered: a point for each column of a wide screen.
const REMEMBERED: usize = 240;

/// A gateway at one moment.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) status: StatusReply,
    pub(super) drops: DropsReply,
    pub(super) vips: VipsReply,
}

impl Sample {
    /// Asks the gateway.
    pub(super) async fn take(client: &mut Client) -> Result<Self, ClientError> {
        let (drops, mut vips) = (client.drops().await?, client.vips().await?);
        vips.vips.sort_by(|one, other| other.sessions.cmp(&one.sessions).then_with(|| one.address.cmp(&other.address)));
        Ok(Self { at: Instant::now(), status: client.status().clone(), drops, vips })
    }

    fn packets(&self) -> u64 {
        self.status.workers.iter().flat_map(|worker| worker.packets.values()).sum()
    }

    /// A sum over workers.
    fn sum(&self, of: impl Fn(&crate::admin::proto::WorkerStatus) -> u64) -> u64 {
        self.status.workers.iter().map(of).sum()
    }
}

/// All that is shown.
#[derive(Debug, Default)]
pub(super) struct Board {
    pub(super) now: Option<Sample>,
    pub(super) before: Option<Sample>,
    /// Packets a second, the last one last.
    pub(super) history: VecDeque<u64>,
    /// Nothing new is looked at.
    pub(super) paused: bool,
    /// Why there is nothing new.
    pub(super) lost: Option<String>,
    /// VIPs that are scrolled over.
    pub(super) scroll: usize,
}

impl Board {
    /// Takes in what was seen.
    pub(super) fn add(&mut self, sample: Sample) {
        self.lost = None;
        // Another process counts from the beginning.
        let is_same = self.now.as_ref().is_some_and(|now| now.status.pid == sample.status.pid);
        self.before = self.now.take().filter(|_| is_same);
        self.now = Some(sample);
        if let Some(rate) = self.rate(Sample::packets) {
            self.history.push_back(rate);
            if self.history.len() > REMEMBERED {
                self.history.pop_front();
            }
        }
    }

    /// How fast something grows, a second; `None` before the second look.
    pub(super) fn rate(&self, of: impl Fn(&Sample) -> u64) -> Option<u64> {
        let (now, before) = (self.now.as_ref()?, self.before.as_ref()?);
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let more = of(now).saturating_sub(of(before));
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "people see it"
        )]
        Some((more as f64 / seconds).round() as u64)
    }

    /// How fast packets and bytes of a direction come, a second.
    pub(super) fn direction(&self, direction: &str) -> Option<(u64, u64)> {
        let of = |map: &BTreeMap<String, u64>| map.get(direction).copied().unwrap_or(0);
        let packets = self.rate(|sample| sample.sum(|worker| of(&worker.packets)))?;
        let bytes = self.rate(|sample| sample.sum(|worker| of(&worker.bytes)))?;
        Some((packets, bytes))
    }

    /// How fast something of one worker grows.
    pub(super) fn worker(&self, number: u32, of: impl Fn(&crate::admin::proto::WorkerStatus) -> u64) -> Option<u64> {
        self.rate(|sample| sample.status.workers.iter().find(|it| it.worker == number).map_or(0, &of))
    }

    /// Sessions that are opened, and that end, a second.
    pub(super) fn sessions(&self) -> Option<(u64, u64)> {
        let opened = self.rate(|sample| sample.sum(|worker| worker.sessions_created))?;
        let ended = self.rate(|sample| sample.sum(|worker| worker.sessions_ended))?;
        Some((opened, ended))
    }

    /// Drops of a reason, a second.
    pub(super) fn dropped(&self, reason: &str) -> Option<u64> {
        self.rate(|sample| sample.drops.drops.iter().find(|drop| drop.reason == reason).map_or(0, |drop| drop.packets))
    }
}
