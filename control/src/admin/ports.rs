//! `Ports` request: port blocks of each VIP, summed over the workers.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::flow::ids::{Owner, VipId};
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::shards::HomePart;
use vipgate_dataplane::ports::{BlockId, BlockSet, PortRange};
use vipgate_dataplane::worker::command::{Command, PortChunk};

use super::protocol::RequestError;
use crate::admin::membership;
use crate::admin::workers::Workers;
use crate::state::GatewayState;

/// VIPs per chunk: for each, a worker reads some kilobytes.
const CHUNK: usize = 64;

/// Port usage of VIPs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortsReply {
    pub vips: Vec<VipPorts>,
    /// Range of SNAT ports, first and last.
    pub first: u32,
    pub last: u32,
}

/// Port usage of one VIP, in blocks of 64 ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VipPorts {
    pub address: String,
    pub name: String,
    /// Port blocks in the range, and of these: in shards of other gateways, claimed by a worker, and with a port in use.
    pub blocks: u32,
    pub blocks_elsewhere: u32,
    pub blocks_claimed: u32,
    pub blocks_used: u32,
    /// Sessions that hold a port, quarantined ones included; sessions toward different destinations can share a port.
    pub sessions: u64,
    /// Ports of Services and health checks, which are never allocated.
    pub reserved: u32,
    /// Sum of the ports guaranteed to endpoints.
    pub guaranteed: u32,
    /// Whether the policy no longer has the VIP, while sessions still hold ports of it.
    pub retired: bool,
    /// Packets refused because no port was free: in all blocks, and in one shard while others may have had free ports.
    pub refused: u64,
    pub refused_in_shard: u64,
    /// Its shards, if it is split.
    pub shards: Vec<ShardPorts>,
}

/// Ports of one shard of a VIP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardPorts {
    /// Its home, and the gateway that has it now; empty: neither its home nor a backup is active.
    pub home: String,
    pub owner: String,
    /// Blocks in the range, and allocatable ports in them: the maximum number of sessions of its endpoints toward one
    /// destination.
    pub blocks: u32,
    pub ports: u32,
    /// Whether this gateway has it now.
    pub own: bool,
}

/// Blocks with a port in use, and sessions in the tables, summed over all workers, by VIP.
#[derive(Debug, Default)]
pub(super) struct BlockUsage(HashMap<u16, (u32, u64)>);

impl BlockUsage {
    /// Sessions of a VIP in all tables.
    pub(super) fn table_sessions(&self, vip: VipId) -> u64 {
        self.0.get(&vip.0).map_or(0, |used| used.1)
    }
}

/// Queries the workers, for all VIPs or one.
pub(super) async fn block_usage(
    state: &GatewayState,
    workers: &Workers,
    only: Option<VipId>,
) -> Result<BlockUsage, RequestError> {
    let mut usage = BlockUsage::default();
    for worker in 0..state.workers().len() {
        let mut chunk = PortChunk { only, cursor: Some(0), records: Vec::with_capacity(CHUNK) };
        while chunk.cursor.is_some() {
            chunk.records.clear();
            chunk = workers.query(worker, |reply| Command::Ports { chunk, reply }).await?;
            for record in &chunk.records {
                let sum = usage.0.entry(record.vip.0).or_default();
                *sum = (sum.0 + record.used, sum.1 + u64::from(record.sessions));
            }
        }
    }
    Ok(usage)
}

/// The ports of every VIP.
pub(super) async fn all(state: &GatewayState, workers: &Workers) -> Result<PortsReply, RequestError> {
    let used = block_usage(state, workers, None).await?;
    let policy = state.compiled.load_full();
    let mut vips: Vec<&Vip> = policy.vips().collect();
    vips.sort_by_key(|vip| vip.address);
    Ok(PortsReply {
        vips: vips.into_iter().map(|vip| vip_ports(vip, &used, &policy, state)).collect(),
        first: state.ports.0.into(),
        last: state.ports.1.into(),
    })
}

/// The ports of one VIP.
pub(super) fn vip_ports(vip: &Vip, used: &BlockUsage, policy: &Policy, state: &GatewayState) -> VipPorts {
    let blocks = u32::try_from(state.port_blocks).unwrap_or(u32::MAX);
    let shards = shards(vip, policy, state);
    let refused = vip.ports.pool.refused();
    VipPorts {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        blocks,
        blocks_elsewhere: shards.iter().filter(|shard| !shard.own).map(|shard| shard.blocks).sum(),
        blocks_claimed: claimed_blocks(vip),
        blocks_used: used.0.get(&vip.ports.id.0).map_or(0, |used| used.0),
        sessions: vip.ports.pool.sessions(),
        reserved: u32::try_from(vip.ports.reserved.len()).unwrap_or(u32::MAX),
        guaranteed: vip.ports.guaranteed,
        retired: vip.ports.retired,
        refused: refused.whole,
        refused_in_shard: refused.in_shard,
        shards,
    }
}

