//! Replies to echo requests of nodes in their tunnels ([`crate::wire::tunnel_echo`]), statelessly. Without a
//! lease, too, for as long as the gateway forwards packets. `decap` has checked the node; the request is still
//! encapsulated, and becomes the reply in its frame.

use crate::flow::drop_reason::DropReason;
use crate::flow::verdict::Verdict;
use crate::io::batch::Batch;
use crate::policy::Snapshot;
use crate::stage::encap;
use crate::wire::ethernet;
use crate::wire::tunnel_echo::EchoRequest;

/// Replies to the echo requests of the batch.
pub fn run(batch: &mut Batch, snapshot: &Snapshot) {
    for i in batch.undecided.and(batch.tunnel_echoes) {
        let verdict = reply(batch, i, snapshot).unwrap_or_else(Verdict::Drop);
        batch.decide(i, verdict);
    }
}

#[cold]
fn reply(batch: &mut Batch, i: usize, snapshot: &Snapshot) -> Result<Verdict, DropReason> {
    let tunnel = snapshot.tunnels.to(batch.tunnel_destinations[i].remote).ok_or(DropReason::NoRoute)?;
    let frame = &mut batch.frames[i].frame;
    let request = EchoRequest::new_checked(frame.bytes_mut()).ok_or(DropReason::Malformed)?;
    let (hop, out, mtu) = tunnel.route(&snapshot.network).ok_or(DropReason::NoRoute)?;
    let (length, own_mac) = (request.length(), tunnel.own_mac().ok_or(DropReason::NoRoute)?);
    // The MTU inside the tunnel doesn't count the outer headers, nor the Ethernet header.
    if length > usize::from(mtu) + tunnel.outer.length() + ethernet::HEADER {
        return Err(DropReason::TooBig);
    }
    request.into_reply(&tunnel.outer, own_mac).ok_or(DropReason::Malformed)?;
    // Removes Ethernet padding.
    frame.set_len(length as u16);
    Ok(encap::send_reply(batch, i, tunnel, hop, out, &snapshot.network))
}
