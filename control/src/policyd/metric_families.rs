//! Metric definitions of the policy server: names, labels, help, and the source of each value.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vipgate_policy::diagnostic::Severity;

use crate::listener;
use crate::metric::{Family, Kind, Labels, family};
use crate::policyd::publication::Publication;
use crate::policyd::state::ServerState;

/// All metric families of the policy server.
pub(super) fn families(state: &Arc<ServerState>) -> Vec<Family> {
    let published = state.published.borrow().clone().unwrap_or_default();
    [
        publication_families(state, &published),
        source_families(state),
        membership_families(state),
        vec![
            family("policy_version", "The published policy", Kind::Info, version(&published.version)),
            family("build", "The running program", Kind::Info, version(env!("CARGO_PKG_VERSION"))),
        ],
        rejection_families(state),
        state.source.families(),
    ]
    .concat()
}

/// A value without labels.
fn one(value: u64) -> Vec<(Labels, u64)> {
    vec![(Labels::new(), value)]
}

/// Values by one label.
fn labelled(label: &'static str, values: &[(&str, u64)]) -> Vec<(Labels, u64)> {
    values.iter().map(|(text, value)| (vec![(label, (*text).to_owned())], *value)).collect()
}

fn version(text: &str) -> Vec<(Labels, u64)> {
    labelled("version", &[(text, 1)])
}

/// Metrics of the published policy, and of the gateways that receive it.
fn publication_families(state: &ServerState, published: &Publication) -> Vec<Family> {
    use Kind::{Counter, Gauge, Milliseconds};
    let stats = &state.stats;
    let placement = &published.placement;
    let resources = [
        ("EgressPolicy", placement.policies.len() as u64),
        ("Vip", placement.vips.len() as u64),
        ("Endpoint", placement.endpoints.len() as u64),
        ("Service", placement.services.len() as u64),
        ("Gateway", placement.peers.len() as u64),
    ];
    let in_step = state.registry.list().values().filter(|it| it.streams > 0 && it.in_force == published.number).count();
    vec![
        family("policyd_gateways", "Connected gateways", Gauge, one(state.registry.connected() as u64)),
        family(
            "policyd_gateways_in_step",
            "Connected gateways that have acknowledged the current policy",
            Gauge,
            one(in_step as u64),
        ),
        family("policyd_resources", "Resources in the published policy", Gauge, labelled("kind", &resources)),
        family("policyd_publications", "Published policy versions", Counter, one(stats.publications.get())),
        family("policyd_responses", "Responses sent to gateways", Counter, one(stats.responses.get())),
        family(
            "policyd_answers",
            "Responses that gateways accepted (ACK) or refused (NACK)",
            Counter,
            labelled("result", &[("accepted", stats.acks.get()), ("refused", stats.nacks.get())]),
        ),
        family(
            "policyd_compile_seconds",
            "Duration of the last compilation",
            Milliseconds,
            one(stats.compile_us.load(Relaxed) / 1000),
        ),
    ]
}

/// Metrics of the policy source and of its manifests.
fn source_families(state: &ServerState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let compiled = state.source.compiled.load();
    let (last_good, missing): (Vec<_>, Vec<_>) = compiled.faulty.values().partition(|faulty| faulty.has_last_good);
    let (last_good, missing) = (last_good.len() as u64, missing.len() as u64);
    let diagnostics = |severity| compiled.diagnostics.iter().filter(|it| it.severity == severity).count() as u64;
    let by_severity = [("error", diagnostics(Severity::Error)), ("warning", diagnostics(Severity::Warning))];
    vec![
        family("policyd_objects", "Objects in force", Gauge, one(compiled.objects as u64)),
        family(
            "policyd_faulty_objects",
            "Invalid objects: an earlier version is in force instead, or nothing",
            Gauge,
            labelled("instead", &[("last_good", last_good), ("nothing", missing)]),
        ),
        family("policyd_complaints", "Current diagnostics of manifests", Gauge, labelled("severity", &by_severity)),
        family(
            "policyd_source_connected",
            "Whether the policy source is reachable",
            Gauge,
            one(state.source.unreachable.load().is_none().into()),
        ),
        family(
            "policyd_source_updates",
            "Updates received from the policy source",
            Counter,
            one(state.stats.source_updates.get()),
        ),
    ]
}

/// Metrics of membership.
fn membership_families(state: &ServerState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let view = state.membership.view.borrow().clone();
    vec![
        family("policyd_members", "Gateways in the membership view", Gauge, one(view.members.len() as u64)),
        family("policyd_members_serving", "Active gateways", Gauge, one(view.active_members().count() as u64)),
        family("policyd_view", "Number of the current membership view", Gauge, one(view.number)),
        family(
            "policyd_expiries",
            "Gateways that became inactive because their heartbeats timed out or their process was replaced",
            Counter,
            one(state.stats.lease_expiries.get()),
        ),
        family(
            "policyd_refused_beats",
            "Heartbeats rejected because another live process has the gateway's name",
            Counter,
            one(state.stats.rejected_heartbeats.get()),
        ),
    ]
}

/// Metrics of rejected clients, of client memory and of connections.
fn rejection_families(state: &ServerState) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let stats = &state.stats;
    let streams = [
        ("certificate", &stats.certificate_mismatches),
        ("name_in_use", &stats.name_conflicts),
        ("secret", &stats.invalid_secrets),
    ];
    let streams = streams.map(|(reason, count)| (vec![("reason", reason.to_owned())], count.get()));
    let mut all = vec![
        family(
            "policyd_tls_refused",
            "Connections rejected for a missing or invalid client certificate",
            Counter,
            one(stats.tls_rejected.get()),
        ),
        family(
            "policyd_gateways_refused",
            "Rejected streams of gateways: the certificate is another gateway's, a live process has the name, or \
             they claim a process without its secret",
            Counter,
            streams.into(),
        ),
        family(
            "policyd_orders_refused",
            "Commands (accept-empty) denied to unauthorized clients",
            Counter,
            one(stats.commands_denied.get()),
        ),
        family(
            "policyd_held_bytes",
            "Bytes held for clients: incoming requests, subscriptions, unacknowledged responses",
            Gauge,
            one(state.budget.held_bytes() as u64),
        ),
        family(
            "policyd_memory_refused",
            "Requests and streams rejected by the memory limits",
            Counter,
            one(state.budget.refused.get()),
        ),
    ];
    all.extend(listener::families(&state.listeners.each_ref().map(|room| &**room)));
    all
}
