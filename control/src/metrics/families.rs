//! Metric definitions of the gateway: names, labels, help, and the source of each value.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::observe::counters::WorkerCounters;
use vipgate_dataplane::policy::service::BackendUsage;
use vipgate_dataplane::policy::spec::BackendState;
use vipgate_dataplane::session::end_reason::EndReason;

use super::group;
use crate::kernel::{LinkState, NextHopState};
use crate::listener;
use crate::metric::{Family, Kind, Labels, family};
use crate::state::tracking::XdpAttachment;
use crate::state::{DeviceMetric, DeviceStats, GatewayState};

/// Collects all metrics of a gateway.
pub(crate) fn collect(state: &GatewayState) -> Vec<Family> {
    let mut families = workers(state);
    families.extend(sessions(state));
    families.extend(policy(state));
    families.extend(state.files.iter().flat_map(|files| files.status.families()));
    families.push(group::port_blocks(state));
    families.extend(group::shards(state));
    families.extend(group::collect(state));
    families.extend(nat_log(state));
    families.extend(device(state));
    families.push(mtus(state));
    families.extend(tracking(state));
    families.push(stalls(state));
    families.extend(listener::families(&state.connections.all()));
    families
}

fn workers(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let each = |value: fn(&WorkerCounters) -> u64| -> Vec<(Labels, u64)> {
        by_worker(state).map(|(worker, counters)| (vec![worker], value(counters))).collect()
    };
    let by_direction = |value: fn(&WorkerCounters, usize) -> u64| -> Vec<(Labels, u64)> {
        let values = by_worker(state).flat_map(|(worker, counters)| {
            Direction::ALL.map(|direction| {
                let labels = vec![worker.clone(), ("direction", direction.name().to_owned())];
                (labels, value(counters, direction as usize))
            })
        });
        values.collect()
    };
    let drops = DropReason::ALL.into_iter().zip(state.all_drops());
    let drops = drops.map(|(reason, count)| (vec![("reason", reason.name().to_owned())], count));
    vec![
        family("packets", "Packets forwarded", Counter, by_direction(|counters, index| counters.packets[index].get())),
        family("bytes", "Bytes forwarded, whole frames", Counter, by_direction(|all, index| all.bytes[index].get())),
        family("drops", "Packets dropped", Counter, drops.collect()),
        family("received", "Packets received from AF_XDP sockets", Counter, each(|counters| counters.received.get())),
        family(
            "answered",
            "ARP and NDP replies, ICMP errors, TCP resets and announcements sent",
            Counter,
            each(|counters| counters.replies_sent.get()),
        ),
        family(
            "heard",
            "Packets consumed without a reply: acknowledgements of health checks, ARP and NDP claims to VIPs",
            Counter,
            each(|counters| counters.consumed.get()),
        ),
        family(
            "vip_conflicts",
            "ARP packets and neighbor advertisements in which another host claims a VIP of this gateway",
            Counter,
            each(|counters| counters.vip_conflicts.get()),
        ),
        family(
            "answers_limited",
            "ICMP errors and TCP resets suppressed by the rate limit",
            Counter,
            each(|counters| counters.replies_suppressed.get()),
        ),
        family(
            "handoffs",
            "Packets handed off to the worker that owns their session",
            Counter,
            each(|counters| counters.handoffs.get()),
        ),
        family(
            "out_of_window",
            "TCP segments out of window and SCTP packets with a wrong tag, forwarded without a state change",
            Counter,
            each(|counters| counters.out_of_window.get()),
        ),
        family(
            "waiting",
            "Packets queued for a neighbor whose MAC address is unresolved",
            Gauge,
            each(|counters| counters.neighbor_waiting.get()),
        ),
    ]
}

/// The workers' sessions.
fn sessions(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let each = |value: fn(&WorkerCounters) -> u64| -> Vec<(Labels, u64)> {
        by_worker(state).map(|(worker, counters)| (vec![worker], value(counters))).collect()
    };
    let ended = by_worker(state).flat_map(|(worker, counters)| {
        EndReason::ALL.map(|reason| {
            let labels = vec![worker.clone(), ("reason", reason.name().to_owned())];
            (labels, counters.sessions_ended[reason as usize].get())
        })
    });
    vec![
        family("sessions", "Active sessions", Gauge, each(|counters| counters.sessions.get())),
        family(
            "sessions_capacity",
            "Capacity of the session tables of all workers",
            Gauge,
            vec![(vec![], state.session_capacity)],
        ),
        family(
            "sessions_reserve",
            "Session table entries reserved for holders below their fair share",
            Gauge,
            each(|counters| counters.session_reserve.get()),
        ),
        family(
            "session_fair_share",
            "Sessions, including standby sessions, that each VIP may have at least; more if other VIPs have fewer",
            Gauge,
            each(|counters| counters.session_fair_share.get()),
        ),
        family("sessions_created", "Sessions opened", Counter, each(|counters| counters.sessions_created.get())),
        family(
            "session_copies",
            "Standby sessions, replicated from other gateways",
            Gauge,
            each(|counters| counters.standby_sessions.get()),
        ),
        family(
            "session_copies_refused",
            "Standby sessions that were rejected by a full table, or evicted for a session of this gateway",
            Counter,
            each(|counters| counters.standby_rejected.get()),
        ),
        family(
            "sessions_taken_over",
            "Standby sessions that became active by a failover",
            Counter,
            each(|counters| counters.sessions_failed_over.get()),
        ),
        family("sessions_expired", "Sessions ended", Counter, ended.collect()),
    ]
}

