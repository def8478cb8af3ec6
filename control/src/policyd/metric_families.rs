//! Metrics of the policy server: the source of each value.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vipgate_policy::diagnostic::Severity;

use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::metrics::definitions::{BUILD, LOG_LINES_LOST, POLICY_VERSION};
use crate::policyd::kubernetes::KubernetesState;
use crate::policyd::state::ServerState;
use crate::{listener, logging};

/// All metric families of the policy server.
pub(super) fn families(state: &Arc<ServerState>) -> Vec<Family> {
    let stats = &state.stats;
    let compiled = state.source.compiled.load();
    let published = state.published.borrow().clone().unwrap_or_default();
    let (last_good, missing): (Vec<_>, Vec<_>) = compiled.faulty.values().partition(|faulty| faulty.has_last_good);
    let diagnostics = |severity| compiled.diagnostics.iter().filter(|it| it.severity == severity).count() as u64;
    let placement = &published.placement;
    let (last_good, missing) = (last_good.len() as u64, missing.len() as u64);
    let resources = [
        ("EgressPolicy", placement.policies.len() as u64),
        ("Vip", placement.vips.len() as u64),
        ("Endpoint", placement.endpoints.len() as u64),
        ("Service", placement.services.len() as u64),
        ("Gateway", placement.peers.len() as u64),
    ];
    let view = state.membership.view.borrow().clone();
    let membership = state.membership.state.load();
    let (unavailable, limit) = membership.unavailable();
    let in_step = state.registry.list().values().filter(|it| it.streams > 0 && it.in_force == published.number).count();
    let mut all = vec![
        defined::GATEWAYS.single(state.registry.connected() as u64),
        defined::GATEWAYS_IN_STEP.single(in_step as u64),
        defined::NODES.single(state.nodes.connected() as u64),
        defined::NODES_REJECTING.single(state.nodes.rejecting().len() as u64),
        defined::RESOURCES.by_label(resources),
        defined::OBJECTS.single(compiled.objects as u64),
        defined::FAULTY_OBJECTS.by_label([("last_good", last_good), ("nothing", missing)]),
        defined::DIAGNOSTICS
            .by_label([("error", diagnostics(Severity::Error)), ("warning", diagnostics(Severity::Warning))]),
        defined::SOURCE_CONNECTED.single(state.source.unreachable.load().is_none().into()),
        defined::SOURCE_UPDATES.single(stats.source_updates.get()),
        defined::PUBLICATIONS.single(stats.publications.get()),
        defined::RESPONSES.single(stats.responses.get()),
        defined::ACKNOWLEDGEMENTS.by_label([("accepted", stats.acks.get()), ("refused", stats.nacks.get())]),
        defined::SET_ASIDE
            .by_label([("one", state.registry.set_aside_count() as u64), ("all", published.left_out.len() as u64)]),
        defined::COMPILE_TIME.single(stats.compile_us.load(Relaxed) / 1000),
        defined::MEMBERS.single(view.members.len() as u64),
        defined::ACTIVE_MEMBERS.single(view.active_members().count() as u64),
        defined::UNAVAILABLE_MEMBERS.single(unavailable.len() as u64),
        defined::MAX_UNAVAILABLE.family(limit.into_iter().map(|limit| (vec![], limit as u64)).collect()),
        defined::DRAINS_WAITING.single(membership.waiting_drains() as u64),
        defined::DRAINS_REFUSED.single(stats.drains_refused.get()),
        defined::VIEW.single(view.number),
        defined::LEASE_EXPIRIES.single(stats.lease_expiries.get()),
        defined::REJECTED_HEARTBEATS.single(stats.rejected_heartbeats.get()),
        POLICY_VERSION.by_label([(&*published.version, 1)]),
        BUILD.by_label([(env!("CARGO_PKG_VERSION"), 1)]),
        LOG_LINES_LOST.single(logging::lost_lines()),
    ];
    all.extend(rejection_families(state));
    all.extend(state.source.families());
    all.extend(state.certificates.iter().flat_map(|certificates| certificates.validity().families()));
    all.extend(state.kubernetes.iter().flat_map(KubernetesState::families));
    all.extend(state.cloud.families());
    all
}

/// Metrics of rejected clients, of client memory and of connections.
fn rejection_families(state: &ServerState) -> Vec<Family> {
    let stats = &state.stats;
    let streams = [
        ("certificate", &stats.certificate_mismatches),
        ("name_in_use", &stats.name_conflicts),
        ("secret", &stats.invalid_secrets),
    ];
    let mut all = vec![
        defined::TLS_REJECTED.single(stats.tls_rejected.get()),
        defined::STREAMS_REJECTED.by_label(streams.map(|(reason, count)| (reason, count.get()))),
        defined::COMMANDS_DENIED.single(stats.commands_denied.get()),
        defined::HELD_BYTES.single(state.budget.held_bytes() as u64),
        defined::MEMORY_REJECTED.single(state.budget.refused.get()),
    ];
    all.extend(listener::families(&state.listeners.each_ref().map(|room| &**room)));
    all
}
