//! The ports of VIPs, as all workers together have them.

use std::collections::HashMap;

use tonic::Status;
use vipgate_dataplane::command::{Command, PortChunk};
use vipgate_dataplane::ports::BlockSet;
use vipgate_dataplane::snapshot::policy::{Vip, VipId};
use vipgate_dataplane::snapshot::shares::Owner;

use super::proto::{PortsReply, VipPorts};
use super::sessions::Workers;
use crate::gateway::state::GatewayState;

/// VIPs in one slice: of each, a worker reads some kilobytes.
const SLICE: usize = 64;

/// Blocks with a port in use, over all workers, by VIP.
#[derive(Debug, Default)]
pub(super) struct Used(HashMap<u16, u32>);

/// Asks the workers, of all VIPs or one.
pub(super) async fn used(state: &GatewayState, workers: &Workers, only: Option<VipId>) -> Result<Used, Status> {
    let mut used = Used::default();
    for worker in 0..state.workers.len() {
        let mut chunk = PortChunk { only, cursor: Some(0), records: Vec::with_capacity(SLICE) };
        while chunk.cursor.is_some() {
            chunk.records.clear();
            chunk = workers.ask(worker, |reply| Command::Ports { chunk, reply }).await?;
            for record in &chunk.records {
                *used.0.entry(record.vip.0).or_default() += record.used;
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
        vips: vips.into_iter().map(|vip| of(vip, &used, state)).collect(),
        first: state.ports.0.into(),
        last: state.ports.1.into(),
    })
}

/// The ports of one VIP.
pub(super) fn of(vip: &Vip, used: &Used, state: &GatewayState) -> VipPorts {
    let blocks = u32::try_from(state.port_blocks).unwrap_or(u32::MAX);
    let others = vip.shares.list().iter().filter(|share| share.owner != Owner::This);
    let elsewhere = others.map(|share| share.blocks().map_or(blocks, BlockSet::count)).sum::<u32>();
    VipPorts {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        blocks,
        blocks_elsewhere: elsewhere.min(blocks),
        blocks_claimed: u32::try_from(vip.pool.claimed()).unwrap_or(u32::MAX),
        blocks_used: used.0.get(&vip.id.0).copied().unwrap_or(0),
        sessions: vip.pool.sessions(),
        reserved: u32::try_from(vip.reserved.len()).unwrap_or(u32::MAX),
        guaranteed: vip.guaranteed,
        retired: vip.retired,
    }
}
