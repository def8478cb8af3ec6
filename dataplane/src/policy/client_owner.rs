//! The gateway that owns a client's flow to a Service.
//!
//! If all gateways announce a VIP, each takes its clients with sessions of its own, and a backend's reply may arrive at any
//! other one. Mostly that one translates it from policy alone: the reply shows the frontend. Where it doesn't, question and
//! reply meet at one gateway: backends of several frontends don't show which one was called; a datagram from a served
//! port may be the pod's own question (RFC 4787 REQ-1: that one needs a mapping); and a client that policy doesn't
//! translate may have called the pod itself. The owner follows from the client's address and port alone: both directions
//! have these, and neither other backends nor another frontend move the flow.

use super::compiled::{Family, Policy, Vip};
use crate::flow::ids::{FrontendId, GatewayId, Owner};
use crate::flow::listener::Listener;
use crate::flow::tuple::{HashKey, Tuple};
use crate::wire::protocol;

impl Policy {
    /// The gateway that has the session of a client (its address, port and protocol) with a frontend at a VIP and a backend.
    pub fn owner_of_client<A: Family>(
        &self,
        vip: &Vip,
        frontend: FrontendId,
        client: &Listener<A>,
        backend: A,
    ) -> Owner {
        if !vip.shards.is_distributed() {
            return vip.shards.owner();
        }
        if self.reply_shows_frontend(frontend, client, backend) {
            return Owner::This;
        }
        vip.shards.owner_of_hash(client_hash(client))
    }

    /// Whether a backend's packet to a client shows that it is a reply, of which frontend and at which VIP.
    pub fn reply_shows_frontend<A: Family>(&self, frontend: FrontendId, client: &Listener<A>, backend: A) -> bool {
        let has_one_vip = self.service(frontend.service).is_some_and(|service| A::part(service).vips.len() == 1);
        client.protocol != protocol::UDP
            && has_one_vip
            && !A::index(self).backends.shares(frontend)
            && self.endpoint(backend).is_none_or(|(_, _, egress)| self.translates(egress, client.address))
    }

    /// The other gateway that may have the session to which a backend's packet is a reply. Frontends of one backend may
    /// have VIPs with different owners: after a gateway that has no session (`is_forwarded`: this one), the next is asked.
    pub fn owner_of_reply<A: Family>(&self, reply: &Tuple<A>, is_forwarded: bool) -> Option<GatewayId> {
        let client = reply.receiver();
        let owners = self.frontends_of(&reply.sender()).iter().flat_map(|&frontend| {
            let vips = self.service(frontend.service).map_or(&[][..], |service| &A::part(service).vips);
            let shows_frontend = self.reply_shows_frontend(frontend, &client, reply.source);
            let vips = vips.iter().filter(move |_| !shows_frontend).filter_map(|vip| self.vip(*vip));
            vips.map(move |vip| self.owner_of_client(vip, frontend, &client, reply.source))
        });
        owners.skip_while(|owner| is_forwarded && *owner != Owner::This).find_map(|owner| match owner {
            Owner::Other(gateway) => Some(gateway),
            Owner::This | Owner::Unowned => None,
        })
    }
}

/// Not keyed, so that all gateways agree: an attacker gains no more than with ECMP.
fn client_hash<A: Family>(client: &Listener<A>) -> u64 {
    const CHOICE: HashKey = HashKey::fixed();
    let &Listener { address, port, protocol } = client;
    CHOICE.hash(&Tuple { source: address, source_port: port, protocol, ..Tuple::default() })
}
