//! Session ownership: the gateway that owns a session, by the shards of its VIP.

use crate::flow::direction::Direction;
use crate::flow::ids::Owner;
use crate::flow::listener::Listener;
use crate::policy::compiled::Policy;
use crate::session::SessionFamily;
use crate::session::entry::Entry;

/// The gateway that owns a session.
pub fn owner<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Owner {
    let [(endpoint, _), (remote, remote_port), (address, port)] = entry.transport_addresses();
    let Some(vip) = policy.vip(address) else { return Owner::This };
    if !matches!(entry.direction(), Direction::Inbound | Direction::ServiceReply) {
        return vip.shards.owner_of_port(port);
    }
    let listener = |address, port| Listener { address, port, protocol: entry.key().protocol };
    match policy.frontend(&listener(address, port)) {
        Some(frontend) => policy.owner_of_client(vip, frontend, &listener(remote, remote_port), endpoint),
        // If all gateways announce the VIP, an inbound session stays with the gateway that opened it.
        None if vip.shards.is_distributed() => Owner::This,
        None => vip.shards.owner(),
    }
}
