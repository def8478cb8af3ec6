//! Metrics of the gateway: the source of each value.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::observe::counters::WorkerCounters;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::service::BackendUsage;
use vipgate_dataplane::policy::spec::BackendState;
use vipgate_dataplane::session::end_reason::EndReason;

use super::{definitions as defined, group};
use crate::admin::services::backend_state;
use crate::kernel::{LinkState, NextHopState};
use crate::metric::{Family, Metric};
use crate::state::tracking::Attachment;
use crate::state::{DeviceStats, GatewayState};
use crate::xds::tls::CertificateValidity;
use crate::{listener, logging};

/// Collects all metrics of a gateway.
pub(crate) fn collect(state: &GatewayState) -> Vec<Family> {
    let mut families = packets(state);
    families.extend(sessions(state));
    families.extend(policy(state));
    families.extend(policy_objects(&state.compiled.load()));
    families.extend(state.files.iter().flat_map(|files| files.status.families()));
    families.push(group::port_blocks(state));
    families.extend(group::shards(state));
    families.extend(group::collect(state));
    families.extend(nat_log(state));
    let capture = state.capture.load();
    families.push(defined::CAPTURE_COMPLETE.single(capture.error.is_none().into()));
    families.push(defined::CAPTURE_FAILURES.single(capture.failures));
    families.extend(state.device().map(DeviceStats::metrics).unwrap_or_default());
    families.push(mtus(state));
    families.extend(tracking(state));
    families.push(stalls(state));
    families.push(defined::LOG_LINES_LOST.single(logging::lost_lines()));
    families.extend(CertificateValidity::read(&state.certificates).families());
    families.extend(listener::families(&state.connections.all()));
    families
}

/// The workers' packets.
fn packets(state: &GatewayState) -> Vec<Family> {
    let each = |metric: &'static Metric, value: fn(&WorkerCounters) -> u64| by_worker(state, metric, value);
    let drops = DropReason::ALL.into_iter().zip(state.all_drops());
    vec![
        by_direction(state, &defined::PACKETS, |counters, index| counters.packets[index].get()),
        by_direction(state, &defined::BYTES, |counters, index| counters.bytes[index].get()),
        defined::DROPS.by_label(drops.map(|(reason, count)| (reason.name(), count))),
        each(&defined::RECEIVED, |counters| counters.received.get()),
        each(&defined::REPLIES_SENT, |counters| counters.replies_sent.get()),
        each(&defined::CONSUMED, |counters| counters.consumed.get()),
        each(&defined::VIP_CONFLICTS, |counters| counters.vip_conflicts.get()),
        each(&defined::REPLIES_SUPPRESSED, |counters| counters.replies_suppressed.get()),
        each(&defined::HANDOFFS, |counters| counters.handoffs.get()),
        each(&defined::OUT_OF_WINDOW, |counters| counters.out_of_window.get()),
        each(&defined::CHECKSUMS_COMPLETED, |counters| counters.checksums_completed.get()),
        each(&defined::NEIGHBOR_WAITING, |counters| counters.neighbor_waiting.get()),
    ]
}

/// The workers' sessions.
fn sessions(state: &GatewayState) -> Vec<Family> {
    let each = |metric: &'static Metric, value: fn(&WorkerCounters) -> u64| by_worker(state, metric, value);
    let ended = workers(state).flat_map(|(worker, counters)| {
        EndReason::ALL.map(|reason| {
            let labels = vec![("worker", worker.clone()), ("reason", reason.name().to_owned())];
            (labels, counters.sessions_ended[reason as usize].get())
        })
    });
    vec![
        each(&defined::SESSIONS, |counters| counters.sessions.get()),
        defined::SESSIONS_CAPACITY.single(state.session_capacity),
        each(&defined::SESSIONS_RESERVE, |counters| counters.session_reserve.get()),
        each(&defined::SESSION_FAIR_SHARE, |counters| counters.session_fair_share.get()),
        each(&defined::SESSIONS_CREATED, |counters| counters.sessions_created.get()),
        each(&defined::STANDBY_SESSIONS, |counters| counters.standby_sessions.get()),
        each(&defined::STANDBY_REJECTED, |counters| counters.standby_rejected.get()),
        each(&defined::SESSIONS_FAILED_OVER, |counters| counters.sessions_failed_over.get()),
        defined::SESSIONS_ENDED.family(ended.collect()),
    ]
}

/// The policy in force and its source.
fn policy(state: &GatewayState) -> Vec<Family> {
    let policy = state.policy.load();
    let server = state.server.as_ref().map(|server| server.load());
    let connected = server.as_ref().is_none_or(|server| server.connected);
    let cached = server.as_ref().is_none_or(|server| server.cache_error.is_none());
    let age = server.and_then(|server| server.confirmed_at).map(|at| at.elapsed().unwrap_or_default().as_secs());
    vec![
        defined::POLICY_VERSION.by_label([(state.compiled.load().version(), 1)]),
        defined::POLICY_UPDATES.by_label([("applied", policy.updates_applied), ("rejected", policy.updates_rejected)]),
        defined::POLICY_CONNECTED.single(connected.into()),
        defined::POLICY_AGE.family(age.into_iter().map(|seconds| (vec![], seconds)).collect()),
        defined::POLICY_CACHED.single(cached.into()),
        defined::READY.single(state.ready.load(Ordering::Relaxed).into()),
        defined::BUILD.by_label([(env!("CARGO_PKG_VERSION"), 1)]),
    ]
}

