//! Last stage: the next hop's link address, and whether its link carries the packet.

use std::net::IpAddr;

use crate::address::Address;
use crate::batch::{Batch, IpVersion, Wanted};
use crate::counters::DropReason;
use crate::snapshot::network::{Network, NextHop};
use crate::verdict::Verdict;
use crate::wire::{ethernet, ipv4, ipv6};

/// Writes the link header of every packet that goes on.
pub fn run(batch: &mut Batch, network: &Network) {
    for i in batch.open_packets() {
        let Some(next) = batch.hops[i] else { continue };
        let (interface, mac) = match next {
            NextHop::Known(id) => (network.hop(id).interface, network.hop(id).mac),
            NextHop::Unknown(interface) => (interface, None),
        };
        let out = network.interface(interface);
        if batch.heads[i].length > out.mtu {
            batch.decide(i, Verdict::Drop(DropReason::TooBig));
            continue;
        }
        let verdict = match mac {
            Some(mac) => {
                ethernet::set_addresses(batch.frames[i].frame.bytes_mut(), mac, out.mac);
                Verdict::Forward(interface)
            }
            None => Verdict::Wait(Wanted { interface, address: wanted(batch, i, next, network) }),
        };
        batch.decide(i, verdict);
    }
}

/// Whose link address is missing: the router's, or the destination's as it stands in the rewritten packet.
fn wanted(batch: &Batch, i: usize, next: NextHop, network: &Network) -> IpAddr {
    if let NextHop::Known(id) = next {
        return network.hop(id).address;
    }
    let packet = &batch.frames[i].frame.bytes()[ethernet::HEADER..];
    match batch.heads[i].version {
        IpVersion::V4 => ipv4::destination(packet).to_ip(),
        _ => ipv6::destination(packet).to_ip(),
    }
}
