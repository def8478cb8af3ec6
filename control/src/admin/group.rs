//! What a gateway tells of itself among others: who there is, who has which part of which VIP, and what would move.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tonic::Status;
use vipgate_dataplane::counters::Counters;
use vipgate_dataplane::ports::{BLOCKS, BlockSet};
use vipgate_dataplane::snapshot::endpoints::Endpoint;
use vipgate_dataplane::snapshot::members::{Authentication, GatewayId, MemberSpec};
use vipgate_dataplane::snapshot::policy::{Policy, Vip};
use vipgate_dataplane::snapshot::shares::Owner;
use vipgate_dataplane::snapshot::spec::EndpointSpec;
use vipgate_dataplane::time::Tick;

use super::proto;
use crate::gateway;
use crate::gateway::group::{GroupStatus, LeaseStatus};
use crate::gateway::state::{GatewayState, Order};
use crate::members::Authority;
use crate::peer::PeerStatus;
use crate::policy::{Move, moves};

/// How this gateway stands among others.
pub(super) fn group(state: &GatewayState) -> proto::Group {
    let group = state.group.load();
    let policy = state.compiled.load();
    let shares = policy.live_vips().flat_map(|vip| vip.shares.list()).filter(|share| share.owner == Owner::This);
    let sum = |of: fn(&Counters) -> u64| state.workers.iter().map(|worker| of(&worker.counters)).sum();
    let tunnels = |how| group.spec.gateways.iter().filter(|it| tunnel(it, &state.name) == how).count() as u64;
    let (lease, lease_ms) = match group.lease() {
        LeaseStatus::NotNeeded => ("not_needed", 0),
        LeaseStatus::Held(ms) => ("held", ms),
        LeaseStatus::Lapsed => ("lapsed", 0),
    };
    proto::Group {
        decides: decides(group.authority).to_owned(),
        view: group.view.number,
        members: group.spec.gateways.len().max(1) as u64,
        members_serving: group.serving() as u64,
        serving: group.serves(),
        lease: lease.to_owned(),
        lease_ms,
        draining: group.draining,
        shares: shares.count() as u64,
        sessions: sum(|counters| counters.sessions.get()),
        copies: sum(|counters| counters.copies.get()),
        strangers: group.links.strangers,
        tunnels_unauthenticated: tunnels("address"),
        tunnels_refused: tunnels("refused"),
    }
}

fn decides(authority: Option<Authority>) -> &'static str {
    match authority {
        None | Some(Authority::None) => "nobody",
        Some(Authority::Unknown) => "unknown",
        Some(Authority::Lost) => "lost",
        Some(Authority::Present) => "server",
    }
}

/// Every gateway that the policy or the view names, by name.
pub(super) fn peers(state: &GatewayState) -> Vec<proto::Peer> {
    let (policy, group) = (state.policy.load(), state.group.load());
    let named: BTreeMap<&str, _> = policy.peers.iter().map(|peer| (&*peer.name, peer)).collect();
    let told: BTreeMap<&str, _> = group.spec.gateways.iter().map(|member| (&*member.name, member)).collect();
    let names: BTreeSet<&str> = named.keys().chain(told.keys()).copied().collect();
    let now = gateway::now();
    let peer = |name: &str| {
        let (policy, told, member) = (named.get(name), told.get(name), group.view.member(name));
        proto::Peer {
            name: name.to_owned(),
            own: name == state.name,
            node: policy.map(|peer| peer.node.to_string()).unwrap_or_default(),
            zone: policy.map(|peer| peer.zone.to_string()).unwrap_or_default(),
            address: policy.and_then(|peer| peer.address).map(|address| address.to_string()).unwrap_or_default(),
            reached_at: told.and_then(|it| it.tunnel).map(|address| address.to_string()).unwrap_or_default(),
            serving: told.is_some_and(|it| it.serving),
            epoch: member.map_or(0, |it| it.epoch),
            heard: member.is_some_and(|it| it.incarnation != 0),
            in_policy: policy.is_some(),
            link: group.links.peers.get(name).map(|peer| link(peer, now)),
            tunnel: told.map_or("", |it| tunnel(it, &state.name)).to_owned(),
            unable: member.and_then(|it| it.unable.as_deref()).unwrap_or_default().to_owned(),
        }
    };
    names.into_iter().map(peer).collect()
}

/// How packets out of a gateway's tunnel are known. One that nobody has heard of has none.
fn tunnel(member: &MemberSpec, own: &str) -> &'static str {
    match member.authentication {
        _ if *member.name == *own || member.tunnel.is_none() => "",
        Authentication::None => "address",
        Authentication::Tagged { .. } => "authenticated",
        Authentication::Refused => "refused",
    }
}

