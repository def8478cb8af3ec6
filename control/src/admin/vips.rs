//! `Vips` request: VIPs of the policy in force.

use std::collections::HashMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::policy::compiled::{self, Policy};
use vipgate_dataplane::policy::spec::Announce;

use super::membership::{self, Share};
use super::ports::{self, BlockUsage};
use super::protocol::RequestError;
use crate::admin::workers::Workers;
use crate::state::GatewayState;
use crate::state::conflicts::format_mac;

/// VIPs of the policy in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VipsReply {
    pub vips: Vec<Vip>,
    /// Guaranteed sessions of each VIP (max-min fair share), standby ones included; more while others use fewer.
    pub session_fair_share: u64,
}

/// A VIP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vip {
    pub address: String,
    pub name: String,
    pub announce: String,
    pub reserved_ports: Vec<u32>,
    pub endpoints: u64,
    /// Its shards. Empty: all of it is this gateway's.
    pub shares: Vec<Share>,
    /// Address conflict: another host on the link uses this address; absent: none was detected.
    pub conflict: Option<Conflict>,
    /// Sessions that hold a port of it, quarantined ones included.
    pub sessions: u64,
    /// Its sessions in the tables, egress and inbound, standby ones included.
    pub table_sessions: u64,
    /// In a cloud: its private address at this gateway, which packets outside have in place of it; empty: it has none.
    pub private: String,
}

/// Address conflict of a VIP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// MAC address of the other host.
    pub mac: String,
    /// Seconds since it was last detected.
    pub age_seconds: u64,
}

/// Every VIP, by address.
pub(super) async fn all(state: &GatewayState, workers: &Workers) -> Result<VipsReply, RequestError> {
    let used = ports::block_usage(state, workers, None).await?;
    let policy = state.compiled.load();
    let mut users: HashMap<IpAddr, u64> = HashMap::new();
    for vip in policy.endpoints().flat_map(|(_, endpoint)| policy.vips_of(endpoint)) {
        *users.entry(vip.address).or_default() += 1;
    }
    let mut vips: Vec<_> = policy.live_vips().collect();
    vips.sort_by_key(|vip| vip.address);
    let vips = vips.into_iter().map(|it| {
        let users = users.get(&it.address).copied().unwrap_or_default();
        vip(it, users, &used, &policy, state)
    });
    let session_fair_share = state.sum(|counters| counters.session_fair_share.get());
    Ok(VipsReply { vips: vips.collect(), session_fair_share })
}

/// A VIP, with the number of endpoints that use it, and what it uses at the workers.
pub(super) fn vip(
    vip: &compiled::Vip,
    endpoints: u64,
    used: &BlockUsage,
    policy: &Policy,
    state: &GatewayState,
) -> Vip {
    let conflicts = state.conflicts.load();
    Vip {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        announce: announce(vip.announce).to_owned(),
        reserved_ports: vip.ports.reserved.iter().map(|&port| port.into()).collect(),
        endpoints,
        conflict: conflicts
            .get(&vip.address)
            .map(|claim| Conflict { mac: format_mac(claim.mac), age_seconds: claim.last_seen.elapsed().as_secs() }),
        shares: membership::shards(policy, vip, state),
        sessions: vip.ports.pool.sessions(),
        table_sessions: used.table_sessions(vip.ports.id),
        private: vip.private_at(policy.members().this_name()).map(|it| it.to_string()).unwrap_or_default(),
    }
}

/// How a VIP is announced.
fn announce(announce: Announce) -> &'static str {
    match announce {
        Announce::L2 => "L2",
        Announce::Bgp => "BGP",
    }
}
