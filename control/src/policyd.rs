//! `vipgate policyd`: compiles what people write into what gateways need, and serves it to them.
//!
//! ```text
//!   source -> store -> compile -> publication -> a stream for each gateway
//!   (what stands where)  (what is broken stays out)  (encoded once)   (what it has, what it refuses)
//! ```

mod budget;
pub mod codec;
pub mod figures;
mod identity;
pub mod listen;
pub mod members;
mod meter;
pub mod publication;
pub mod registry;
pub mod service;
pub mod state;
mod status;
pub mod stream;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use self::budget::Budget;
use self::identity::Refusals;
use self::listen::Certificates;
use self::meter::Meter;
use self::publication::Publication;
use self::service::{AggregatedDiscoveryServiceServer, Discovery};
use self::state::{AcceptEmpty, State};
use crate::config::{PolicydConfig, PolicydLimits, PolicydSource};
use crate::failure::Failure;
use crate::listener::{Limits, Room, affordable, raise_descriptors};
use crate::policy::Cluster;
use crate::source::intake::{Intake, finished};
use crate::source::store::{Accepted, Store};
use crate::source::{Event, etcd, files};
use crate::xds::proto::policy_status_server::PolicyStatusServer;
use crate::{logging, metrics, privileges, systemd};

/// Changes of the source that wait to be compiled; then the source waits.
const EVENTS: usize = 256;
/// The longest request, bytes: a gateway that comes back says the version of every resource that it has.
const LONGEST: usize = 32 << 20;
/// The longest request for the status, bytes.
const LONGEST_QUESTION: usize = 1 << 20;
/// Streams of one connection: a gateway has one on each of its connections.
const STREAMS: u32 = 16;
/// Headers of a request, bytes.
const HEADERS: u32 = 16 << 10;
/// Bytes of a stream, and of a connection, that clients may send ahead of what is taken.
const WINDOW: u32 = 256 << 10;
/// How often a silent connection is asked whether it lives, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// How often the log says that there is still no policy.
const REMINDER: Duration = Duration::from_secs(30);
/// Time for streams to end when the server stops.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runs a policy server until it is told to stop.
///
/// # Errors
/// When its configuration is wrong, or something it needs can't be had.
pub fn run(path: &Path) -> Result<(), Failure> {
    let config = PolicydConfig::load(path).map_err(Failure::usage)?;
    logging::start(config.log);
    raise_descriptors();
    privileges::begin_server(config.privileges);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("policyd")
        .on_thread_start(privileges::drop_capabilities)
        .build()
        .map_err(|error| Failure::runtime(format_args!("cannot start threads: {error}")))?;
    let outcome = runtime.block_on(serve(config));
    // What still runs has nothing to lose.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: PolicydConfig) -> Result<(), Failure> {
    let (events_in, events) = mpsc::channel(EVENTS);
    let (source, following) = follow(&config.source, events_in)?;
    let certificates = match config.tls {
        None => None,
        Some(files) => {
            let read = Certificates::read(files).map_err(|error| Failure::usage(format_args!("tls: {error}")))?;
            Some(Arc::new(read))
        }
    };
    let listener = listen::bind(config.listen)?;
    let metrics_listener = metrics::bind(config.metrics.listen).await?;
    privileges::drop_capabilities();
    let (publish, published) = watch::channel(None);
    let (ordered, orders) = mpsc::channel(1);
    let cluster = Cluster::of(&config.pod_cidrs, &config.service_cidrs, config.uncovered);
    let intake = Intake::new(source, Store::new(config.allow_empty).in_cluster(cluster));
    let figures = Arc::default();
    let members = members::open(&config.source, config.leases, published.clone(), Arc::clone(&figures));
    let refusals = Arc::new(Refusals::default());
    let (room, monitors) = (Room::new("grpc", limits(config.limits)), metrics::room());
    let budget = Arc::new(Budget::new(config.limits.bytes_per_address, config.limits.bytes));
    let state = Arc::new(State {
        source: intake.status(),
        accept_empty: ordered,
        published: published.clone(),
        registry: Arc::default(),
        members: members.clone(),
        figures,
        rooms: [room.clone(), monitors.clone()],
        budget: budget.clone(),
        admins: config.admins,
    });
    let no_signals = |error| Failure::runtime(format_args!("cannot listen to signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let (stop, stopped) = watch::channel(false);

    let discovery = Discovery {
        published,
        registry: state.registry.clone(),
        figures: state.figures.clone(),
        refusals: refusals.clone(),
        budget: budget.clone(),
    };
    let router = Server::builder()
        .layer(Meter(budget))
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(HEADERS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .add_service(AggregatedDiscoveryServiceServer::new(discovery).max_decoding_message_size(LONGEST))
        .add_service(members::server(members, state.figures.clone(), refusals.clone()))
        .add_service(
            PolicyStatusServer::new(status::Service { state: state.clone(), refusals: refusals.clone() })
                .max_decoding_message_size(LONGEST_QUESTION),
        );
    let mut end = stopped.clone();
    let ended = async move {
        // An error is as good: whoever would say it is gone.
        let _ = end.wait_for(|stop| *stop).await;
    };
    let gateways = match certificates {
        None => {
            let incoming = ReceiverStream::new(listen::plain(listener, room));
            tokio::spawn(router.serve_with_incoming_shutdown(incoming, ended))
        }
        Some(certificates) => {
            tokio::spawn(certificates.clone().follow());
            let incoming = listen::secure(listener, room, certificates, (state.figures.clone(), refusals));
            tokio::spawn(router.serve_with_incoming_shutdown(ReceiverStream::new(incoming), ended))
        }
    };
    let monitoring = tokio::spawn(metrics::serve(monitored(&state), metrics_listener, monitors, stopped));
    let compiling = tokio::spawn(compile(state.clone(), intake, (events, orders), publish, config.listen.to_string()));

    let end = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        outcome = compiling => Err(match outcome {
            Ok(()) => Failure::runtime("nobody follows the source any more"),
            Err(error) => Failure::runtime(format_args!("the compiler has failed: {error}")),
        }),
    };
    tracing::info!(event = "stopping", "stopping");
    systemd::stopping();
    following.abort();
    let _ = stop.send(true);
    for server in [
        tokio::time::timeout(FAREWELL, gateways).await.is_ok(),
        tokio::time::timeout(FAREWELL, monitoring).await.is_ok(),
    ] {
        if !server {
            tracing::debug!("a connection was cut");
        }
    }
    tracing::info!(event = "stopped", "stopped");
    end
}

/// What is configured, as far as there are descriptors.
fn limits(config: PolicydLimits) -> Limits {
    let limits = within(config, affordable(config.connections));
    if limits.connections < config.connections {
        tracing::warn!(
            event = "connections_limited",
            connections = limits.connections,
            connections_per_address = limits.per_address,
            "fewer connections than configured: the system allows too few open files (`LimitNOFILE`, `ulimit -n`)"
        );
    }
    limits
}

/// What is configured, where there can be so many connections: where those are fewer, one address has half of them at most.
fn within(config: PolicydLimits, affordable: usize) -> Limits {
    let per_address = config.connections_per_address;
    if affordable >= config.connections {
        return Limits { connections: config.connections, per_address };
    }
    Limits { connections: affordable, per_address: per_address.min(affordable / 2).max(1) }
}

fn monitored(state: &Arc<State>) -> metrics::Monitored {
    let (read, asked) = (state.clone(), state.clone());
    metrics::Monitored {
        families: Arc::new(move || figures::read(&read)),
        ready: Arc::new(move || {
            let is_ready = asked.published.borrow().is_some();
            if is_ready { Ok(()) } else { Err(asked.source.health.load().waits_for().unwrap_or_default()) }
        }),
    }
}

/// Begins to follow the source; its name for people.
fn follow(source: &PolicydSource, events: mpsc::Sender<Event>) -> Result<(String, JoinHandle<()>), Failure> {
    match source {
        PolicydSource::Files(paths) => {
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            Ok((format!("files {}", names.join(", ")), tokio::spawn(files::follow(paths.clone(), events))))
        }
        PolicydSource::Etcd(etcd) => {
            let name = format!("etcd {} below {}", etcd.endpoints.join(", "), etcd.prefix);
            Ok((name, tokio::spawn(etcd::follow(etcd.clone(), events))))
        }
        PolicydSource::Kubernetes(_) => Err(Failure::usage(
            "source.kubernetes: this version reads manifests from files or etcd; use source.files or source.etcd",
        )),
    }
}

/// Takes in what the source says, and publishes what it comes to, for as long as the source says anything.
async fn compile(
    state: Arc<State>,
    mut intake: Intake,
    (mut events, mut orders): (mpsc::Receiver<Event>, mpsc::Receiver<AcceptEmpty>),
    publish: watch::Sender<Option<Arc<Publication>>>,
    listen: String,
) {
    let mut last = Arc::new(Publication::default());
    let mut batch = Vec::new();
    let mut reminder = tokio::time::interval(REMINDER);
    reminder.tick().await;
    loop {
        let mut took = Duration::ZERO;
        let mut answer: Option<oneshot::Sender<_>> = None;
        let mut outcome = Ok(Accepted::default());
        tokio::select! {
            count = events.recv_many(&mut batch, EVENTS) => {
                if count == 0 {
                    return;
                }
                for _ in batch.iter().filter(|event| matches!(event, Event::Update(_))) {
                    state.figures.source_updates.add();
                }
                let Some(compiled) = intake.take(batch.drain(..)).await else { continue };
                took = compiled;
            }
            Some(order) = orders.recv() => {
                outcome = intake.accept_empty().await;
                answer = Some(order);
            }
            _ = reminder.tick(), if last.number == 0 => {
                let why = state.source.health.load().waits_for().unwrap_or_default();
                tracing::warn!(event = "no_policy", reason = why, "still no policy: nothing is published");
                systemd::waiting(&format!("no policy yet: {why}"), 2 * REMINDER);
                continue;
            }
        }
        if let Some(deal) = state.source.compiled.load().deal.clone() {
            let (before, begun) = (last.clone(), Instant::now());
            let next = finished(tokio::task::spawn_blocking(move || before.next(deal)).await);
            took += begun.elapsed();
            state.figures.compile_us.store(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
            if let Some(next) = next {
                let is_first = last.number == 0;
                last = Arc::new(next);
                announce(&state, &last, took);
                let _ = publish.send(Some(last.clone()));
                if is_first {
                    tracing::info!(event = "ready", listen, source = state.source.name, "ready");
                    systemd::ready();
                }
            }
        }
        // The one who asked may have gone; what is done is done.
        let _ = answer.map(|answer| answer.send(outcome));
    }
}

/// Counts and logs a publication.
fn announce(state: &State, publication: &Publication, took: Duration) {
    state.figures.publications.add();
    tracing::info!(
        event = "policy",
        version = publication.version,
        vips = publication.deal.vips.len(),
        endpoints = publication.deal.endpoints.len(),
        changed = publication.difference.len() - 1,
        ms = took.as_millis() as u64,
        "policy published"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_are_few_descriptors_an_address_has_half_of_the_connections() {
        let config = PolicydLimits { connections: 8192, connections_per_address: 1024, ..PolicydLimits::default() };
        let limits = |affordable| {
            let Limits { connections, per_address } = within(config, affordable);
            (connections, per_address)
        };
        assert_eq!(limits(8192), (8192, 1024));
        assert_eq!(limits(8191), (8191, 1024));
        assert_eq!(limits(768), (768, 384));
        assert_eq!(limits(1), (1, 1));
        // What is configured is meant so.
        let config = PolicydLimits { connections: 100, connections_per_address: 100, ..config };
        assert_eq!(within(config, 100), Limits { connections: 100, per_address: 100 });
    }
}
