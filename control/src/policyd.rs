//! `vipgate policyd`: the policy server. Compiles manifests into resources and sends them to gateways (delta xDS).
//!
//! ```text
//!   policy source -> store -> compile -> publication -> one delta xDS stream per gateway
//!   (manifests)      (invalid objects     (resources,     (subscriptions, ACKs and NACKs)
//!                     are left out)        encoded once)
//! ```

mod budget;
mod cloud;
pub mod codec;
mod events;
mod identity;
pub mod ipam;
mod kubernetes;
mod leader;
pub mod listen;
pub mod membership;
mod meter;
pub mod metric_families;
mod node_agents;
mod node_events;
mod object_state;
mod object_status;
mod pod_token;
mod policy_summary;
mod publisher;
pub mod registry;
pub mod service;
pub mod set_aside;
pub mod state;
pub mod stats;
mod status;
pub mod stream;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use vipgate_common::{Task, Tasks};
use vipgate_policy::compiler::{Cluster, Tenancy};
use vipgate_policy::manifest::UnclassedServices;

use self::budget::Budget;
use self::cloud::CloudState;
use self::identity::RejectionLog;
use self::kubernetes::KubernetesState;
use self::leader::{EtcdLease, Leadership};
use self::listen::Certificates;
use self::meter::MeterLayer;
use self::pod_token::{PodTokenLayer, TokenVerifier};
use self::publisher::Publisher;
use self::service::{AggregatedDiscoveryServiceServer, DiscoveryService};
use self::state::{AcceptEmptyCommand, ServerState};
use crate::command_error::CommandError;
use crate::config::{PodWatch, PolicydConfig, PolicydLimits, PolicydSource};
use crate::listener::{self, ConnectionLimiter, Limits, limit_by_descriptors, raise_descriptor_limit};
use crate::metrics::NotReady;
use crate::source::address_record::RecordStorage;
use crate::source::ingest::{SourceIngester, SourceStatus};
use crate::source::kubernetes::watch_cluster;
use crate::source::store::{ManifestStore, RecordMode};
use crate::source::{SourceEvent, etcd, files};
use crate::xds::proto::policy_status_server::PolicyStatusServer;
use crate::xds::publication::Publication;
use crate::xds::tls::ClientCertificates;
use crate::{blocking_threads, logging, metrics, privileges, systemd};

/// Capacity of the queue of source events; when it is full, the source waits.
const EVENT_QUEUE: usize = 256;
/// Maximum length of a discovery request, bytes: a reconnecting gateway lists the version of every resource it holds.
const MAX_REQUEST_BYTES: usize = 32 << 20;
/// Maximum length of a status request, bytes.
const MAX_STATUS_REQUEST_BYTES: usize = 1 << 20;
/// Maximum concurrent HTTP/2 streams of a connection; a gateway opens one on each of its connections.
const MAX_STREAMS_PER_CONNECTION: u32 = 16;
/// Maximum size of a request's headers, bytes.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// HTTP/2 flow-control window of a stream and of a connection, bytes.
const FLOW_CONTROL_WINDOW: u32 = 256 << 10;
/// Interval of HTTP/2 keepalive pings, and the timeout of their acknowledgement.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// How long open streams, and giving back the Lease, may take at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs a policy server until SIGTERM or SIGINT.
///
/// # Errors
/// When its configuration is invalid or a resource it needs is unavailable.
pub fn run(path: &Path) -> Result<(), CommandError> {
    let config = PolicydConfig::load(path).map_err(CommandError::input)?;
    logging::start(config.log);
    raise_descriptor_limit();
    privileges::restrict_server(config.privileges);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("policyd")
        .thread_keep_alive(blocking_threads::KEEP_ALIVE)
        .on_thread_start(privileges::drop_capabilities)
        .build()
        .map_err(|error| CommandError::runtime(error).context("cannot start threads"))?;
    blocking_threads::start(runtime.handle());
    let outcome = runtime.block_on(run_server(config));
    // Tasks that are left hold no state worth saving.
    runtime.shutdown_background();
    outcome
}

