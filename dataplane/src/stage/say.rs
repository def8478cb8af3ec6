//! Turning a packet into the gateway's own answer to it.

use crate::batch::Batch;
use crate::counters::Direction;
use crate::snapshot::network::Network;
use crate::verdict::Verdict;
use crate::wire::ethernet;
use crate::wire::icmp_error::LONGEST_V6;

/// Bytes that an answer takes at most.
const LONGEST: usize = ethernet::HEADER + LONGEST_V6;

/// Puts what `write` makes of the packet, an IP packet and its length, in its place; how its way ends then. `None`, with the packet
/// as it came, if there is no answer.
pub fn answer(
    batch: &mut Batch,
    i: usize,
    network: &Network,
    write: impl FnOnce(&mut [u8], &[u8]) -> Option<usize>,
) -> Option<Verdict> {
    let received = &mut batch.frames[i];
    let (link, packet) = received.frame.bytes().split_first_chunk::<{ ethernet::HEADER }>()?;
    let mut answer = [0; LONGEST];
    let (header, into) = answer.split_at_mut(ethernet::HEADER);
    header.copy_from_slice(link);
    let length = ethernet::HEADER + write(into, packet)?;
    // Who is behind a VIP of this gateway hears by way of the VIP: the answer comes around as the question did.
    let verdict = if received.is_hairpin() {
        batch.directions[i] = Direction::ServiceReply;
        Verdict::Around
    } else {
        let own = network.interface(received.interface).mac;
        ethernet::set_link(header, &ethernet::link(ethernet::source(link)?, own));
        Verdict::Answer(received.interface)
    };
    received.frame.replace(&answer[..length]).then_some(verdict)
}
