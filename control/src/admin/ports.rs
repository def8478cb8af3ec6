//! The ports of VIPs, as all workers together have them.

use std::collections::HashMap;

use tonic::Status;
use vipgate_dataplane::command::{Command, PortChunk};
use vipgate_dataplane::ports::{BlockId, BlockSet, PortRange};
use vipgate_dataplane::snapshot::policy::{Policy, Vip, VipId};
use vipgate_dataplane::snapshot::shares::{Owner, Share};

use super::group;
use super::proto::{PortsReply, ShardPorts, VipPorts};
use super::sessions::Workers;
use crate::gateway::state::GatewayState;

/// VIPs in one slice: of each, a worker reads some kilobytes.
const SLICE: usize = 64;

/// Blocks with a port in use, and sessions in the tables, over all workers, by VIP.
#[derive(Debug, Default)]
pub(super) struct Used(HashMap<u16, (u32, u64)>);

impl Used {
    /// Sessions of a VIP in all tables.
    pub(super) fn sessions(&self, vip: VipId) -> u64 {
        self.0.get(&vip.0).map_or(0, |used| used.1)
    }
}

/// Asks the workers, of all VIPs or one.
pub(super) async fn used(state: &GatewayState, workers: &Workers, only: Option<VipId>) -> Result<Used, Status> {
    let mut used = Used::default();
    for worker in 0..state.workers.len() {
        let mut chunk = PortChunk { only, cursor: Some(0), records: Vec::with_capacity(SLICE) };
        while chunk.cursor.is_some() {
            chunk.records.clear();
            chunk = workers.ask(worker, |reply| Command::Ports { chunk, reply }).await?;
            for record in &chunk.records {
                let sum = used.0.entry(record.vip.0).or_default();
                *sum = (sum.0 + record.used, sum.1 + u64::from(record.sessions));
            }
        }
    }
    Ok(used)
}

/// The ports of every VIP.
pub(super) async fn all(state: &GatewayState, workers: &Workers) -> Result<PortsReply, Status> {
    let used = used(state, workers, None).await?;
    let policy = state.compiled.load_full();
    let mut vips: Vec<&Vip> = policy.vips().collect();
    vips.sort_by_key(|vip| vip.address);
    Ok(PortsReply {
        vips: vips.into_iter().map(|vip| of(vip, &used, &policy, state)).collect(),
        first: state.ports.0.into(),
        last: state.ports.1.into(),
    })
}

/// The ports of one VIP.
pub(super) fn of(vip: &Vip, used: &Used, policy: &Policy, state: &GatewayState) -> VipPorts {
    let blocks = u32::try_from(state.port_blocks).unwrap_or(u32::MAX);
    let shards = shards(vip, policy, state);
    let refused = vip.pool.refused();
    VipPorts {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        blocks,
        blocks_elsewhere: shards.iter().filter(|shard| !shard.own).map(|shard| shard.blocks).sum(),
        blocks_claimed: claimed(vip),
        blocks_used: used.0.get(&vip.id.0).map_or(0, |used| used.0),
        sessions: vip.pool.sessions(),
        reserved: u32::try_from(vip.reserved.len()).unwrap_or(u32::MAX),
        guaranteed: vip.guaranteed,
        retired: vip.retired,
        refused: refused.whole,
        refused_in_shard: refused.in_shard,
        shards,
    }
}

/// The same without asking workers what they use.
pub(crate) fn without_use(vip: &Vip, policy: &Policy, state: &GatewayState) -> VipPorts {
    of(vip, &Used::default(), policy, state)
}

/// Blocks of this gateway's shards that a worker has. Workers hold blocks for standby sessions of other shards, too.
pub(crate) fn claimed(vip: &Vip) -> u32 {
    let (own, claimed) = (vip.shares.own_blocks(), vip.pool.claimed());
    if own == BlockSet::ALL || claimed == 0 {
        return u32::try_from(claimed).unwrap_or(u32::MAX);
    }
    vip.pool.claimed_among(&own)
}

