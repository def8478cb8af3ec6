//! What the policy server counts, as metrics.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::complaint::Severity;
use crate::listener;
use crate::metrics::{Family, Kind, Labels, family};

use super::state::State;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// One more.
    pub fn add(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// How many.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What is counted as it happens.
#[derive(Debug, Default)]
pub struct Figures {
    /// Responses sent to gateways.
    pub responses: Count,
    /// Responses that gateways have in force.
    pub accepted: Count,
    /// Responses that gateways have refused.
    pub refused: Count,
    /// Connections refused for want of a good certificate.
    pub tls_refused: Count,
    /// Streams refused since the certificate is of another gateway.
    pub misnamed: Count,
    /// Streams refused since another process has the gateway's name, and lives.
    pub twice: Count,
    /// Streams refused since they claim to be a process whose secret they don't know.
    pub forged: Count,
    /// Orders refused since their sender may not give any.
    pub orders_refused: Count,
    /// Publications.
    pub publications: Count,
    /// Times that the source was read or has told of changes.
    pub source_updates: Count,
    /// Gateways that stopped to serve though nobody wanted that.
    pub expiries: Count,
    /// Beats of processes whose name another one has.
    pub refused_beats: Count,
    /// Microseconds that the last compilation took.
    pub compile_us: AtomicU64,
}

/// All metrics.
pub(super) fn read(state: &Arc<State>) -> Vec<Family> {
    use Kind::{Counter, Gauge, Info, Milliseconds};
    let one = |value: u64| vec![(Labels::new(), value)];
    let labelled = |label: &'static str, values: Vec<(&str, u64)>| -> Vec<(Labels, u64)> {
        values.into_iter().map(|(text, value)| (vec![(label, text.to_owned())], value)).collect()
    };
    let figures = &state.figures;
    let compiled = state.source.compiled.load();
    let published = state.published.borrow().clone().unwrap_or_default();
    let (kept, out): (Vec<_>, Vec<_>) = compiled.faulty.values().partition(|faulty| faulty.has_last_good);
    let complaints = |severity| compiled.complaints.iter().filter(|it| it.severity == severity).count() as u64;
    let deal = &published.deal;
    let (kept, out) = (kept.len() as u64, out.len() as u64);
    let resources = vec![
        ("EgressPolicy", deal.policies.len() as u64),
        ("Vip", deal.vips.len() as u64),
        ("Endpoint", deal.endpoints.len() as u64),
        ("Service", deal.services.len() as u64),
        ("Gateway", deal.peers.len() as u64),
    ];
    let view = state.members.view.borrow().clone();
    let version = |text: &str| vec![(vec![("version", text.to_owned())], 1)];
    let in_step = state.registry.list().values().filter(|it| it.streams > 0 && it.in_force == published.number).count();
    let mut all = vec![
        family("policyd_gateways", "Gateways that are connected", Gauge, one(state.registry.connected() as u64)),
        family("policyd_gateways_in_step", "Connected gateways with the policy in force", Gauge, one(in_step as u64)),
        family("policyd_resources", "Resources that gateways are told", Gauge, labelled("kind", resources)),
        family("policyd_objects", "Objects in force", Gauge, one(compiled.objects as u64)),
        family(
            "policyd_faulty_objects",
            "Objects that are not in force as they are written: an earlier version is, or none",
            Gauge,
            labelled("instead", vec![("last_good", kept), ("nothing", out)]),
        ),
        family(
            "policyd_complaints",
            "What is wrong with manifests now",
            Gauge,
            labelled(
                "severity",
                vec![("error", complaints(Severity::Error)), ("warning", complaints(Severity::Warning))],
            ),
        ),
        family(
            "policyd_source_connected",
            "Whether the source of manifests can be asked",
            Gauge,
            one(state.source.lost.load().is_none().into()),
        ),
        family(
            "policyd_source_updates",
            "Changes that the source has told",
            Counter,
            one(figures.source_updates.get()),
        ),
        family("policyd_publications", "Policies that gateways were told", Counter, one(figures.publications.get())),
        family("policyd_responses", "Responses sent to gateways", Counter, one(figures.responses.get())),
        family(
            "policyd_answers",
            "What gateways said to responses",
            Counter,
            labelled("result", vec![("accepted", figures.accepted.get()), ("refused", figures.refused.get())]),
        ),
        family(
            "policyd_compile_seconds",
            "What the last compilation took",
            Milliseconds,
            one(figures.compile_us.load(Relaxed) / 1000),
        ),
        family("policyd_members", "Gateways that views name", Gauge, one(view.members.len() as u64)),
        family("policyd_members_serving", "Gateways that serve", Gauge, one(view.serving().count() as u64)),
        family("policyd_view", "Number of the view that gateways are told", Gauge, one(view.number)),
        family(
            "policyd_expiries",
            "Gateways that stopped to serve because they were silent, or were started again",
            Counter,
            one(figures.expiries.get()),
        ),
        family(
            "policyd_refused_beats",
            "Beats of processes whose name another living one has",
            Counter,
            one(figures.refused_beats.get()),
        ),
        family("policy_version", "The policy that gateways are told", Info, version(&published.version)),
        family("build", "The running program", Info, version(env!("CARGO_PKG_VERSION"))),
    ];
    all.extend(refused(state));
    all.extend(state.source.families());
    all
}

/// Who was refused, and what clients may take.
fn refused(state: &State) -> Vec<Family> {
    use Kind::{Counter, Gauge};
    let one = |value: u64| vec![(Labels::new(), value)];
    let figures = &state.figures;
    let streams = [("certificate", &figures.misnamed), ("name_in_use", &figures.twice), ("secret", &figures.forged)];
    let streams = streams.map(|(reason, count)| (vec![("reason", reason.to_owned())], count.get()));
    let mut all = vec![
        family(
            "policyd_tls_refused",
            "Connections refused for want of a good certificate",
            Counter,
            one(figures.tls_refused.get()),
        ),
        family(
            "policyd_gateways_refused",
            "Streams of gateways that were refused: the certificate is another gateway's, a living process has the name, or they claim to be a process that they aren't",
            Counter,
            streams.into(),
        ),
        family(
            "policyd_orders_refused",
            "Orders (accept-empty) from those who may not give any",
            Counter,
            one(figures.orders_refused.get()),
        ),
        family(
            "policyd_held_bytes",
            "Bytes that clients make the server hold: requests that come, names, responses without an answer",
            Gauge,
            one(state.budget.held() as u64),
        ),
        family(
            "policyd_memory_refused",
            "Requests and streams that were refused since the server would hold too much for them",
            Counter,
            one(state.budget.refused.get()),
        ),
    ];
    all.extend(listener::families(&state.rooms.each_ref().map(|room| &**room)));
    all
}
