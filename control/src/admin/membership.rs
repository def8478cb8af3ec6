//! Membership as the admin API shows it: gateways, their links, the shards of VIPs, drain and its dry run.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::flow::ids::{GatewayId, Owner};
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec};
use vipgate_dataplane::policy::shards::HomePart;
use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::compiler::{Placed, ShardMove, shard_moves};

use super::ports;
use super::protocol::RequestError;
use crate::clock;
use crate::membership::status::Authority;
use crate::peer::PeerStatus;
use crate::state::group::GroupStatus;
use crate::state::lease::LeaseStatus;
use crate::state::{ControlCommand, GatewayState};

/// All gateways, and the membership of this one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeersReply {
    /// Empty: the gateway is alone and owns all VIPs.
    pub peers: Vec<Peer>,
    pub group: Group,
}

/// A gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct Peer {
    pub name: String,
    /// Whether it is this gateway.
    pub own: bool,
    pub node: String,
    pub zone: String,
    /// Peer address in its manifest; empty: none.
    pub address: String,
    /// Address and port of its tunnel and of its listener for gateways; empty: it is unreachable.
    pub reached_at: String,
    /// Whether it is active.
    pub serving: bool,
    /// Increases each time it is deactivated; 0: there is no membership authority.
    pub epoch: u64,
    /// Whether the membership authority has received a heartbeat of it.
    pub heartbeat_received: bool,
    /// Whether the policy names it.
    pub in_policy: bool,
    /// This gateway's link to it; absent for this gateway.
    pub link: Option<Link>,
    /// Authentication of its tunnel packets: authenticated (each has a tag), address (by its address and the interface of
    /// the route to it: without a membership authority there are no keys), refused (it has no valid key); empty: this
    /// gateway, or it has no tunnel.
    pub tunnel: String,
    /// Its fault, as reported; empty: no fault is known.
    pub unable: String,
}

/// This gateway's link to another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct Link {
    pub up: bool,
    /// Whether it has ever been up.
    pub was_up: bool,
    /// Milliseconds since `up` changed; 0: it has never been up.
    pub since_ms: u64,
    /// Round-trip time of a heartbeat; 0: unknown.
    pub rtt_us: u64,
    pub heartbeats_missed: u64,
    /// How often it was refused, and how often a connection has failed.
    pub refused: u64,
    pub failures: u64,
    /// Error of the last failure; empty: there was none.
    pub last_failure: String,
    /// Whether replication from it, and to it, is complete.
    pub in_sync_from: bool,
    pub in_sync_to: bool,
    /// Replicated sessions: sent, received, deleted; and the size of the replication queue.
    pub records_sent: u64,
    pub records_applied: u64,
    pub records_purged: u64,
    pub queued_bytes: u64,
    /// Number of full synchronizations.
    pub resyncs: u64,
    /// The view up to which this gateway has released the shards that the other one takes over, and vice versa.
    pub released: u64,
    pub released_by: u64,
    /// Negotiated protocol version; 0: none yet.
    pub version: u32,
}

/// Membership of this gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// State of the membership authority: server (reachable), lost (unreachable now), unknown (not reached yet), none
    /// (the view is fixed).
    pub decides: String,
    /// Why nobody decides: view_fixed (there is no policy server, or it offers no views, so the gateways of the policy are
    /// the view); empty: somebody does, or may.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Number of the current view; 0: none.
    pub view: u64,
    pub members: u64,
    /// Active members.
    pub members_serving: u64,
    /// Whether this gateway is active.
    pub serving: bool,
    /// renewed, expired, or not_needed; and its remaining milliseconds.
    pub lease: String,
    pub lease_ms: u32,
    /// Whether this gateway is being drained.
    pub draining: bool,
    /// Shards of VIPs that this gateway has, its open sessions without standby ones, and its standby sessions.
    pub shares: u64,
    pub sessions: u64,
    pub standby_sessions: u64,
    /// Rejected connections of unauthenticated peers.
    pub unauthenticated_peers: u64,
    /// Other gateways whose tunnel packets carry no tags, and those whose packets are refused for want of a valid key.
    pub tunnels_unauthenticated: u64,
    pub tunnels_refused: u64,
    /// Why the last drain was refused, with what to do; empty: it was not, or another order has come since.
    pub drain_refused: String,
    /// Number of refused drains.
    pub drains_refused: u64,
    /// What the drain waits for by a decision of the policy server; empty: nothing.
    pub drain_waits_for: String,
}

/// Shard of a VIP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub home: String,
    /// The gateway that has it now: the home or a backup; empty: none.
    pub owner: String,
    /// Blocks of 64 ports.
    pub blocks: u32,
    /// Whether this gateway may open sessions in it.
    pub may_open: bool,
    /// Replica target of its sessions, if this gateway has it; empty: none.
    pub replica_target: String,
}

/// Answer to an order to drain or undrain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReply {
    /// Shards that would move: only for a dry run.
    pub moves: Vec<Move>,
    /// `Group.drains_refused` before this order.
    pub drains_refused: u64,
}

