//! `health` of `gateway.yaml`: link state and next hop probes.

use std::net::IpAddr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vipgate_policy::diagnostic::Code;
use vipgate_policy::schema::Address;

use super::gateway::Config;
use super::units::{DurationText, duration};
use crate::config::validate::{Report, for_each_duplicate};

/// Probe intervals of a next hop.
const INTERVAL_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_mins(1);
/// Failure thresholds: consecutive failed probes.
const FAILURES_RANGE: std::ops::RangeInclusive<u32> = 1..=100;
const MAX_HOLD_DOWN: Duration = Duration::from_hours(1);

/// Health checks. The gateway requests to become inactive when its links are down, when no next hop of its default
/// routes replies (on a side without a default route: no next hop at all), or when its routes are gone. The last usable
/// gateway stays active.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Health {
    /// Which interfaces must be up. Default: `all`.
    pub links: LinkRequirement,
    /// Whether next hops are probed with ARP requests and neighbor solicitations. Default: `true`.
    pub probe: bool,
    /// Probe interval per next hop, from 10ms to 60s. Default: 200ms.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub interval: Duration,
    /// Consecutive probes without a reply after which a next hop is considered dead. Default: 3.
    #[schemars(range(min = *FAILURES_RANGE.start(), max = *FAILURES_RANGE.end()))]
    pub failures: u32,
    /// Hold-down: how long all checks must pass before this gateway requests to become active again; doubles with each
    /// further fault. Default: 5s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub hold_down: Duration,
    /// Maximum of the hold-down; after this time without a fault it is reset. Default: 60s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub hold_down_max: Duration,
    /// Probe targets of an interface, instead of the next hops of its routes. Default: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<HealthTarget>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            links: LinkRequirement::All,
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
pub enum LinkRequirement {
    /// All interfaces.
    #[default]
    All,
    /// One inside and one outside: for redundant links.
    Any,
}

/// A probe target.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealthTarget {
    /// Interface, one of `interfaces`.
    pub interface: String,
    /// Address, on-link of the interface.
    #[schemars(with = "Address")]
    pub address: IpAddr,
}

impl Health {
    pub(super) fn validate(&self, config: &Config, report: &mut Report<'_>) {
        if !INTERVAL_RANGE.contains(&self.interval) {
            report(Code::OutOfRange, "health.interval", "must be from 10ms to 60s".into());
        }
        if !FAILURES_RANGE.contains(&self.failures) {
            let reason = format!("must be from {} to {}", FAILURES_RANGE.start(), FAILURES_RANGE.end());
            report(Code::OutOfRange, "health.failures", reason);
        }
        if self.hold_down > MAX_HOLD_DOWN {
            report(Code::OutOfRange, "health.hold_down", "must be at most 1h".into());
        }
        if self.hold_down_max > MAX_HOLD_DOWN || self.hold_down_max < self.hold_down {
            let code = if self.hold_down_max > MAX_HOLD_DOWN { Code::OutOfRange } else { Code::InconsistentLimits };
            report(code, "health.hold_down_max", "must be at least hold_down and at most 1h".into());
        }
        let keys: Vec<_> = self.targets.iter().map(|it| (&it.interface, it.address)).collect();
        for_each_duplicate(&keys, |i, first| {
            let reason = format!("is a duplicate of health.targets[{first}]");
            report(Code::DuplicateValue, &format!("health.targets[{i}]"), reason);
        });
        for (i, target) in self.targets.iter().enumerate() {
            if !config.interfaces.iter().any(|interface| interface.name == target.interface) {
                let reason = format!("`{}` is not an interface of this gateway", target.interface);
                report(Code::NoSuchInterface, &format!("health.targets[{i}].interface"), reason);
            }
            let address = target.address;
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
                let reason = format!("{address} can't be probed");
                report(Code::UnreachableAddress, &format!("health.targets[{i}].address"), reason);
            }
        }
    }
}