fn policy(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge, Info};
    let (policy, compiled) = (state.policy.load(), state.compiled.load());
    let updates = [("applied", policy.updates_applied), ("rejected", policy.updates_rejected)];
    let updates = updates.map(|(result, count)| (vec![("result", result.to_owned())], count));
    let version = vec![("version", compiled.version().to_owned())];
    let server = state.server.as_ref().map(|server| server.load());
    let connected = server.as_ref().is_none_or(|server| server.connected);
    let cached = server.as_ref().is_none_or(|server| server.cache_error.is_none());
    let age = server.and_then(|server| server.confirmed_at).map(|at| at.elapsed().unwrap_or_default().as_secs());
    let build = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    vec![
        family("policy_version", "The policy in force", Info, vec![(version, 1)]),
        family("policy_updates", "Policy updates", Counter, updates.into()),
        family(
            "policy_connected",
            "Whether the policy source is reachable; always 1 for files",
            Gauge,
            vec![(vec![], connected.into())],
        ),
        family(
            "policy_age_seconds",
            "Seconds since the policy in force was last confirmed by the policy server",
            Gauge,
            age.into_iter().map(|seconds| (vec![], seconds)).collect(),
        ),
        family(
            "policy_cached",
            "Whether the policy is cached for a restart without its server; always 1 for files",
            Gauge,
            vec![(vec![], cached.into())],
        ),
        family(
            "ready",
            "Whether the gateway forwards packets",
            Gauge,
            vec![(vec![], state.ready.load(Ordering::Relaxed).into())],
        ),
        family(
            "vip_sessions",
            "Sessions that hold a port of a VIP, including quarantined ones",
            Gauge,
            compiled.vips().map(|vip| (vec![("vip", vip.address.to_string())], vip.ports.pool.sessions())).collect(),
        ),
        family("vips", "VIPs of the policy in force", Gauge, vec![(vec![], compiled.live_vips().count() as u64)]),
        family(
            "endpoints",
            "Endpoints of the policy in force",
            Gauge,
            vec![(vec![], compiled.endpoint_count() as u64)],
        ),
        family(
            "services",
            "Services in the policy in force",
            Gauge,
            vec![(vec![], compiled.services().count() as u64)],
        ),
        family("backends", "Backends of Services, by state", Gauge, backends(state)),
        family(
            "service_sessions",
            "Active inbound sessions, by Service",
            Gauge,
            by_service(state, |used| used.sessions().into()),
        ),
        family(
            "service_sessions_created",
            "Inbound sessions opened, by Service",
            Counter,
            by_service(state, BackendUsage::opened),
        ),
        family(
            "refused",
            "Sessions refused by quota, port exhaustion or a full session table, by policy",
            Counter,
            refused(state),
        ),
        family("build", "Version of the running program", Info, vec![(build, 1)]),
    ]
}

/// Backends by state. A backend of several Services counts once for each.
fn backends(state: &GatewayState) -> Vec<(Labels, u64)> {
    let states = [
        (BackendState::Ready, "ready"),
        (BackendState::Terminating, "terminating"),
        (BackendState::NotReady, "not_ready"),
    ];
    let policy = state.compiled.load();
    let count = |wanted: BackendState| {
        policy.services().flat_map(|service| &service.spec.backends).filter(|it| it.state == wanted).count()
    };
    states.map(|(state, name)| (vec![("state", name.to_owned())], count(state) as u64)).into()
}

/// Sums a value over the backends of each Service.
fn by_service(state: &GatewayState, value: impl Fn(&BackendUsage) -> u64) -> Vec<(Labels, u64)> {
    let policy = state.compiled.load();
    let all = policy.services().map(|service| {
        let count = service.backend_usage().map(|(_, usage)| value(usage)).sum();
        (vec![("service", service.spec.name.trim_start_matches("Service ").to_owned())], count)
    });
    all.collect()
}