/// The ingester of the source with this name, without manifests; `has_ipam`: addresses are managed.
fn ingester(config: &PolicydConfig, source: String, has_ipam: bool) -> Result<SourceIngester, CommandError> {
    let cluster = Cluster::from_config(&config.pod_cidrs, &config.service_cidrs, config.uncovered);
    let node_agents = config.node_agents.as_ref().map(node_agents::options).transpose()?;
    let store = ManifestStore::new(config.allow_empty).with_cluster(cluster).with_tenancy(config.tenancy);
    let store = store.with_namespace_share(config.namespace_share);
    let store = store.with_node_agents(node_agents).with_unclassed(unclassed_services(config)).with_ipam(has_ipam);
    let (mode, storage) = address_record(config)?;
    Ok(SourceIngester::new(source, store.with_record(mode)).with_storage(storage))
}

/// Where the record of addresses of pools is.
fn address_record(config: &PolicydConfig) -> Result<(RecordMode, Option<RecordStorage>), CommandError> {
    let storage = match &config.source {
        PolicydSource::Kubernetes(_) => return Ok((RecordMode::OfPools, None)),
        PolicydSource::Etcd(etcd) => RecordStorage::etcd(etcd),
        PolicydSource::Files(_) => {
            let opened = RecordStorage::file(config.state.join("addresses"));
            opened.map_err(|error| CommandError::input(error).context("state"))?
        }
    };
    Ok((RecordMode::Kept, Some(storage)))
}

/// What identifies clients: certificates, and tokens of gateways and agents of nodes in pods.
type Identification = (Option<Arc<TokenVerifier>>, Option<Arc<Certificates>>);

fn identification(config: &PolicydConfig) -> Result<Identification, CommandError> {
    let verifier = TokenVerifier::configured(config);
    let presence = if verifier.is_some() { ClientCertificates::Optional } else { ClientCertificates::Required };
    let certificates = config.tls.clone().map(|files| Certificates::read(files, presence)).transpose();
    let certificates = certificates.map_err(|error| CommandError::input(error).context("tls"))?;
    Ok((verifier, certificates.map(Arc::new)))
}

async fn run_server(config: PolicydConfig) -> Result<(), CommandError> {
    let (event_sender, events) = mpsc::channel(EVENT_QUEUE);
    let kubernetes = KubernetesState::of(&config.source);
    let (source, source_task) = start_source(&config, event_sender, kubernetes.as_ref());
    let intake = ingester(&config, source, kubernetes.is_some())?;
    let (verifier, certificates) = identification(&config)?;
    let listener = listen::bind(config.listen)?;
    let metrics_listener = metrics::bind(config.metrics.listen).await.map_err(CommandError::runtime)?;
    privileges::drop_capabilities();
    let (publish, published) = watch::channel(None);
    let (command_sender, commands) = mpsc::channel(1);
    let listen = config.listen.to_string();
    let tasks = Tasks::default();
    let leadership = leadership(&config.source, kubernetes.as_ref(), &tasks);
    let (status, accept_empty) = (intake.status(), command_sender);
    let state = server_state(config, status, (kubernetes, leadership), certificates, accept_empty, published);
    let signal_error = |error| CommandError::runtime(error).context("cannot install signal handlers");
    let mut terminate = signal(SignalKind::terminate()).map_err(signal_error)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(signal_error)?;

    serve_gateways(&state, listener, verifier, &tasks);
    let [_, metrics_connections] = state.listeners.clone();
    tasks.spawn("metrics", metrics::serve(monitored(&state), metrics_listener, metrics_connections, tasks.clone()));
    if let Some(kubernetes) = &state.kubernetes {
        let (registry, nodes) = (state.registry.clone(), state.nodes.clone());
        kubernetes.start(registry, nodes, state.membership.clone(), state.cloud.clone(), &tasks);
    }
    start_clouds(&state, &tasks);
    let publisher = Publisher::new(state, intake, publish, listen);
    let mut publisher = Task::spawn(publisher.run(publisher::Inputs { events, commands }));

    let outcome = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        () = &mut publisher => Err(CommandError::runtime("the policy source task has ended")),
    };
    tracing::info!(event = "stopping", "stopping");
    systemd::stopping();
    // The publisher ends with the source, and streams with the publisher.
    drop(source_task);
    // Without a response, the Lease ends by itself.
    tasks.stop(SHUTDOWN_TIMEOUT).await;
    tracing::info!(event = "stopped", "stopped");
    outcome
}

