//! The status of VipGateways: whether it is active, whether it drains, and of how many VIPs it has a part.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::policy::spec::ShardSpec;
use vipgate_policy::compiler::Placement;

use super::accepted::Acceptance;
use super::condition::{Condition, DesiredStatus};
use super::inputs::{GatewayFacts, Inputs};
use crate::membership::DesiredState;

/// The conditions' types.
pub(super) const READY: &str = "Ready";
pub(super) const DRAINING: &str = "Draining";
/// Reason of both once a drain is done.
pub(super) const DRAINED: &str = "Drained";
/// How long a new leader waits for gateways: the one before may have known them as active.
const NEW_LEADER_TIME: Duration = Duration::from_secs(10);

/// Derives the status of gateways.
#[derive(Debug)]
pub(super) struct Gateways<'a> {
    acceptance: &'a Acceptance<'a>,
    facts: BTreeMap<&'a str, &'a GatewayFacts>,
    vips: BTreeMap<&'a str, u64>,
    has_just_begun: bool,
}

impl<'a> Gateways<'a> {
    pub(super) fn new(inputs: &'a Inputs, acceptance: &'a Acceptance<'a>) -> Self {
        let active: BTreeSet<&str> = inputs.gateways.iter().filter(|it| it.is_active).map(|it| &*it.name).collect();
        Self {
            acceptance,
            facts: inputs.gateways.iter().map(|gateway| (&*gateway.name, gateway)).collect(),
            vips: vips_of_active(&inputs.compilation.published.placement, &active),
            has_just_begun: inputs.leading_for < NEW_LEADER_TIME,
        }
    }

    /// The status of the gateway with this manifest.
    pub(super) fn status(&self, manifest: &str) -> DesiredStatus {
        let name = manifest.split_once('/').map_or(manifest, |(_, name)| name);
        let unknown = GatewayFacts::default();
        let facts = self.facts.get(name).copied().unwrap_or(&unknown);
        let mut fields = serde_json::Map::new();
        fields.insert("vips".to_owned(), self.vips.get(name).copied().unwrap_or_default().into());
        if let Some(sessions) = facts.sessions {
            fields.insert("sessions".to_owned(), sessions.into());
        }
        if let Some(version) = &facts.version {
            fields.insert("version".to_owned(), version.as_str().into());
        }
        DesiredStatus {
            conditions: vec![self.acceptance.condition(manifest), ready(facts), draining(facts)],
            fields,
            // The version is that of its last connection, the sessions those of the last sample.
            retained: if facts.desired_state.is_some() { &["version", "sessions"] } else { &["version"] },
            is_provisional: !facts.is_active && self.has_just_begun,
        }
    }
}

fn ready(facts: &GatewayFacts) -> Condition {
    if facts.is_active {
        let message = match facts.set_aside.as_slice() {
            [] => "it is active".to_owned(),
            [(key, reason), more @ ..] => {
                let more = if more.is_empty() { String::new() } else { format!(", and {} more", more.len()) };
                format!("it is active, with resources set aside that it refuses: {key}: {reason}{more}")
            }
        };
        return Condition::new(READY, true, "Active", &message);
    }
    if let Some(fault) = &facts.fault {
        return Condition::new(READY, false, "Unable", &format!("it reports a fault: {fault}"));
    }
    let (reason, message) = match facts.desired_state {
        Some(DesiredState::Draining) => (DRAINED, "it is drained"),
        _ if !facts.is_connected => ("NotConnected", "it is not connected"),
        Some(DesiredState::Joining) => ("Joining", "it gets the state of the active gateways"),
        Some(DesiredState::Ready) => ("NotActive", "it is about to become active"),
        None => ("NoHeartbeat", "it has sent no heartbeat"),
    };
    Condition::new(READY, false, reason, message)
}

fn draining(facts: &GatewayFacts) -> Condition {
    // A gateway with a fault asks for a drain, too.
    let is_drained_by_request = facts.desired_state == Some(DesiredState::Draining) && facts.fault.is_none();
    match (&facts.drain_block, is_drained_by_request, facts.is_active) {
        (Some(block), true, true) => Condition::new(DRAINING, true, "Blocked", block),
        (None, true, true) => Condition::new(DRAINING, true, DRAINING, "its sessions move to other gateways"),
        (_, true, false) => {
            Condition::new(DRAINING, true, DRAINED, "it is inactive until it is undrained or restarted")
        }
        (_, false, _) => Condition::new(DRAINING, false, "NotDraining", "no drain was requested"),
    }
}

/// Of how many VIPs each active gateway has a part now.
fn vips_of_active<'a>(placement: &'a Placement, active: &BTreeSet<&'a str>) -> BTreeMap<&'a str, u64> {
    let owner =
        |order: &mut dyn Iterator<Item = &'a Arc<str>>| order.map(|name| &**name).find(|it| active.contains(it));
    let mut of_maps: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for map in placement.shard_maps.iter() {
        of_maps.insert(&map.name, map.orders.iter().filter_map(|order| owner(&mut order.iter())).collect());
    }
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for vip in &placement.vips {
        let shared = vip.shard_map.as_ref().map(|reference| of_maps.get(&*reference.map).cloned().unwrap_or_default());
        let of_shard = |shard: &'a ShardSpec| owner(&mut std::iter::once(&shard.gateway).chain(&shard.backups));
        let owners = shared.unwrap_or_else(|| vip.shards.iter().filter_map(of_shard).collect());
        for owner in owners {
            *counts.entry(owner).or_default() += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests;
