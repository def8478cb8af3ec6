//! The metrics: names, labels and help, and where each number comes from.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use vipgate_dataplane::counters::{Direction, DropReason, EndReason, WorkerCounters};

use crate::gateway::state::{Figure, GatewayState};

/// Reads the gateway's counters whenever somebody asks.
#[derive(Debug)]
pub(super) struct Collector(pub(super) Arc<GatewayState>);

type Labels<'a> = Vec<(&'a str, String)>;

/// All values of one metric.
struct Family<'a> {
    counter: bool,
    values: Vec<(Labels<'a>, u64)>,
}

impl EncodeMetric for Family<'_> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (labels, value) in &self.values {
            let mut metric = encoder.encode_family(labels)?;
            if self.counter {
                metric.encode_counter::<NoLabelSet, u64, u64>(value, None)?;
            } else {
                metric.encode_gauge(&i64::try_from(*value).unwrap_or(i64::MAX))?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        if self.counter { MetricType::Counter } else { MetricType::Gauge }
    }
}

impl prometheus_client::collector::Collector for Collector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let state = &self.0;
        let mut write = |name: &str, help: &str, counter: bool, values: Vec<(Labels<'_>, u64)>| {
            let family = Family { counter, values };
            let name = format!("vipgate_{name}");
            let metric = encoder.encode_descriptor(&name, help, None, family.metric_type())?;
            family.encode(metric)
        };
        write(
            "packets",
            "Packets forwarded, by direction",
            true,
            self.by_direction(|counters, direction| counters.packets[direction as usize].get()),
        )?;
        write(
            "bytes",
            "Bytes forwarded, whole frames, by direction",
            true,
            self.by_direction(|counters, direction| counters.bytes[direction as usize].get()),
        )?;
        let drops = DropReason::ALL.map(|reason| {
            let count = state.workers.iter().map(|worker| worker.counters.drops[reason as usize].get()).sum();
            (vec![("reason", reason.name().to_owned())], count)
        });
        write("drops", "Packets dropped, by reason", true, drops.into())?;
        write(
            "received",
            "Packets received from the sockets",
            true,
            self.by_worker(|counters| counters.received.get()),
        )?;
        write(
            "answered",
            "ARP and neighbour answers and announcements sent",
            true,
            self.by_worker(|c| c.answered.get()),
        )?;
        write("sessions", "Sessions open now", false, self.by_worker(|counters| counters.sessions.get()))?;
        write("sessions_created", "Sessions opened", true, self.by_worker(|counters| counters.sessions_created.get()))?;
        let ended = (0..).zip(&state.workers).flat_map(|(number, worker): (usize, _)| {
            EndReason::ALL.map(|reason| {
                let labels = vec![("worker", number.to_string()), ("reason", reason.name().to_owned())];
                (labels, worker.counters.sessions_ended[reason as usize].get())
            })
        });
        write("sessions_expired", "Sessions ended, by reason", true, ended.collect())?;
        write(
            "handoffs",
            "Packets handed to the worker that owns their session",
            true,
            self.by_worker(|c| c.handoffs.get()),
        )?;
        write(
            "waiting",
            "Packets that wait for a neighbour's link address",
            false,
            self.by_worker(|c| c.waiting.get()),
        )?;

        let policy = state.policy.load();
        write(
            "policy_version_info",
            "The policy in force",
            false,
            vec![(vec![("version", policy.set.version.clone())], 1)],
        )?;
        let updates = [("applied", policy.updates_applied), ("rejected", policy.updates_rejected)];
        let updates = updates.map(|(result, count)| (vec![("result", result.to_owned())], count));
        write("policy_updates", "Policy updates, by result", true, updates.into())?;
        write("policy_connected", "Whether the policy's source is there (files always are)", false, vec![(vec![], 1)])?;
        let blocks = state.compiled.load();
        let blocks = blocks.vips().iter().flat_map(|vip| {
            let claimed = vip.pool.claimed();
            let states = [("claimed", claimed), ("free", state.port_blocks.saturating_sub(claimed))];
            states
                .map(|(name, count)| (vec![("vip", vip.address.to_string()), ("state", name.to_owned())], count as u64))
        });
        write("port_blocks", "Blocks of 64 ports by VIP: claimed by a worker, or free", false, blocks.collect())?;
        write("vips", "VIPs of the policy in force", false, vec![(vec![], policy.set.vips.len() as u64)])?;
        write(
            "endpoints",
            "Endpoints of the policy in force",
            false,
            vec![(vec![], policy.set.endpoints.len() as u64)],
        )?;
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        write("build_info", "The running program", false, vec![(version, 1)])?;

        let mut figures: BTreeMap<&str, Vec<Figure>> = BTreeMap::new();
        for figure in state.device.figures() {
            figures.entry(figure.name).or_default().push(figure);
        }
        for (name, family) in figures {
            let (help, counter) = (family[0].help, family[0].counter);
            write(name, help, counter, family.into_iter().map(|figure| (figure.labels, figure.value)).collect())?;
        }
        Ok(())
    }
}

impl Collector {
    fn by_worker(&self, value: impl Fn(&WorkerCounters) -> u64) -> Vec<(Labels<'static>, u64)> {
        let workers = (0..).zip(&self.0.workers);
        workers
            .map(|(number, worker): (usize, _)| (vec![("worker", number.to_string())], value(&worker.counters)))
            .collect()
    }

    fn by_direction(&self, value: impl Fn(&WorkerCounters, Direction) -> u64) -> Vec<(Labels<'static>, u64)> {
        let workers = (0..).zip(&self.0.workers);
        let values = workers.flat_map(|(number, worker): (usize, _)| {
            Direction::ALL.map(|direction| {
                let labels = vec![("worker", number.to_string()), ("direction", direction.name().to_owned())];
                (labels, value(&worker.counters, direction))
            })
        });
        values.collect()
    }
}