/// Refused sessions by egress policy, summed over its endpoints.
fn refused(state: &GatewayState) -> Vec<(Labels, u64)> {
    let policy = state.compiled.load();
    let mut sums: BTreeMap<&str, u64> = policy.egress().map(|egress| (&*egress.spec.name, 0)).collect();
    for (_, endpoint) in policy.endpoints() {
        if let Some(sum) = sums.get_mut(&*policy.egress_of(endpoint).spec.name) {
            *sum += endpoint.usage.rejected();
        }
    }
    sums.into_iter().map(|(name, sum)| (vec![("policy", name.to_owned())], sum)).collect()
}

/// Export statistics of the NAT log, if configured.
fn nat_log(state: &GatewayState) -> Vec<Family> {
    let Some(log) = &state.nat_log else { return Vec::new() };
    let results = [("sent", log.stats.sent()), ("lost", log.stats.lost())];
    let results = results.map(|(result, count)| (vec![("result", result.to_owned())], count));
    let is_up = log.stats.error().is_none();
    vec![
        family("nat_log_records", "Records of the NAT log, by result", Kind::Counter, results.into()),
        family(
            "nat_log_up",
            "Whether the collector of the NAT log is reachable, as far as known",
            Kind::Gauge,
            vec![(vec![], is_up.into())],
        ),
    ]
}

/// Statistics of the device.
fn device(state: &GatewayState) -> Vec<Family> {
    let mut names: BTreeMap<&str, Vec<DeviceMetric>> = BTreeMap::new();
    for metric in state.device().map(DeviceStats::metrics).unwrap_or_default() {
        names.entry(metric.name).or_default().push(metric);
    }
    let families = names.into_iter().map(|(name, metrics)| {
        let (help, kind) = (metrics[0].help, if metrics[0].is_counter { Kind::Counter } else { Kind::Gauge });
        family(name, help, kind, metrics.into_iter().map(|metric| (metric.labels, metric.value)).collect())
    });
    families.collect()
}

/// Event-loop stalls of the control thread.
fn stalls(state: &GatewayState) -> Family {
    let ms = |stall: Duration| u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
    let (elapsed, worked) = state.stalls.longest();
    let values = [("elapsed", ms(elapsed)), ("worked", ms(worked))];
    family(
        "control_loop_stall_seconds",
        "Longest stall of the control loop in the last minute: elapsed time, and CPU time of the thread (worked)",
        Kind::Milliseconds,
        values.map(|(time, value)| (vec![("time", time.to_owned())], value)).into(),
    )
}

/// Interfaces whose MTU is too large.
fn mtus(state: &GatewayState) -> Family {
    let network = state.network.load();
    let excess = network.interfaces.iter().map(|interface| {
        (vec![("interface", interface.name.clone())], u64::from(interface.mtu - interface.usable_mtu()))
    });
    family(
        "interface_mtu_excess_bytes",
        "Bytes by which the MTU of an interface exceeds the longest packet that can be received on it",
        Kind::Gauge,
        excess.collect(),
    )
}

/// State of interfaces, next hops and XDP attachment.
fn tracking(state: &GatewayState) -> Vec<Family> {
    let tracking = state.tracking.load();
    let label = |interface: &str| vec![("interface", interface.to_owned())];
    let links = tracking.interfaces.iter().map(|link| (label(&link.name), u64::from(link.state == LinkState::Up)));
    let captures = || tracking.attachments.iter();
    let hops = tracking.next_hops.iter().filter(|hop| hop.state != NextHopState::Unknown);
    let next_hops = hops.map(|hop| {
        let link = tracking.interfaces.iter().find(|link| link.id == hop.interface);
        let mut labels = label(link.map_or("", |link| link.name.as_str()));
        labels.push(("address", hop.address.to_string()));
        (labels, u64::from(hop.state == NextHopState::Up))
    });
    vec![
        family("link_up", "Whether an interface is up and operational", Kind::Gauge, links.collect()),
        family(
            "next_hop_up",
            "Whether a next hop replies to probes; absent until its first reply",
            Kind::Gauge,
            next_hops.collect(),
        ),
        family(
            "xdp_attached",
            "Whether the XDP program is attached to an interface",
            Kind::Gauge,
            captures().map(|it| (label(&it.interface), u64::from(it.state == XdpAttachment::Attached))).collect(),
        ),
        family(
            "xdp_detached",
            "How often the XDP program of an interface was found detached or replaced",
            Kind::Counter,
            captures().map(|it| (label(&it.interface), it.detached)).collect(),
        ),
    ]
}

/// The counters of each worker, with its `worker` label.
fn by_worker(state: &GatewayState) -> impl Iterator<Item = ((&'static str, String), &WorkerCounters)> {
    state.workers().iter().enumerate().map(|(index, worker)| (("worker", index.to_string()), &*worker.counters))
}