fn link(peer: &PeerStatus, now: Tick) -> proto::Link {
    let copies = &peer.copies;
    proto::Link {
        up: peer.linked,
        was_up: peer.since.is_some(),
        since_ms: peer.since.map_or(0, |since| now.since(since)).into(),
        rtt_us: peer.rtt.map_or(0, micros),
        beats_missed: peer.beats_missed,
        refused: peer.refused,
        failures: peer.failures,
        last_failure: peer.last_failure.as_ref().map(ToString::to_string).unwrap_or_default(),
        in_sync_from: copies.in_sync_from,
        in_sync_to: copies.in_sync_to,
        copies_sent: copies.sent,
        copies_taken: copies.taken,
        copies_forgotten: copies.forgotten,
        copies_queued_bytes: copies.queued as u64,
        resyncs: copies.resyncs,
        released: copies.released.unwrap_or(0),
        released_by: copies.released_by.unwrap_or(0),
        version: peer.version,
    }
}

/// At least one: 0 stands for what isn't known.
fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// The parts of a VIP, by home.
pub(super) fn shares(policy: &Policy, vip: &Vip, state: &GatewayState) -> Vec<proto::Share> {
    let name = |id: GatewayId| policy.members().name(id).to_string();
    let shares = vip.shares.list().iter().map(|share| proto::Share {
        home: share.home().map(name).unwrap_or_default(),
        owner: owner(policy, share.owner, state),
        blocks: share.blocks().map_or(state.port_blocks.min(BLOCKS) as u32, BlockSet::count),
        may_open: share.may_open,
        // Those before the last one don't serve.
        copies_to: share.heirs(policy.members()).last().map(name).unwrap_or_default(),
    });
    shares.collect()
}

/// An owner's name; empty: nobody.
pub(super) fn owner(policy: &Policy, owner: Owner, state: &GatewayState) -> String {
    match owner {
        Owner::This => state.name.clone(),
        Owner::Other(id) => policy.members().name(id).to_string(),
        Owner::Nobody => String::new(),
    }
}

/// Lets the gateway stop serving, or serve again. That it has stopped shows when the view says so.
pub(super) fn drain(state: &GatewayState, draining: bool) -> Result<(), Status> {
    // Serving again is never wrong, and takes back what was said to a server that is gone.
    if draining || !state.group.load().draining {
        is_possible(state)?;
    }
    let starting = || Status::unavailable("the gateway is still starting: it has no policy yet");
    let orders = state.orders.as_ref().ok_or_else(starting)?;
    orders.send(Order::Drain(draining)).map_err(|_| Status::unavailable("the gateway stops"))
}

/// What would move if the gateway stopped serving, by the deal alone: nothing is changed.
pub(super) fn plan(state: &GatewayState) -> Result<Vec<proto::Move>, Status> {
    is_possible(state)?;
    let group = state.group.load();
    let before = serving(&group);
    let mut after = before.clone();
    after.retain(|name| **name != *state.name);
    let moves = moves(&state.dealt.vips(), &endpoints(&state.compiled.load()), &before, &after);
    let moves = moves.into_iter().filter(Move::is_one).map(|it| proto::Move {
        vip: it.vip.to_string(),
        home: it.home.to_string(),
        to: it.after.map(|name| name.to_string()).unwrap_or_default(),
        endpoints: it.endpoints as u64,
    });
    Ok(moves.collect())
}

fn serving(group: &GroupStatus) -> BTreeSet<Arc<str>> {
    group.spec.gateways.iter().filter(|member| member.serving).map(|member| member.name.clone()).collect()
}

/// The endpoints with a home, as far as moves ask: where they are dealt to, and the VIP that they leave with.
fn endpoints(policy: &Policy) -> Vec<EndpointSpec> {
    let spec = |(address, endpoint): (IpAddr, &Endpoint)| {
        Some(EndpointSpec {
            address,
            name: endpoint.name.clone(),
            policy: policy.egress_of(endpoint).spec.name.clone(),
            vips: policy.vips_of(endpoint).next().map(|vip| vip.address).into_iter().collect(),
            gateway: Some(policy.members().name(endpoint.home?).clone()),
            remarks: vec![],
        })
    };
    policy.endpoints().filter_map(spec).collect()
}

/// Whether anybody could serve in this gateway's place, and somebody decides it.
fn is_possible(state: &GatewayState) -> Result<(), Status> {
    let refused = |why: &str| Err(Status::failed_precondition(format!("{}: {why}", state.name)));
    let group = state.group.load();
    if group.spec.gateways.len() < 2 {
        return refused("there is no other gateway in the policy that could serve in its place");
    }
    match group.authority {
        None => {
            refused("no policy server decides who serves (`policy.server` in gateway.yaml): every gateway always does")
        }
        Some(Authority::None) => refused(
            "its policy server doesn't decide who serves, so every gateway always does; a newer `vipgate policyd` does",
        ),
        Some(Authority::Unknown | Authority::Lost | Authority::Present) => Ok(()),
    }
}