/// The ports of one VIP, without the usage that only workers have.
pub(crate) fn vip_ports_without_usage(vip: &Vip, policy: &Policy, state: &GatewayState) -> VipPorts {
    vip_ports(vip, &BlockUsage::default(), policy, state)
}

/// Blocks of this gateway's shards that workers have claimed. Workers also claim blocks for standby sessions of other
/// shards.
pub(crate) fn claimed_blocks(vip: &Vip) -> u32 {
    let (own, claimed) = (vip.shards.own_blocks(), vip.ports.pool.claimed());
    if own == BlockSet::ALL || claimed == 0 {
        return u32::try_from(claimed).unwrap_or(u32::MAX);
    }
    vip.ports.pool.claimed_in(&own)
}

/// The shards of a VIP; none if one gateway owns all of it.
fn shards(vip: &Vip, policy: &Policy, state: &GatewayState) -> Vec<ShardPorts> {
    let part = |HomePart { shard, blocks }: HomePart<'_>| {
        let (blocks, ports) = blocks_and_ports(&blocks, vip, state);
        ShardPorts {
            home: shard.home().map(|home| policy.members().name(home).to_string()).unwrap_or_default(),
            owner: membership::owner_name(policy, shard.owner, state),
            blocks,
            ports,
            own: shard.owner == Owner::This,
        }
    };
    vip.shards.home_parts().into_iter().map(part).collect()
}

/// How many of these blocks are in the port range, and how many ports of them may be allocated.
pub(crate) fn blocks_and_ports(blocks: &BlockSet, vip: &Vip, state: &GatewayState) -> (u32, u32) {
    let Some(range) = PortRange::new(state.ports.0, state.ports.1) else { return (0, 0) };
    let is_reserved = |port: &&u16| blocks.contains(BlockId::of(**port)) && range.contains(**port);
    let reserved = vip.ports.reserved.iter().filter(is_reserved).count();
    let ports = range.count_in(blocks).saturating_sub(u32::try_from(reserved).unwrap_or(u32::MAX));
    (range.within(blocks).count(), ports)
}

/// Notes about port exhaustion of a VIP; none if no packet was refused.
pub(crate) fn exhaustion_notes(ports: &VipPorts) -> Vec<String> {
    let mut notes = Vec::new();
    let vip = &ports.address;
    if ports.refused_in_shard > 0 {
        let shard = |shard: &ShardPorts| {
            let owner = match (shard.own, shard.owner.as_str()) {
                (true, _) => "this gateway".to_owned(),
                (false, "") => "no owner".to_owned(),
                (false, owner) => format!("owner {owner}"),
            };
            format!("{} ports in the shard of {} ({owner})", shard.ports, shard.home)
        };
        let shards: Vec<String> = ports.shards.iter().map(shard).collect();
        notes.push(format!(
            "{vip}: {} packets found no free port in this gateway's SHARD, a part of the VIP's ports: {}; gateways ask \
             each other for ports in turn, and this one was the last, or couldn't reach the next: add a VIP",
            ports.refused_in_shard,
            shards.join(", ")
        ));
    }
    if ports.refused > 0 {
        notes.push(format!(
            "{vip}: {} packets found no free port for their destination in the whole VIP: add a VIP",
            ports.refused
        ));
    }
    notes
}

/// Exhaustion notes of all VIPs, those with most refused packets first, for at most `limit` VIPs.
pub(super) fn all_exhaustion_notes(policy: &Policy, state: &GatewayState, limit: usize) -> Vec<String> {
    let refused = |vip: &&Vip| vip.ports.pool.refused().whole + vip.ports.pool.refused().in_shard;
    let mut vips: Vec<&Vip> = policy.vips().filter(|vip| refused(vip) > 0).collect();
    vips.sort_by_key(|vip| std::cmp::Reverse(refused(vip)));
    vips.truncate(limit);
    vips.into_iter().flat_map(|vip| exhaustion_notes(&vip_ports_without_usage(vip, policy, state))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exhausted_shard_is_distinguished_from_an_exhausted_vip() {
        let shard = |home: &str, own| ShardPorts {
            home: home.to_owned(),
            owner: home.to_owned(),
            blocks: 504,
            ports: 32_255,
            own,
        };
        let vip = VipPorts { address: "203.0.113.10".to_owned(), ..VipPorts::default() };
        assert_eq!(exhaustion_notes(&vip), Vec::<String>::new());
        let whole = VipPorts { refused: 3, ..vip.clone() };
        let text = exhaustion_notes(&whole).join("\n");
        assert!(text.contains("3 packets") && text.contains("whole VIP") && !text.contains("SHARD"), "{text}");
        let shards = vec![shard("gw-a", true), shard("gw-b", false)];
        let text = exhaustion_notes(&VipPorts { refused_in_shard: 7, shards, ..vip }).join("\n");
        for phrase in [
            "7 packets",
            "SHARD",
            "shard of gw-a (this gateway)",
            "32255 ports in the shard of gw-b (owner gw-b)",
            "add a VIP",
        ] {
            assert!(text.contains(phrase), "{phrase}: {text}");
        }
    }
}
