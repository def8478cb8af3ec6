//! Parses Ethernet, IP and transport headers, or drops the packet. Reads a packet's first cache line only; the device
//! has started to prefetch it.

mod full;
mod plain;

use crate::io::batch::Batch;
use crate::policy::network::Network;
use crate::session::Sessions;

/// Parses the headers of every packet but those of echoes.
pub fn run(batch: &mut Batch, network: &Network, sessions: &Sessions) {
    let all = batch.undecided.without(batch.tunnel_echoes);
    let [v4, v6] = plain::run(batch, all, network, sessions);
    batch.families = [v4, v6];
    batch.plain = v4.or(v6);
    for i in all.without(batch.plain) {
        full::parse(batch, i, network);
    }
}
