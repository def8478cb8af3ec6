//! `Status` request: the gateway, its policy, workers, interfaces and sockets.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::observe::counters::{Counter, WorkerCounters};
use vipgate_dataplane::policy::spec::{ClusterSpec, Role};

use super::membership::Group;
use super::protocol::PROTOCOL;
use super::tracking::NextHopStatus;
use super::{membership, tracking};
use crate::natlog::NatLogStatus;
use crate::source::ingest::SourceStatus;
use crate::state::conflicts::format_mac;
use crate::state::{DeviceStats, GatewayState};
use crate::xds::client::ServerStatus;

/// Limit of faulty objects in the status; the counters include all.
const MAX_FAULTY: usize = 100;

/// Status of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    /// Version of this API, as in the greeting.
    pub protocol: u32,
    pub name: String,
    pub node: String,
    pub zone: String,
    pub version: String,
    pub pid: u32,
    pub uptime_seconds: u64,
    pub ready: bool,
    pub sessions: u64,
    pub session_capacity: u64,
    pub policy: PolicyStatus,
    pub workers: Vec<WorkerStatus>,
    pub interfaces: Vec<InterfaceStatus>,
    pub sockets: Vec<SocketStatus>,
    pub figures: Vec<Figure>,
    /// Only if the policy names gateways.
    pub group: Option<Group>,
    /// Only if a NAT log is configured.
    pub nat_log: Option<NatLog>,
    /// Part of the session capacity that is reserved for VIPs and clients below their fair share.
    pub session_reserve: u64,
    /// Guaranteed sessions of each VIP (max-min fair share), standby ones included; more while others use fewer.
    pub session_fair_share: u64,
    /// Faults of this gateway; while there are any, it requests to be drained.
    pub faults: Vec<String>,
    /// Hold-down: how long it must be without a fault before it is ready again, milliseconds.
    pub held_down_ms: u64,
    pub next_hops: Vec<NextHopStatus>,
    /// Standby sessions, replicated from other gateways. They use table capacity, too.
    pub standby_sessions: u64,
    /// Why the XDP program's maps don't hold all that policy needs, which is retried.
    pub capture_error: String,
}

/// NAT log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NatLog {
    /// udp or tcp, address and port.
    pub collector: String,
    /// Whether sessions are logged, too.
    pub sessions: bool,
    /// Records that were sent; and lost: the queue was full, or they were in flight when the connection was lost.
    pub sent: u64,
    pub lost: u64,
    /// Why the collector is unreachable; empty: no error is known.
    pub error: String,
}

/// Status of the policy in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyStatus {
    pub version: String,
    pub source: String,
    pub generation: u32,
    /// Seconds since the policy came into force.
    pub age_seconds: u64,
    pub updates_applied: u64,
    pub updates_rejected: u64,
    /// Error of the last update; empty: it was applied.
    pub last_error: String,
    pub vips: u64,
    pub endpoints: u64,
    /// Only with a policy server.
    pub server: Option<PolicyServer>,
    pub services: u64,
    /// Only with policy files.
    pub manifests: Option<ManifestSource>,
    pub cluster: ClusterRanges,
}

/// CIDRs of the cluster, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRanges {
    /// Pod CIDRs.
    pub pods: Vec<String>,
    /// Other internal CIDRs: those of Services, and pod CIDRs of nodes.
    pub others: Vec<String>,
    /// Whether packets from `pods` to the outside that no policy covers are dropped; else they are passed to the kernel.
    pub drop_uncovered: bool,
}

/// Status of policy files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestSource {
    /// Whether all of them are readable and none has become empty. Objects of an unhealthy file stay in force.
    pub healthy: bool,
    /// Why not.
    pub reasons: Vec<String>,
    /// Seconds since `healthy` changed.
    pub since_seconds: u64,
    /// Whether no manifest has been read yet: no policy is in force, and everything is dropped.
    pub waiting: bool,
    /// Objects of which the current version is in force, of which an earlier one is, and of which none is.
    pub accepted: u64,
    pub last_good: u64,
    pub rejected: u64,
    /// Objects of which the current version is not in force; at most 100.
    pub faulty: Vec<FaultyObject>,
    /// Whether addresses of EndpointSlices are taken unverified: tenancy is strict, and the files have no Pod.
    pub slices_unverified: bool,
}

/// An object whose current version is not in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultyObject {
    /// "Kind namespace/name".
    pub name: String,
    /// Whether an earlier version is in force.
    pub last_good: bool,
    pub reasons: Vec<String>,
}