/// A shard that another gateway would take over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    pub vip: String,
    pub home: String,
    /// The gateway that would take it over; empty: none.
    pub to: String,
    /// Endpoints that would move with it.
    pub endpoints: u64,
}

/// This gateway's membership state.
pub(super) fn membership(state: &GatewayState) -> Group {
    let group = state.group.load();
    let policy = state.compiled.load();
    let parts = policy.live_vips().flat_map(|vip| vip.shards.home_parts());
    let shards = parts.filter(|part| part.shard.owner == Owner::This);
    let tunnels = |kind| group.spec.gateways.iter().filter(|it| tunnel(it, &state.name) == kind).count() as u64;
    let (lease, lease_ms) = match group.lease() {
        LeaseStatus::NotRequired => ("not_needed", 0),
        LeaseStatus::Held(ms) => ("renewed", ms),
        LeaseStatus::Expired => ("expired", 0),
    };
    Group {
        decides: authority(group.authority).to_owned(),
        reason: if is_fixed(group.authority) { VIEW_FIXED.to_owned() } else { String::new() },
        view: group.view.number,
        members: group.spec.gateways.len().max(1) as u64,
        members_serving: group.active_count() as u64,
        serving: group.is_active(),
        lease: lease.to_owned(),
        lease_ms,
        draining: group.draining,
        shares: shards.count() as u64,
        sessions: state.sum(|counters| counters.sessions.get()),
        standby_sessions: state.sum(|counters| counters.standby_sessions.get()),
        unauthenticated_peers: group.links.unauthenticated,
        tunnels_unauthenticated: tunnels("address"),
        tunnels_refused: tunnels("refused"),
        drain_refused: group.refused_drains.last.as_deref().unwrap_or_default().to_owned(),
        drains_refused: group.refused_drains.count,
        drain_waits_for: group.drain_block.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

/// The reason in the status for a view that nobody decides.
const VIEW_FIXED: &str = "view_fixed";

fn is_fixed(authority: Option<Authority>) -> bool {
    authority.is_none_or(|it| it == Authority::Fixed)
}

fn authority(authority: Option<Authority>) -> &'static str {
    match authority {
        None | Some(Authority::Fixed) => "none",
        Some(Authority::Unknown) => "unknown",
        Some(Authority::Unreachable) => "lost",
        Some(Authority::Reachable) => "server",
    }
}

/// Every gateway in the policy or the membership view, by name.
pub(super) fn peers(state: &GatewayState) -> Vec<Peer> {
    let (policy, group) = (state.policy.load(), state.group.load());
    let in_policy: BTreeMap<&str, _> = policy.peers.iter().map(|peer| (&*peer.name, peer)).collect();
    let in_view: BTreeMap<&str, _> = group.spec.gateways.iter().map(|member| (&*member.name, member)).collect();
    let names: BTreeSet<&str> = in_policy.keys().chain(in_view.keys()).copied().collect();
    let now = clock::now();
    let peer = |name: &str| {
        let (policy, spec, member) = (in_policy.get(name), in_view.get(name), group.view.member(name));
        Peer {
            name: name.to_owned(),
            own: name == state.name,
            node: policy.map(|peer| peer.node.to_string()).unwrap_or_default(),
            zone: policy.map(|peer| peer.zone.to_string()).unwrap_or_default(),
            address: policy.and_then(|peer| peer.address).map(|address| address.to_string()).unwrap_or_default(),
            reached_at: spec.and_then(|it| it.tunnel).map(|address| address.to_string()).unwrap_or_default(),
            serving: spec.is_some_and(|it| it.active),
            epoch: member.map_or(0, |it| it.epoch),
            heartbeat_received: member.is_some_and(|it| it.incarnation != 0),
            in_policy: policy.is_some(),
            link: group.links.peers.get(name).map(|peer| link(peer, now)),
            tunnel: spec.map_or("", |it| tunnel(it, &state.name)).to_owned(),
            unable: member.and_then(|it| it.unable.as_deref()).unwrap_or_default().to_owned(),
        }
    };
    names.into_iter().map(peer).collect()
}

/// How tunnel packets of a gateway are authenticated; empty: itself, or its tunnel address is not known yet.
fn tunnel(member: &MemberSpec, own: &str) -> &'static str {
    match member.authentication {
        _ if *member.name == *own || member.tunnel.is_none() => "",
        Authentication::None => "address",
        Authentication::Tagged { .. } => "authenticated",
        Authentication::Rejected => "refused",
    }
}