/// Until when this server leads, if it shares its source with others: then it takes part in their election.
fn leadership(
    source: &PolicydSource,
    kubernetes: Option<&KubernetesState>,
    tasks: &Tasks,
) -> Option<watch::Receiver<Leadership>> {
    let PolicydSource::Etcd(etcd) = source else { return kubernetes.map(KubernetesState::leadership) };
    let (sender, leadership) = watch::channel(None);
    // Writes name what they follow from, so none has to end before another server leads.
    tasks.spawn("leader election", leader::run(EtcdLease::new(etcd), sender, None, tasks.clone()));
    Some(leadership)
}

/// The shared state of a server, whose membership service runs from here on.
fn server_state(
    config: PolicydConfig,
    source: Arc<SourceStatus>,
    (kubernetes, leadership): (Option<KubernetesState>, Option<watch::Receiver<Leadership>>),
    certificates: Option<Arc<Certificates>>,
    accept_empty: mpsc::Sender<AcceptEmptyCommand>,
    published: watch::Receiver<Option<Arc<Publication>>>,
) -> Arc<ServerState> {
    let stats = Arc::default();
    let membership = membership::open(&config, leadership, published.clone(), Arc::clone(&stats));
    Arc::new(ServerState {
        source,
        accept_empty,
        published,
        registry: Arc::default(),
        nodes: Arc::default(),
        membership,
        kubernetes,
        cloud: Arc::new(CloudState::new(config.cloud)),
        certificates,
        stats,
        listeners: [
            ConnectionLimiter::new("grpc", connection_limits(config.limits)),
            ConnectionLimiter::new("metrics", listener::METRICS_LIMITS),
        ],
        budget: Arc::new(Budget::new(config.limits.bytes_per_address, config.limits.bytes)),
        admins: config.admins,
    })
}

/// Starts what reconciles the addresses of pools with their providers.
fn start_clouds(state: &ServerState, tasks: &Tasks) {
    let watches = cloud::Watches {
        published: state.published.clone(),
        view: state.membership.view.clone(),
        leadership: state.kubernetes.as_ref().map(KubernetesState::leadership),
    };
    tasks.spawn("clouds", cloud::run(state.cloud.clone(), watches, tasks.clone()));
}

/// Serves discovery, membership and status to gateways and commands until the stop signal of `tasks`.
fn serve_gateways(
    state: &Arc<ServerState>,
    listener: TcpListener,
    verifier: Option<Arc<TokenVerifier>>,
    tasks: &Tasks,
) {
    let rejections = Arc::new(RejectionLog::default());
    let discovery = DiscoveryService {
        published: state.published.clone(),
        view: state.membership.view.clone(),
        registry: state.registry.clone(),
        nodes: state.nodes.clone(),
        stats: state.stats.clone(),
        rejections: rejections.clone(),
        budget: state.budget.clone(),
    };
    let router = Server::builder()
        .layer(MeterLayer(state.budget.clone()))
        .layer(PodTokenLayer { verifier, stats: state.stats.clone(), rejections: rejections.clone() })
        .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(FLOW_CONTROL_WINDOW)
        .initial_connection_window_size(FLOW_CONTROL_WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_INTERVAL))
        .add_service(AggregatedDiscoveryServiceServer::new(discovery).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(membership::server(state.membership.clone(), state.stats.clone(), rejections.clone()))
        .add_service(
            PolicyStatusServer::new(status::Service { state: state.clone(), rejections: rejections.clone() })
                .max_decoding_message_size(MAX_STATUS_REQUEST_BYTES),
        );
    let signal = tasks.clone();
    let shutdown = async move { signal.stopped().await };
    let [connections, _] = state.listeners.clone();
    match state.certificates.clone() {
        None => {
            let incoming = ReceiverStream::new(listen::accept_plain(listener, connections, tasks));
            tasks.spawn("gRPC server", router.serve_with_incoming_shutdown(incoming, shutdown));
        }
        Some(certificates) => {
            tasks.spawn_until_stopped("certificates", certificates.clone().watch());
            let stats = state.stats.clone();
            let incoming = listen::accept_tls(listener, connections, certificates, stats, rejections, tasks);
            let incoming = ReceiverStream::new(incoming);
            tasks.spawn("gRPC server", router.serve_with_incoming_shutdown(incoming, shutdown));
        }
    }
}

