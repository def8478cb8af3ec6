//! Session ownership: the gateway that owns a session, by the shards of its VIP.

use crate::flow::direction::Direction;
use crate::flow::ids::Owner;
use crate::policy::compiled::Policy;
use crate::session::SessionFamily;
use crate::session::entry::Entry;

/// The gateway that owns a session.
pub fn owner<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Owner {
    let [_, _, (vip, port)] = entry.transport_addresses();
    let Some(vip) = policy.vip(vip) else { return Owner::This };
    if !matches!(entry.direction(), Direction::Inbound | Direction::ServiceReply) {
        return vip.shards.owner_of_port(port);
    }
    // If all gateways announce the VIP, an inbound session stays with the gateway that opened it.
    if vip.shards.is_distributed() { Owner::This } else { vip.shards.owner() }
}