/// Connection to the policy server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyServer {
    pub connected: bool,
    /// Seconds since `connected` changed.
    pub since_seconds: u64,
    /// Why it is unreachable; empty: it is reachable.
    pub error: String,
    /// Whether there is a policy at all; without one everything is dropped.
    pub has_policy: bool,
    /// Seconds since the server last confirmed the policy in force.
    pub policy_age_seconds: u64,
    /// Why the policy isn't cached and would not survive a restart; empty: it is cached.
    pub cache_error: String,
}

/// Status of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub worker: u32,
    pub core: u32,
    pub sessions: u64,
    pub received: u64,
    /// By direction, every direction.
    pub packets: BTreeMap<String, u64>,
    pub drops: u64,
    pub handoffs: u64,
    pub answered: u64,
    /// Packets in the neighbor queue.
    pub waiting: u64,
    pub sessions_created: u64,
    pub sessions_ended: u64,
    /// By direction, every direction; whole frames.
    pub bytes: BTreeMap<String, u64>,
}

/// Status of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceStatus {
    pub name: String,
    pub role: String,
    pub mac: String,
    pub mtu: u32,
    pub up: bool,
    pub addresses: Vec<String>,
    /// Maximum length of an IP packet: its MTU, or the size of a packet buffer if that is less.
    pub carried: u32,
    /// Why it is unusable: it "is administratively down", "has no carrier", "is not operational", "is gone"; empty: it is
    /// usable.
    pub down: String,
    /// State of the steering program: "attached", "missing", "another program, id N" with its kernel id, or "unknown": it
    /// can't be queried.
    pub xdp: String,
    /// How often the steering program was found detached.
    pub xdp_detached: u64,
    /// State of the tc guard, in the same words; empty: there is none.
    pub guard: String,
    /// How often the tc guard was found removed.
    pub guard_detached: u64,
}

/// An AF_XDP socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketStatus {
    pub interface: String,
    pub queue: u32,
    pub worker: u32,
    pub mode: String,
    pub zero_copy: bool,
}

/// A sample of the device's metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: u64,
}

