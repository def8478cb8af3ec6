//! The metrics: names, labels and help, and where each number comes from.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vipgate_dataplane::counters::{Direction, DropReason, EndReason, WorkerCounters};
use vipgate_dataplane::snapshot::service::BackendUse;
use vipgate_dataplane::snapshot::spec::BackendState;

use super::group;
use crate::gateway::state::{Figure, GatewayState};
use crate::gateway::tracking::Capture;
use crate::kernel::{LinkState, NextHopState};
use crate::listener;

/// What kind of number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It only grows; its name ends in `_total`.
    Counter,
    /// A level.
    Gauge,
    /// A level that is counted in milliseconds, and shown in seconds.
    Milliseconds,
    /// Always 1: what matters are the labels. Its name ends in `_info`.
    Info,
}

/// Names and values of labels.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// All values of one metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Its name without what its kind adds at the end.
    pub(crate) name: String,
    /// One sentence without its period.
    pub(crate) help: &'static str,
    pub(crate) kind: Kind,
    pub(crate) values: Vec<(Labels, u64)>,
}

/// Reads everything that there is to know.
pub(crate) fn read(state: &GatewayState) -> Vec<Family> {
    let mut families = workers(state);
    families.extend(sessions(state));
    families.extend(policy(state));
    families.extend(state.files.iter().flat_map(|files| files.status.families()));
    families.push(group::port_blocks(state));
    families.extend(group::shards(state));
    families.extend(group::read(state));
    families.extend(nat_log(state));
    families.extend(device(state));
    families.push(mtus(state));
    families.extend(tracking(state));
    families.push(stalls(state));
    families.extend(listener::families(&state.rooms.all()));
    families
}

pub(crate) fn family(name: &str, help: &'static str, kind: Kind, values: Vec<(Labels, u64)>) -> Family {
    Family { name: format!("vipgate_{name}"), help, kind, values }
}