/// What the policy in force contains, and its use.
fn policy_objects(policy: &Policy) -> Vec<Family> {
    vec![
        defined::VIP_SESSIONS.by_label(policy.vips().map(|vip| (vip.address.to_string(), vip.ports.pool.sessions()))),
        defined::VIPS.single(policy.live_vips().count() as u64),
        defined::ENDPOINTS.single(policy.endpoint_count() as u64),
        defined::SERVICES.single(policy.services().count() as u64),
        backends(policy),
        by_service(policy, &defined::SERVICE_SESSIONS, |usage| usage.sessions().into()),
        by_service(policy, &defined::SERVICE_SESSIONS_CREATED, BackendUsage::opened),
        refused(policy),
    ]
}

/// Backends by state. A backend of several Services counts once for each.
fn backends(policy: &Policy) -> Family {
    let states = [BackendState::Ready, BackendState::Terminating, BackendState::NotReady];
    let count = |wanted: BackendState| {
        policy.services().flat_map(|service| &service.spec.backends).filter(|it| it.state == wanted).count()
    };
    defined::BACKENDS.by_label(states.map(|state| (backend_state(state), count(state) as u64)))
}

/// A metric by Service: a sum over its backends.
fn by_service(policy: &Policy, metric: &'static Metric, value: fn(&BackendUsage) -> u64) -> Family {
    let services = policy.services().map(|service| {
        let count = service.backend_usage().map(|(_, usage)| value(usage)).sum();
        (service.spec.name.trim_start_matches("Service "), count)
    });
    metric.by_label(services)
}

/// Refused sessions by egress policy, summed over its endpoints.
fn refused(policy: &Policy) -> Family {
    let mut sums: BTreeMap<&str, u64> = policy.egress().map(|egress| (&*egress.spec.name, 0)).collect();
    for (_, endpoint) in policy.endpoints() {
        if let Some(sum) = sums.get_mut(&*policy.egress_of(endpoint).spec.name) {
            *sum += endpoint.usage.rejected();
        }
    }
    defined::REFUSED.by_label(sums)
}

/// Export statistics of the NAT log, if configured.
fn nat_log(state: &GatewayState) -> Vec<Family> {
    let Some(log) = &state.nat_log else { return Vec::new() };
    vec![
        defined::NAT_LOG_RECORDS.by_label([("sent", log.stats.sent()), ("lost", log.stats.lost())]),
        defined::NAT_LOG_UP.single(log.stats.error().is_none().into()),
    ]
}

/// Event-loop stalls of the control thread.
fn stalls(state: &GatewayState) -> Family {
    let ms = |stall: Duration| u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
    let (elapsed, worked) = state.stalls.longest();
    defined::CONTROL_LOOP_STALL.by_label([("elapsed", ms(elapsed)), ("worked", ms(worked))])
}

/// Interfaces whose MTU is too large.
fn mtus(state: &GatewayState) -> Family {
    let network = state.network.load();
    let excess = network.interfaces.iter().map(|it| (it.name.as_str(), u64::from(it.mtu - it.usable_mtu())));
    defined::MTU_EXCESS.by_label(excess)
}

/// State of interfaces, their programs and next hops.
fn tracking(state: &GatewayState) -> [Family; 5] {
    let tracking = state.tracking.load();
    let links = tracking.interfaces.iter().map(|it| (it.name.as_str(), u64::from(it.state == LinkState::Up)));
    let attachments = || tracking.attachments.iter();
    let is_attached = |state| u64::from(state == Attachment::Attached);
    let guards = attachments().filter_map(|it| Some((it.interface.as_str(), it.guard?.detached)));
    let hops = tracking.next_hops.iter().filter(|hop| hop.state != NextHopState::Unknown);
    let next_hops = hops.map(|hop| {
        let link = tracking.interfaces.iter().find(|link| link.id == hop.interface);
        let interface = link.map(|link| link.name.clone()).unwrap_or_default();
        let labels = vec![("interface", interface), ("address", hop.address.to_string())];
        (labels, u64::from(hop.state == NextHopState::Up))
    });
    [
        defined::LINK_UP.by_label(links),
        defined::NEXT_HOP_UP.family(next_hops.collect()),
        defined::XDP_ATTACHED.by_label(attachments().map(|it| (it.interface.as_str(), is_attached(it.xdp.state)))),
        defined::XDP_DETACHED.by_label(attachments().map(|it| (it.interface.as_str(), it.xdp.detached))),
        defined::GUARD_DETACHED.by_label(guards),
    ]
}

/// The counters of each worker, with its number.
fn workers(state: &GatewayState) -> impl Iterator<Item = (String, &WorkerCounters)> {
    state.workers().iter().enumerate().map(|(index, worker)| (index.to_string(), &*worker.counters))
}

/// A metric of each worker.
fn by_worker(state: &GatewayState, metric: &'static Metric, value: fn(&WorkerCounters) -> u64) -> Family {
    metric.by_label(workers(state).map(|(worker, counters)| (worker, value(counters))))
}

/// A metric of each worker by direction.
fn by_direction(state: &GatewayState, metric: &'static Metric, value: fn(&WorkerCounters, usize) -> u64) -> Family {
    let values = workers(state).flat_map(|(worker, counters)| {
        Direction::ALL.map(|direction| {
            let labels = vec![("worker", worker.clone()), ("direction", direction.name().to_owned())];
            (labels, value(counters, direction as usize))
        })
    });
    metric.family(values.collect())
}
