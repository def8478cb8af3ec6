//! Completes partial checksums of packets from virtual interfaces: hosts on the same machine leave them to the device.
//! First of what was received, before anything updates a checksum; then of what was in a tunnel.

use crate::io::Received;
use crate::io::batch::{Batch, PacketSet};
use crate::observe::counters::Counters;
use crate::policy::network::Network;
use crate::wire::partial_checksum;

/// Completes the checksums of packets that were received just now.
#[inline]
pub fn received(received: &mut [Received], network: &Network, counters: &Counters) {
    if network.has_partial_checksums() {
        complete(received, network, counters);
    }
}

/// Completes the inner checksums of packets that were decapsulated just now.
#[inline]
pub fn decapsulated(batch: &mut Batch, packets: PacketSet, network: &Network, counters: &Counters) {
    if network.has_partial_checksums() {
        for i in packets {
            batch.frames.get_mut(i).into_iter().for_each(|it| complete(std::slice::from_mut(it), network, counters));
        }
    }
}

#[inline(never)]
fn complete(received: &mut [Received], network: &Network, counters: &Counters) {
    let mut completed = 0;
    for Received { frame, interface } in received {
        if network.interface_entry(*interface).partial_checksums {
            completed += u64::from(partial_checksum::complete(frame.bytes_mut()));
        }
    }
    counters.checksums_completed.add(completed);
}