/// The status of a gateway.
pub(super) fn status(state: &GatewayState) -> StatusReply {
    let tracking = state.tracking.load();
    StatusReply {
        protocol: PROTOCOL,
        name: state.name.clone(),
        node: state.node.clone(),
        zone: state.zone.clone().unwrap_or_default(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_seconds: state.started.elapsed().as_secs(),
        ready: state.ready.load(Ordering::Relaxed),
        sessions: state.sum(|counters| counters.sessions.get()),
        session_capacity: state.session_capacity,
        standby_sessions: state.sum(|counters| counters.standby_sessions.get()),
        session_reserve: state.sum(|counters| counters.session_reserve.get()),
        session_fair_share: state.sum(|counters| counters.session_fair_share.get()),
        policy: policy(state),
        workers: workers(state),
        interfaces: interfaces(state),
        sockets: sockets(state),
        figures: figures(state),
        group: (!state.policy.load().peers.is_empty()).then(|| membership::membership(state)),
        nat_log: state.nat_log.as_ref().map(|log| nat_log(log)),
        faults: tracking.faults.iter().map(ToString::to_string).collect(),
        capture_error: state.capture.load().error.as_deref().unwrap_or_default().to_owned(),
        held_down_ms: tracking::held_down_ms(&tracking),
        next_hops: tracking::next_hops(&tracking),
    }
}

fn policy(state: &GatewayState) -> PolicyStatus {
    let (policy, compiled) = (state.policy.load(), state.compiled.load());
    PolicyStatus {
        version: compiled.version().to_owned(),
        source: policy.source.clone(),
        generation: policy.generation,
        age_seconds: SystemTime::now().duration_since(policy.applied_at).unwrap_or_default().as_secs(),
        updates_applied: policy.updates_applied,
        updates_rejected: policy.updates_rejected,
        last_error: policy.last_error.clone().unwrap_or_default(),
        vips: compiled.live_vips().count() as u64,
        endpoints: compiled.endpoint_count() as u64,
        services: compiled.services().count() as u64,
        server: state.server.as_ref().map(|server| server_status(&server.load())),
        manifests: state.files.as_ref().map(|files| manifests(&files.status)),
        cluster: cluster(compiled.cluster()),
    }
}

fn workers(state: &GatewayState) -> Vec<WorkerStatus> {
    let by_direction = |counters: &[Counter]| -> BTreeMap<String, u64> {
        let values = Direction::ALL.into_iter().zip(counters);
        values.map(|(direction, counter)| (direction.name().to_owned(), counter.get())).collect()
    };
    let workers = state.workers().iter().enumerate().map(|(number, worker)| {
        let counters: &WorkerCounters = &worker.counters;
        WorkerStatus {
            worker: u32::try_from(number).unwrap_or(u32::MAX),
            core: u32::try_from(worker.core).unwrap_or(u32::MAX),
            sessions: counters.sessions.get(),
            received: counters.received.get(),
            packets: by_direction(&counters.packets),
            drops: state.drops(number).iter().sum(),
            handoffs: counters.handoffs.get(),
            answered: counters.replies_sent.get(),
            waiting: counters.neighbor_waiting.get(),
            sessions_created: counters.sessions_created.get(),
            sessions_ended: counters.sessions_ended.iter().map(Counter::get).sum(),
            bytes: by_direction(&counters.bytes),
        }
    });
    workers.collect()
}

fn interfaces(state: &GatewayState) -> Vec<InterfaceStatus> {
    let (network, tracking) = (state.network.load(), state.tracking.load());
    let interfaces = network.interfaces.iter().map(|interface| {
        let (xdp, guard) = tracking::programs(&tracking, &interface.name);
        InterfaceStatus {
            down: tracking::down(&tracking, &interface.name),
            xdp: tracking::program(xdp),
            xdp_detached: xdp.unwrap_or_default().detached,
            guard: tracking::program(guard),
            guard_detached: guard.unwrap_or_default().detached,
            name: interface.name.clone(),
            role: role(interface.role).to_owned(),
            mac: format_mac(interface.mac),
            mtu: interface.mtu.into(),
            carried: interface.usable_mtu().into(),
            up: interface.up,
            addresses: interface.addresses.iter().map(IpAddr::to_string).collect(),
        }
    });
    interfaces.collect()
}

fn sockets(state: &GatewayState) -> Vec<SocketStatus> {
    let sockets = state.sockets().iter().map(|socket| SocketStatus {
        interface: socket.interface.clone(),
        queue: socket.queue,
        worker: u32::try_from(socket.worker).unwrap_or(u32::MAX),
        mode: socket.mode.to_owned(),
        zero_copy: socket.zero_copy,
    });
    sockets.collect()
}

/// The samples of the device's metrics.
fn figures(state: &GatewayState) -> Vec<Figure> {
    let families = state.device().map(DeviceStats::metrics).unwrap_or_default();
    let figures = families.into_iter().flat_map(|family| {
        family.values.into_iter().map(move |(labels, value)| Figure {
            name: family.metric.name.to_owned(),
            labels: labels.into_iter().map(|(name, text)| (name.to_owned(), text)).collect(),
            value,
        })
    });
    figures.collect()
}

fn cluster(cluster: &ClusterSpec) -> ClusterRanges {
    let texts = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect();
    ClusterRanges { pods: texts(&cluster.pods), others: texts(&cluster.others), drop_uncovered: cluster.drop_uncovered }
}

fn server_status(server: &ServerStatus) -> PolicyServer {
    let seconds = |at: SystemTime| SystemTime::now().duration_since(at).unwrap_or_default().as_secs();
    PolicyServer {
        connected: server.connected,
        since_seconds: seconds(server.since),
        error: server.error.clone().unwrap_or_default(),
        has_policy: server.confirmed_at.is_some(),
        policy_age_seconds: server.confirmed_at.map_or(0, seconds),
        cache_error: server.cache_error.clone().unwrap_or_default(),
    }
}

fn manifests(status: &SourceStatus) -> ManifestSource {
    let (health, compiled) = (status.health.load(), status.compiled.load());
    let [(_, accepted), (_, last_good), (_, rejected)] = compiled.states();
    let faulty = compiled.faulty.iter().take(MAX_FAULTY).map(|(id, faulty)| FaultyObject {
        name: id.to_string(),
        last_good: faulty.has_last_good,
        reasons: faulty.reasons.clone(),
    });
    ManifestSource {
        healthy: health.is_healthy(),
        reasons: health.reasons.clone(),
        since_seconds: health.age_seconds(),
        waiting: health.waiting,
        accepted,
        last_good,
        rejected,
        faulty: faulty.collect(),
        slices_unverified: compiled.slices_unverified,
    }
}

fn nat_log(log: &NatLogStatus) -> NatLog {
    NatLog {
        collector: log.collector.clone(),
        sessions: log.sessions,
        sent: log.stats.sent(),
        lost: log.stats.lost(),
        error: log.stats.error().map(|error| error.to_string()).unwrap_or_default(),
    }
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Inside => "inside",
        Role::Outside => "outside",
        Role::Both => "both",
    }
}
