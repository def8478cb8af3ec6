//! The status of egress policies: addresses, endpoints and gateways, and whether it is in force on all gateways.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use vipgate_policy::compiler::Placement;

use super::accepted::Acceptance;
use super::condition::{Condition, DesiredStatus, Truth};
use super::inputs::{GatewayFacts, Inputs};
use crate::policyd::policy_summary::{Parts, PolicySummary, policy_summaries};
use crate::xds::publication::Publication;

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
    /// What is set aside of each, as `gateway: resource: reason`, once per gateway.
    set_aside: BTreeMap<&'a str, BTreeMap<&'a str, String>>,
    owners: Owners<'a>,
}

impl<'a> Policies<'a> {
    pub(super) fn new(inputs: &'a Inputs, acceptance: &'a Acceptance<'a>) -> Self {
        let published = &inputs.compilation.published;
        let forwarding: Vec<&GatewayFacts> = inputs.forwarding().collect();
        let summaries = policy_summaries(published);
        Self {
            acceptance,
            set_aside: set_aside(published, &summaries, &forwarding),
            summaries,
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
        let set_aside = self.set_aside.get(&*name.replacen('/', " ", 1));
        let (programmed, is_provisional) = match self.acceptance.fault(name) {
            None => self.programmed(summary.since, set_aside),
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
            is_provisional: is_provisional || self.acceptance.is_pending(name),
        }
    }

    /// Whether a publication is in force on all gateways that forward, and whether that will change soon. `set_aside`: what
    /// is set aside of the policy, by gateway.
    fn programmed(&self, since: u64, set_aside: Option<&BTreeMap<&str, String>>) -> (Condition, bool) {
        if self.forwarding.is_empty() {
            let message = "no gateway is connected or active";
            return (Condition::new(PROGRAMMED, false, "NoGateway", message), true);
        }
        let total = self.forwarding.len();
        if let Some(gateways) = set_aside {
            let texts: Vec<String> = gateways.values().cloned().collect();
            let message = format!("a part of it is set aside at {}", listed(total, &texts));
            return (Condition::new(PROGRAMMED, false, REJECTED_BY_GATEWAY, &message), false);
        }
        if since > 0 && self.in_force_everywhere >= since {
            let elsewhere = self.forwarding.iter().filter(|gateway| gateway.lacks_unknown);
            let elsewhere: Vec<String> = elsewhere.map(|gateway| gateway.name.to_string()).collect();
            let message = if elsewhere.is_empty() {
                "in force on every gateway".to_owned()
            } else {
                let at = listed(total, &elsewhere);
                format!("in force on every gateway; another policy server knows what is set aside at {at}")
            };
            return (Condition::new(PROGRAMMED, true, PROGRAMMED, &message), false);
        }
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

/// What is set aside of each policy, by gateway.
fn set_aside<'a>(
    published: &'a Publication,
    summaries: &BTreeMap<&'a str, PolicySummary>,
    gateways: &[&'a GatewayFacts],
) -> BTreeMap<&'a str, BTreeMap<&'a str, String>> {
    let mut all: BTreeMap<&str, BTreeMap<&str, String>> = BTreeMap::new();
    if gateways.iter().all(|gateway| gateway.set_aside.is_empty()) {
        return all;
    }
    let parts = Parts::new(published, summaries);
    for gateway in gateways {
        for (key, reason) in &gateway.set_aside {
            let reason: String = reason.chars().take(MAX_REJECTION).collect();
            for name in parts.of(key).into_iter().filter(|name| summaries.contains_key(name)) {
                let of_gateway = all.entry(name).or_default().entry(&*gateway.name);
                of_gateway.or_insert_with(|| format!("{}: {key}: {reason}", gateway.name));
            }
        }
    }
    all
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
