//! When a gateway can't do what it serves for: links that are down, next hops that don't answer.

use std::net::IpAddr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::gateway::Config;
use super::units::{DurationText, duration};
use super::verify::{Report, twice};
use crate::manifest::schema::Address;

/// The shortest and the longest pause between two probes of a next hop.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_mins(1);
/// How many probes in a row may fail.
const FAILURES: std::ops::RangeInclusive<u32> = 1..=100;
/// The longest hold-down.
const LONGEST_HOLD_DOWN: Duration = Duration::from_hours(1);

/// When this gateway asks not to serve: its links are down, no next hop of a default route answers (of a side without one: no next hop at all), or its routes are gone. The last one that can serve goes on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Health {
    /// Which interfaces must be up. Default: `all`.
    pub links: Require,
    /// Whether next hops are probed, by ARP and neighbour solicitations. Default: true.
    pub probe: bool,
    /// Time between two probes of a next hop. Default: 200ms.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub interval: Duration,
    /// So many probes in a row without an answer are a dead next hop. Default: 3.
    #[schemars(range(min = *FAILURES.start(), max = *FAILURES.end()))]
    pub failures: u32,
    /// How long everything must be well again before this gateway wants to serve; twice as long after each further fault. Default: 5s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub hold_down: Duration,
    /// The longest of that; so long without a fault makes it short again. Default: 60s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub hold_down_max: Duration,
    /// What is probed on an interface in place of the next hops of its routes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<HealthTarget>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            links: Require::All,
            probe: true,
            interval: Duration::from_millis(200),
            failures: 3,
            hold_down: Duration::from_secs(5),
            hold_down_max: Duration::from_mins(1),
            targets: Vec::new(),
        }
    }
}

/// Which interfaces must be up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Require {
    /// Each one.
    #[default]
    All,
    /// One inside and one outside: for links that stand in for each other.
    Any,
}

/// An address that is probed.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealthTarget {
    /// The interface that it is behind, one of `interfaces`.
    pub interface: String,
    /// Its address, on the interface's own link.
    #[schemars(with = "Address")]
    pub address: IpAddr,
}

impl Health {
    pub(super) fn verify(&self, config: &Config, report: &mut Report<'_>) {
        if !INTERVALS.contains(&self.interval) {
            report("health.interval", "must be from 10ms to 60s".into());
        }
        if !FAILURES.contains(&self.failures) {
            report("health.failures", format!("must be from {} to {}", FAILURES.start(), FAILURES.end()));
        }
        if self.hold_down > LONGEST_HOLD_DOWN {
            report("health.hold_down", "must be at most 1h".into());
        }
        if self.hold_down_max > LONGEST_HOLD_DOWN || self.hold_down_max < self.hold_down {
            report("health.hold_down_max", "must be at least hold_down and at most 1h".into());
        }
        let places: Vec<_> = self.targets.iter().map(|it| (&it.interface, it.address)).collect();
        twice(&places, |i, first| {
            report(&format!("health.targets[{i}]"), format!("is health.targets[{first}] already"));
        });
        for (i, target) in self.targets.iter().enumerate() {
            if !config.interfaces.iter().any(|interface| interface.name == target.interface) {
                let reason = format!("`{}` is none of this gateway's interfaces", target.interface);
                report(&format!("health.targets[{i}].interface"), reason);
            }
            let address = target.address;
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
                report(&format!("health.targets[{i}].address"), format!("{address} answers no probe"));
            }
        }
    }
}