fn workers(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let each = |value: fn(&WorkerCounters) -> u64| -> Vec<(Labels, u64)> {
        numbered(state).map(|(worker, counters)| (vec![worker], value(counters))).collect()
    };
    let by_direction = |value: fn(&WorkerCounters, usize) -> u64| -> Vec<(Labels, u64)> {
        let values = numbered(state).flat_map(|(worker, counters)| {
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
        family("packets", "Packets forwarded", Counter, by_direction(|counters, at| counters.packets[at].get())),
        family("bytes", "Bytes forwarded, whole frames", Counter, by_direction(|all, at| all.bytes[at].get())),
        family("drops", "Packets dropped", Counter, drops.collect()),
        family("received", "Packets received from the sockets", Counter, each(|counters| counters.received.get())),
        family(
            "answered",
            "ARP and NDP answers, ICMP errors, resets and announcements sent",
            Counter,
            each(|counters| counters.answered.get()),
        ),
        family(
            "heard",
            "Packets for the gateway itself that need no answer: acknowledgements of health checks, claims to VIPs",
            Counter,
            each(|counters| counters.heard.get()),
        ),
        family(
            "vip_conflicts",
            "ARP packets and neighbour advertisements by which another host claims a VIP of this gateway",
            Counter,
            each(|counters| counters.vip_conflicts.get()),
        ),
        family(
            "answers_limited",
            "ICMP errors and resets that were not sent, because there were too many",
            Counter,
            each(|counters| counters.answers_limited.get()),
        ),
        family(
            "handoffs",
            "Packets handed to the worker that owns their session",
            Counter,
            each(|counters| counters.handoffs.get()),
        ),
        family(
            "out_of_window",
            "TCP segments out of their connection's window, and SCTP packets with another tag: passed on without effect",
            Counter,
            each(|counters| counters.out_of_window.get()),
        ),
        family(
            "waiting",
            "Packets that wait for a neighbour's link address now",
            Gauge,
            each(|counters| counters.waiting.get()),
        ),
    ]
}

/// The workers' sessions.
fn sessions(state: &GatewayState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let each = |value: fn(&WorkerCounters) -> u64| -> Vec<(Labels, u64)> {
        numbered(state).map(|(worker, counters)| (vec![worker], value(counters))).collect()
    };
    let ended = numbered(state).flat_map(|(worker, counters)| {
        EndReason::ALL.map(|reason| {
            let labels = vec![worker.clone(), ("reason", reason.name().to_owned())];
            (labels, counters.sessions_ended[reason as usize].get())
        })
    });
    vec![
        family("sessions", "Sessions open now", Gauge, each(|counters| counters.sessions.get())),
        family(
            "sessions_capacity",
            "Sessions that the tables of all workers hold",
            Gauge,
            vec![(vec![], state.session_capacity)],
        ),
        family(
            "sessions_reserve",
            "Sessions of the table that only holders below their fair share may have",
            Gauge,
            each(|counters| counters.session_reserve.get()),
        ),
        family(
            "session_fair_share",
            "Sessions, standby ones included, that each VIP may have at least; more, as far as others have fewer",
            Gauge,
            each(|counters| counters.session_fair_share.get()),
        ),
        family("sessions_created", "Sessions opened", Counter, each(|counters| counters.sessions_created.get())),
        family(
            "session_copies",
            "Copies of other gateways' sessions now",
            Gauge,
            each(|counters| counters.copies.get()),
        ),
        family(
            "session_copies_refused",
            "Copies of other gateways' sessions that found no place, or gave it to a session of this one",
            Counter,
            each(|counters| counters.copies_refused.get()),
        ),
        family(
            "sessions_taken_over",
            "Copies that became sessions of this gateway",
            Counter,
            each(|counters| counters.sessions_taken_over.get()),
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
    let age = server.and_then(|server| server.known_at).map(|at| at.elapsed().unwrap_or_default().as_secs());
    let program = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    vec![
        family("policy_version", "The policy in force", Info, vec![(version, 1)]),
        family("policy_updates", "Policy updates", Counter, updates.into()),
        family(
            "policy_connected",
            "Whether the source of policy can be reached; files always can",
            Gauge,
            vec![(vec![], connected.into())],
        ),
        family(
            "policy_age_seconds",
            "Seconds since the policy in force was last known to be what its server says",
            Gauge,
            age.into_iter().map(|seconds| (vec![], seconds)).collect(),
        ),
        family(
            "policy_cached",
            "Whether the policy would outlive a restart without its server; files always do",
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
            "Sessions that hold a port of a VIP, resting ones included",
            Gauge,
            compiled.vips().map(|vip| (vec![("vip", vip.address.to_string())], vip.pool.sessions())).collect(),
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
            "Services that are reached at VIPs",
            Gauge,
            vec![(vec![], compiled.services().count() as u64)],
        ),
        family("backends", "Backends of Services by state", Gauge, backends(state)),
        family(
            "service_sessions",
            "Sessions of clients open now, by Service",
            Gauge,
            by_service(state, |used| used.sessions().into()),
        ),
        family(
            "service_sessions_created",
            "Sessions of clients opened, by Service",
            Counter,
            by_service(state, BackendUse::opened),
        ),
        family("refused", "Sessions refused for want of quota, ports or room", Counter, refused(state)),
        family("build", "The running program", Info, vec![(program, 1)]),
    ]
}

/// Backends by state, each as often as Services have it.
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

/// A sum over the backends of each Service.
fn by_service(state: &GatewayState, of: impl Fn(&BackendUse) -> u64) -> Vec<(Labels, u64)> {
    let policy = state.compiled.load();
    let all = policy.services().map(|service| {
        let count = service.uses().map(|(_, usage)| of(usage)).sum();
        (vec![("service", service.spec.name.trim_start_matches("Service ").to_owned())], count)
    });
    all.collect()
}

/// Refused sessions by policy: those of its endpoints together.
fn refused(state: &GatewayState) -> Vec<(Labels, u64)> {
    let policy = state.compiled.load();
    let mut sums: BTreeMap<&str, u64> = policy.egress().map(|egress| (&*egress.spec.name, 0)).collect();
    for (_, endpoint) in policy.endpoints() {
        if let Some(sum) = sums.get_mut(&*policy.egress_of(endpoint).spec.name) {
            *sum += endpoint.usage.refused();
        }
    }
    sums.into_iter().map(|(name, sum)| (vec![("policy", name.to_owned())], sum)).collect()
}

/// What became of the log of translations, where there is one.
fn nat_log(state: &GatewayState) -> Vec<Family> {
    let Some(log) = &state.nat_log else { return Vec::new() };
    let results = [("sent", log.figures.sent()), ("lost", log.figures.lost())];
    let results = results.map(|(result, count)| (vec![("result", result.to_owned())], count));
    let is_up = log.figures.error().is_none();
    vec![
        family("nat_log_records", "Records of the NAT log", Kind::Counter, results.into()),
        family(
            "nat_log_up",
            "Whether the collector of the NAT log can be reached, as far as anybody knows",
            Kind::Gauge,
            vec![(vec![], is_up.into())],
        ),
    ]
}

fn device(state: &GatewayState) -> Vec<Family> {
    let mut names: BTreeMap<&str, Vec<Figure>> = BTreeMap::new();
    for figure in state.device.figures() {
        names.entry(figure.name).or_default().push(figure);
    }
    let families = names.into_iter().map(|(name, figures)| {
        let (help, kind) = (figures[0].help, if figures[0].counter { Kind::Counter } else { Kind::Gauge });
        family(name, help, kind, figures.into_iter().map(|figure| (figure.labels, figure.value)).collect())
    });
    families.collect()
}

/// How late the control thread was.
fn stalls(state: &GatewayState) -> Family {
    let ms = |stall: Duration| u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
    let (elapsed, worked) = state.stalls.longest();
    let values = [("elapsed", ms(elapsed)), ("worked", ms(worked))];
    family(
        "control_loop_stall_seconds",
        "The longest time in the last minute for which the control thread took up nothing new: in all, and as far as it worked itself",
        Kind::Milliseconds,
        values.map(|(time, value)| (vec![("time", time.to_owned())], value)).into(),
    )
}

fn mtus(state: &GatewayState) -> Family {
    let network = state.network.load();
    let excess = network
        .interfaces
        .iter()
        .map(|interface| (vec![("interface", interface.name.clone())], u64::from(interface.mtu - interface.carried())));
    family(
        "interface_mtu_excess_bytes",
        "Bytes by which the MTU of an interface is more than the longest packet that is received there",
        Kind::Gauge,
        excess.collect(),
    )
}

/// Interfaces, and what is captured there.
fn tracking(state: &GatewayState) -> Vec<Family> {
    let tracking = state.tracking.load();
    let of = |interface: &str| vec![("interface", interface.to_owned())];
    let links = tracking.links.iter().map(|link| (of(&link.name), u64::from(link.state == LinkState::Up)));
    let captures = || tracking.captures.iter();
    let hops = tracking.next_hops.iter().filter(|hop| hop.state != NextHopState::Unknown);
    let next_hops = hops.map(|hop| {
        let link = tracking.links.iter().find(|link| link.id == hop.interface);
        let mut labels = of(link.map_or("", |link| link.name.as_str()));
        labels.push(("address", hop.address.to_string()));
        (labels, u64::from(hop.state == NextHopState::Up))
    });
    vec![
        family(
            "link_up",
            "Whether an interface can send and receive, as the kernel says",
            Kind::Gauge,
            links.collect(),
        ),
        family(
            "next_hop_up",
            "Whether a next hop answers probes; absent as long as it has never answered",
            Kind::Gauge,
            next_hops.collect(),
        ),
        family(
            "xdp_attached",
            "Whether the steering program is on an interface",
            Kind::Gauge,
            captures().map(|it| (of(&it.interface), u64::from(it.state == Capture::Attached))).collect(),
        ),
        family(
            "xdp_detached",
            "How often the steering program was found to be off an interface, or another one in its place",
            Kind::Counter,
            captures().map(|it| (of(&it.interface), it.detached)).collect(),
        ),
    ]
}

/// The workers' counters, each with the label that names the worker.
fn numbered(state: &GatewayState) -> impl Iterator<Item = ((&'static str, String), &WorkerCounters)> {
    state.workers.iter().enumerate().map(|(number, worker)| (("worker", number.to_string()), &*worker.counters))
}