/// The configured connection limits, lowered to what the limit of open files allows.
fn connection_limits(config: PolicydLimits) -> Limits {
    let limits = limits_within(config, limit_by_descriptors(config.connections));
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

/// The configured limits if that many connections are affordable; else fewer, of which one address gets at most half.
fn limits_within(config: PolicydLimits, affordable: usize) -> Limits {
    let per_address = config.connections_per_address;
    if affordable >= config.connections {
        return Limits { connections: config.connections, per_address };
    }
    Limits { connections: affordable, per_address: per_address.min(affordable / 2).max(1) }
}

fn monitored(state: &Arc<ServerState>) -> metrics::Monitored {
    let (for_metrics, for_readiness) = (state.clone(), state.clone());
    metrics::Monitored {
        families: Arc::new(move || metric_families::families(&for_metrics)),
        ready: Arc::new(move || {
            let is_ready = for_readiness.published.borrow().is_some();
            if is_ready { Ok(()) } else { Err(NotReady::NoPolicy(for_readiness.source.health.load().waiting_reason())) }
        }),
    }
}

/// What LoadBalancer Services without a class are: in files and etcd they are vipgate's.
fn unclassed_services(config: &PolicydConfig) -> UnclassedServices {
    match &config.source {
        PolicydSource::Kubernetes(source) => source.unclassed(),
        PolicydSource::Files(_) | PolicydSource::Etcd(_) => UnclassedServices::Serve,
    }
}

/// Starts the task that watches the policy source; returns its display name and the task.
fn start_source(
    config: &PolicydConfig,
    events: mpsc::Sender<SourceEvent>,
    state: Option<&KubernetesState>,
) -> (String, Task) {
    match &config.source {
        PolicydSource::Files(paths) => {
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            (format!("files {}", names.join(", ")), Task::spawn(files::watch_paths(paths.clone(), events)))
        }
        PolicydSource::Etcd(etcd) => {
            let name = format!("etcd {} below {}", etcd.endpoints.join(", "), etcd.prefix);
            (name, Task::spawn(etcd::watch_prefix(etcd.clone(), events)))
        }
        PolicydSource::Kubernetes(source) => {
            let name = match &source.kubeconfig {
                Some(path) => format!("the Kubernetes API of {}", path.display()),
                None => "the Kubernetes API".to_owned(),
            };
            let observed = state.map(|state| state.objects.observed.clone()).unwrap_or_default();
            let mut source = source.clone();
            // Agents are sent all pods, covered or not; and whose an address of a slice is, only pods say.
            if config.node_agents.is_some() || config.tenancy == Tenancy::Strict {
                source.pods = PodWatch::Always;
            }
            (name, Task::spawn(watch_cluster(source, events, observed)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_few_descriptors_an_address_gets_at_most_half_of_the_connections() {
        let config = PolicydLimits { connections: 8192, connections_per_address: 1024, ..PolicydLimits::default() };
        let limits = |affordable| {
            let Limits { connections, per_address } = limits_within(config, affordable);
            (connections, per_address)
        };
        assert_eq!(limits(8192), (8192, 1024));
        assert_eq!(limits(8191), (8191, 1024));
        assert_eq!(limits(768), (768, 384));
        assert_eq!(limits(1), (1, 1));
        // With enough descriptors the configured limit per address applies unchanged.
        let config = PolicydLimits { connections: 100, connections_per_address: 100, ..config };
        assert_eq!(limits_within(config, 100), Limits { connections: 100, per_address: 100 });
    }
}