/// The shards that a VIP is cut in; none where one gateway has all of it.
fn shards(vip: &Vip, policy: &Policy, state: &GatewayState) -> Vec<ShardPorts> {
    let shard = |share: &Share| {
        let (blocks, ports) = size(share.blocks().unwrap_or(&BlockSet::ALL), vip, state);
        ShardPorts {
            home: share.home().map(|home| policy.members().name(home).to_string()).unwrap_or_default(),
            owner: group::owner(policy, share.owner, state),
            blocks,
            ports,
            own: share.owner == Owner::This,
        }
    };
    vip.shares.list().iter().map(shard).collect()
}

/// How many of these blocks lie in the range, and how many ports of them may be given out.
pub(crate) fn size(blocks: &BlockSet, vip: &Vip, state: &GatewayState) -> (u32, u32) {
    let Some(range) = PortRange::new(state.ports.0, state.ports.1) else { return (0, 0) };
    let is_reserved = |port: &&u16| blocks.contains(BlockId::of(**port)) && range.contains(**port);
    let reserved = vip.reserved.iter().filter(is_reserved).count();
    let ports = range.count_in(blocks).saturating_sub(u32::try_from(reserved).unwrap_or(u32::MAX));
    (range.within(blocks).count(), ports)
}

/// What is to be said of a VIP that ran out of ports; nothing if it didn't.
pub(crate) fn shortage(ports: &VipPorts) -> Vec<String> {
    let mut notes = Vec::new();
    let vip = &ports.address;
    if ports.refused_in_shard > 0 {
        let shard = |shard: &ShardPorts| {
            let owner = match (shard.own, shard.owner.as_str()) {
                (true, _) => "here".to_owned(),
                (false, "") => "nowhere".to_owned(),
                (false, owner) => format!("at {owner}"),
            };
            format!("{} ports in the shard of {} ({owner})", shard.ports, shard.home)
        };
        let shards: Vec<String> = ports.shards.iter().map(shard).collect();
        notes.push(format!(
            "{vip}: {} packets found no port in their endpoint's SHARD, which is a part of the VIP's ports: {}; ports of other shards \
             are not lent: add a VIP, or deal the VIP to fewer gateways",
            ports.refused_in_shard,
            shards.join(", ")
        ));
    }
    if ports.refused > 0 {
        notes.push(format!(
            "{vip}: {} packets found no port of the whole VIP toward their destination: add a VIP",
            ports.refused
        ));
    }
    notes
}

/// The same of all VIPs, those with most of them first, so many at most.
pub(super) fn shortages(policy: &Policy, state: &GatewayState, most: usize) -> Vec<String> {
    let refused = |vip: &&Vip| vip.pool.refused().whole + vip.pool.refused().in_shard;
    let mut vips: Vec<&Vip> = policy.vips().filter(|vip| refused(vip) > 0).collect();
    vips.sort_by_key(|vip| std::cmp::Reverse(refused(vip)));
    vips.truncate(most);
    vips.into_iter().flat_map(|vip| shortage(&without_use(vip, policy, state))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_that_ran_out_is_told_from_a_vip_that_did() {
        let shard = |home: &str, own| ShardPorts {
            home: home.to_owned(),
            owner: home.to_owned(),
            blocks: 504,
            ports: 32_255,
            own,
        };
        let vip = VipPorts { address: "203.0.113.10".to_owned(), ..VipPorts::default() };
        assert_eq!(shortage(&vip), Vec::<String>::new());
        let whole = VipPorts { refused: 3, ..vip.clone() };
        let said = shortage(&whole).join("\n");
        assert!(said.contains("3 packets") && said.contains("whole VIP") && !said.contains("SHARD"), "{said}");
        let shards = vec![shard("gw-a", true), shard("gw-b", false)];
        let said = shortage(&VipPorts { refused_in_shard: 7, shards, ..vip }).join("\n");
        for words in
            ["7 packets", "SHARD", "shard of gw-a (here)", "32255 ports in the shard of gw-b (at gw-b)", "add a VIP"]
        {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
}
