//! The status of egress policies: addresses, endpoints and gateways, and whether it is in force on all gateways.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use vipgate_policy::compiler::Placement;

use super::accepted::Acceptance;
use super::condition::{Condition, DesiredStatus, Truth};
use super::inputs::{GatewayFacts, Inputs};
use crate::policyd::policy_summary::{PolicySummary, policy_summaries};

/// The condition's type.
pub(super) const PROGRAMMED: &str = "Programmed";
/// The reason while a gateway rejects the policy.
pub(super) const REJECTED_BY_GATEWAY: &str = "RejectedByGateway";
/// Maximum addresses and gateways that a status names; it counts all.
const MAX_ADDRESSES: usize = 64;
const MAX_GATEWAYS: usize = 16;
/// Maximum gateways that a message names.
const MAX_NAMED: usize = 5;
/// Maximum length of a gateway's reason in a message, characters.
const MAX_REJECTION: usize = 200;

/// Derives the status of policies.
#[derive(Debug)]
pub(super) struct Policies<'a> {
    acceptance: &'a Acceptance<'a>,
    summaries: BTreeMap<&'a str, PolicySummary>,
    forwarding: Vec<&'a GatewayFacts>,
    /// A publication that all of them have in force.
    in_force_everywhere: u64,
    owners: Owners<'a>,
}

impl<'a> Policies<'a> {
    pub(super) fn new(inputs: &'a Inputs, acceptance: &'a Acceptance<'a>) -> Self {
        let published = &inputs.compilation.published;
        let forwarding: Vec<&GatewayFacts> = inputs.forwarding().collect();
        Self {
            acceptance,
            summaries: policy_summaries(published),
            in_force_everywhere: forwarding.iter().map(|gateway| gateway.in_force).min().unwrap_or_default(),
            forwarding,
            owners: Owners::new(&published.placement),
        }
    }

    /// The status of the policy with this manifest.
    pub(super) fn status(&self, name: &str) -> DesiredStatus {
        // In a placement it is `Kind namespace/name`.
        let summary = self.summaries.get(&*name.replacen('/', " ", 1)).cloned().unwrap_or_default();
        let accepted = self.acceptance.condition(name);
        let (programmed, is_provisional) = match self.acceptance.fault(name) {
            None => self.programmed(summary.since),
            Some(fault) => {
                let message = if fault.has_last_good {
                    "its last valid version is in force"
                } else {
                    "nothing of it is in force"
                };
                (Condition::new(PROGRAMMED, false, "NotAccepted", message), false)
            }
        };
        let gateways = self.owners.of(&summary.vips);
        let named: Vec<&Arc<str>> = gateways.iter().copied().take(MAX_GATEWAYS).collect();
        let fields = [
            ("addresses", summary.vips.iter().take(MAX_ADDRESSES).map(IpAddr::to_string).collect::<Value>()),
            ("addressCount", summary.vips.len().into()),
            ("endpoints", summary.endpoints.into()),
            ("gateways", json!(named.iter().map(|name| &***name).collect::<Vec<&str>>())),
            ("gatewayCount", gateways.len().into()),
        ];
        DesiredStatus {
            conditions: vec![accepted, programmed],
            fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            retained: &[],
            is_provisional,
        }
    }

    /// Whether a publication is in force on all gateways that forward, and whether that will change soon.
    fn programmed(&self, since: u64) -> (Condition, bool) {
        if self.forwarding.is_empty() {
            let message = "no gateway is connected or active";
            return (Condition::new(PROGRAMMED, false, "NoGateway", message), true);
        }
        if since > 0 && self.in_force_everywhere >= since {
            return (Condition::new(PROGRAMMED, true, PROGRAMMED, "in force on every gateway"), false);
        }
        let total = self.forwarding.len();
        let pending = || self.forwarding.iter().filter(|gateway| gateway.in_force < since.max(1));
        let rejections = || pending().filter_map(|gateway| Some((gateway, gateway.rejection.as_ref()?)));
        if rejections().next().is_some() {
            let text = |(gateway, why): (&&GatewayFacts, &String)| {
                format!("{}: {}", gateway.name, why.chars().take(MAX_REJECTION).collect::<String>())
            };
            let message = listed(total, &rejections().map(text).collect::<Vec<_>>());
            return (Condition::new(PROGRAMMED, false, REJECTED_BY_GATEWAY, &message), false);
        }
        let connected: Vec<String> =
            pending().filter(|gateway| gateway.is_connected).map(|gateway| gateway.name.to_string()).collect();
        if connected.is_empty() {
            let elsewhere: Vec<String> = pending().map(|gateway| gateway.name.to_string()).collect();
            let message =
                format!("not reported as in force by gateways of another policy server: {}", listed(total, &elsewhere));
            return (Condition::new(PROGRAMMED, Truth::Unknown, "GatewayElsewhere", &message), true);
        }
        let message = format!("not acknowledged by {}", listed(total, &connected));
        (Condition::new(PROGRAMMED, false, "NotAcknowledged", &message), true)
    }
}

/// `2 of 3 gateways: a, b`.
fn listed(total: usize, names: &[String]) -> String {
    let more = if names.len() > MAX_NAMED { ", ..." } else { "" };
    let named = names.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
    format!("{} of {total} gateways: {named}{more}", names.len())
}

/// The gateways that may own a part of a VIP.
#[derive(Debug)]
struct Owners<'a> {
    placement: &'a Placement,
    of_maps: BTreeMap<&'a str, BTreeSet<&'a Arc<str>>>,
}

impl<'a> Owners<'a> {
    fn new(placement: &'a Placement) -> Self {
        let of_map = |orders: &'a Vec<Vec<Arc<str>>>| orders.iter().flatten().collect();
        let of_maps = placement.shard_maps.iter().map(|map| (&*map.name, of_map(&map.orders))).collect();
        Self { placement, of_maps }
    }

    fn of(&self, vips: &BTreeSet<IpAddr>) -> BTreeSet<&'a Arc<str>> {
        let mut owners = BTreeSet::new();
        for vip in vips.iter().filter_map(|vip| self.placement.vips.get(vip)) {
            match &vip.shard_map {
                Some(reference) => owners.extend(self.of_maps.get(&*reference.map).into_iter().flatten().copied()),
                None => owners.extend(vip.shards.iter().flat_map(|it| std::iter::once(&it.gateway).chain(&it.backups))),
            }
        }
        owners
    }
}

#[cfg(test)]
mod tests;
