//! `Status` request: the gateway, its policy, workers, interfaces and sockets.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use ipnet::IpNet;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::observe::counters::{Counter, WorkerCounters};
use vipgate_dataplane::policy::spec::{ClusterSpec, Role};

use super::{PROTOCOL, membership, proto, tracking};
use crate::natlog::NatLogStatus;
use crate::source::ingest::SourceStatus;
use crate::state::conflicts::format_mac;
use crate::state::{DeviceStats, GatewayState};
use crate::xds::client::ServerStatus;

/// Limit of faulty objects in the status; the counters include all.
const MAX_FAULTY: usize = 100;

/// The status of a gateway.
pub(super) fn status(state: &GatewayState) -> proto::StatusReply {
    let tracking = state.tracking.load();
    proto::StatusReply {
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
        policy: Some(policy(state)),
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

fn policy(state: &GatewayState) -> proto::PolicyStatus {
    let (policy, compiled) = (state.policy.load(), state.compiled.load());
    proto::PolicyStatus {
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
        cluster: Some(cluster(compiled.cluster())),
    }
}

fn workers(state: &GatewayState) -> Vec<proto::WorkerStatus> {
    let by_direction = |counters: &[Counter]| -> BTreeMap<String, u64> {
        let values = Direction::ALL.into_iter().zip(counters);
        values.map(|(direction, counter)| (direction.name().to_owned(), counter.get())).collect()
    };
    let workers = state.workers().iter().enumerate().map(|(number, worker)| {
        let counters: &WorkerCounters = &worker.counters;
        proto::WorkerStatus {
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

fn interfaces(state: &GatewayState) -> Vec<proto::InterfaceStatus> {
    let (network, tracking) = (state.network.load(), state.tracking.load());
    let interfaces = network.interfaces.iter().map(|interface| {
        let (xdp, guard) = tracking::programs(&tracking, &interface.name);
        proto::InterfaceStatus {
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

fn sockets(state: &GatewayState) -> Vec<proto::SocketStatus> {
    let sockets = state.sockets().iter().map(|socket| proto::SocketStatus {
        interface: socket.interface.clone(),
        queue: socket.queue,
        worker: u32::try_from(socket.worker).unwrap_or(u32::MAX),
        mode: socket.mode.to_owned(),
        zero_copy: socket.zero_copy,
    });
    sockets.collect()
}

/// The samples of the device's metrics.
fn figures(state: &GatewayState) -> Vec<proto::Figure> {
    let families = state.device().map(DeviceStats::metrics).unwrap_or_default();
    let figures = families.into_iter().flat_map(|family| {
        family.values.into_iter().map(move |(labels, value)| proto::Figure {
            name: family.metric.name.to_owned(),
            labels: labels.into_iter().map(|(name, text)| (name.to_owned(), text)).collect(),
            value,
        })
    });
    figures.collect()
}

fn cluster(cluster: &ClusterSpec) -> proto::ClusterRanges {
    let texts = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect();
    proto::ClusterRanges {
        pods: texts(&cluster.pods),
        others: texts(&cluster.others),
        drop_uncovered: cluster.drop_uncovered,
    }
}

fn server_status(server: &ServerStatus) -> proto::ServerStatus {
    let seconds = |at: SystemTime| SystemTime::now().duration_since(at).unwrap_or_default().as_secs();
    proto::ServerStatus {
        connected: server.connected,
        since_seconds: seconds(server.since),
        error: server.error.clone().unwrap_or_default(),
        has_policy: server.confirmed_at.is_some(),
        policy_age_seconds: server.confirmed_at.map_or(0, seconds),
        cache_error: server.cache_error.clone().unwrap_or_default(),
    }
}

fn manifests(status: &SourceStatus) -> proto::ManifestSource {
    let (health, compiled) = (status.health.load(), status.compiled.load());
    let [(_, accepted), (_, last_good), (_, rejected)] = compiled.states();
    let faulty = compiled.faulty.iter().take(MAX_FAULTY).map(|(id, faulty)| proto::FaultyObject {
        name: id.to_string(),
        last_good: faulty.has_last_good,
        reasons: faulty.reasons.clone(),
    });
    proto::ManifestSource {
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

fn nat_log(log: &NatLogStatus) -> proto::NatLog {
    proto::NatLog {
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