fn link(peer: &PeerStatus, now: Tick) -> Link {
    let replication = &peer.replication;
    Link {
        up: peer.linked,
        was_up: peer.since.is_some(),
        since_ms: peer.since.map_or(0, |since| now.since(since)).into(),
        rtt_us: peer.rtt.map_or(0, micros),
        heartbeats_missed: peer.heartbeats_missed,
        refused: peer.rejections,
        failures: peer.failures,
        last_failure: peer.last_failure.as_ref().map(ToString::to_string).unwrap_or_default(),
        in_sync_from: replication.in_sync_from,
        in_sync_to: replication.in_sync_to,
        records_sent: replication.sent,
        records_applied: replication.received,
        records_purged: replication.purged,
        queued_bytes: replication.queued_bytes as u64,
        resyncs: replication.resyncs,
        released: replication.released.as_ref().map_or(0, |release| release.view),
        released_by: replication.peer_released.as_ref().map_or(0, |release| release.view),
        version: peer.version,
    }
}

/// Microseconds, at least one: 0 means unknown.
fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// The shards of a VIP, by home.
pub(super) fn shards(policy: &Policy, vip: &Vip, state: &GatewayState) -> Vec<Share> {
    let name = |id: GatewayId| policy.members().name(id).to_string();
    let parts = vip.shards.home_parts().into_iter();
    let shards = parts.map(|HomePart { shard, blocks }| Share {
        home: shard.home().map(name).unwrap_or_default(),
        owner: owner_name(policy, shard.owner, state),
        blocks: ports::blocks_and_ports(&blocks, vip, state).0,
        may_open: shard.may_open,
        // Only the last replica target is active.
        replica_target: shard.replica_targets(policy.members()).last().map(name).unwrap_or_default(),
    });
    shards.collect()
}

/// An owner's name; empty: none.
pub(super) fn owner_name(policy: &Policy, owner: Owner, state: &GatewayState) -> String {
    match owner {
        Owner::This => state.name.clone(),
        Owner::Other(id) => policy.members().name(id).to_string(),
        Owner::Unowned => String::new(),
    }
}

/// Requests a drain or undrain. It is complete when the membership view says so.
pub(super) fn drain(state: &GatewayState, draining: bool) -> Result<(), RequestError> {
    // Before that, the members of the group are unknown.
    if state.policy.load().updates_applied > 0 && !state.ready.load(Ordering::Relaxed) {
        return Err(RequestError::unavailable("the gateway is starting or stopping; try again"));
    }
    // A drain can always be undone, even if its policy server is gone.
    if draining || !state.group.load().draining {
        check_failover(state)?;
    }
    let starting = || RequestError::unavailable("the gateway is still starting: it has no policy yet");
    let commands = &state.engine.get().ok_or_else(starting)?.commands;
    commands
        .send(ControlCommand::SetDraining(draining))
        .map_err(|_| RequestError::unavailable("the gateway is stopping"))
}

/// Dry run: the shards that a drain would move, by placement alone.
pub(super) fn drain_moves(state: &GatewayState) -> Result<Vec<Move>, RequestError> {
    check_failover(state)?;
    let group = state.group.load();
    let before = active_members(&group);
    let mut after = before.clone();
    after.retain(|name| **name != *state.name);
    let ((shard_maps, vips), endpoints) = (state.placement.get(), endpoints(&state.compiled.load()));
    let placed = Placed { vips: &vips, shard_maps: &shard_maps, endpoints: &endpoints };
    let moves = shard_moves(placed, &before, &after);
    let moves = moves.into_iter().filter(ShardMove::changes_owner).map(|it| Move {
        vip: it.vip.to_string(),
        home: it.home.to_string(),
        to: it.after.map(|name| name.to_string()).unwrap_or_default(),
        endpoints: it.endpoints as u64,
    });
    Ok(moves.collect())
}

fn active_members(group: &GroupStatus) -> BTreeSet<Arc<str>> {
    group.spec.gateways.iter().filter(|member| member.active).map(|member| member.name.clone()).collect()
}

/// The endpoints with a home, with what `moves` evaluates: their home gateway and their VIP.
fn endpoints(policy: &Policy) -> Vec<EndpointSpec> {
    let spec = |(address, endpoint): (IpAddr, &Endpoint)| {
        Some(EndpointSpec {
            address,
            name: endpoint.name.clone(),
            policy: policy.egress_of(endpoint).spec.name.clone(),
            vips: policy.vips_of(endpoint).map(|vip| vip.address).collect(),
            gateway: Some(policy.members().name(policy.home_of(endpoint)?).clone()),
            slot: policy.slot_of(endpoint),
            remarks: vec![],
        })
    };
    policy.endpoints().filter_map(spec).collect()
}

/// Fails unless another gateway could take over and an authority manages membership.
fn check_failover(state: &GatewayState) -> Result<(), RequestError> {
    let refused = |reason: &str| Err(RequestError::refused(format!("{}: {reason}", state.name)));
    let group = state.group.load();
    if group.spec.gateways.len() < 2 {
        return refused("no other gateway in the policy could take over");
    }
    match group.authority {
        None => refused(
            "no policy server manages membership (`policy.server` in gateway.yaml): every gateway is always active",
        ),
        Some(Authority::Fixed) => {
            refused("view_fixed: its policy server doesn't manage membership, so every gateway is always active")
        }
        Some(Authority::Unknown | Authority::Unreachable | Authority::Reachable) => Ok(()),
    }
}
