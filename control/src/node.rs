//! `vipgate node`: the agent of a node. Follows the node's part of the policy and the membership view, and programs the
//! node's kernel ([`vipgate_node`]) so that pods' packets reach their gateway.
//!
//! ```text
//!   policy server ==xDS==> client -> resources --+--> cache
//!                                                +--> agent -> nftables, routes, tunnels
//! ```

pub(crate) mod admin;
mod cache;
pub(crate) mod decode;
#[cfg(test)]
pub(crate) mod fixtures;
mod indices;
mod mark_users;
mod metric_families;
mod resources;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use vipgate_common::{Task, Tasks};
use vipgate_node::agent::{Agent, AgentHandle, Config as AgentConfig, Sources, View};
use vipgate_node::indices::Indices;
use vipgate_node::kernel::Kernel;
use vipgate_node::mark_users::MarkUsers;
use vipgate_node::marks::{MarkMask, RoutingNumbers};
use vipgate_node::nft::script::replacement;
use vipgate_node::plan::{Inputs, NodePlan, Settings};
use vipgate_node::policy::{Cluster, NodePolicy};

use self::cache::{Cached, Decoded};
use self::resources::NodeResources;
use crate::command_error::CommandError;
use crate::config::NodeConfig;
use crate::listener::ConnectionLimiter;
use crate::metrics::{Monitored, NotReady};
use crate::xds::client::{DeltaClient, Identity, ServerStatus};
use crate::{blocking_threads, listener, logging, metrics, systemd};

/// The smallest MTU of IPv6 (RFC 8200 section 5).
const MIN_MTU: u32 = 1280;
/// Delay between attempts to reach a policy server. A view that is late delays a failover.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Time for requests in progress and the last writes.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// What the client publishes.
#[derive(Debug)]
struct Published {
    policy: watch::Sender<Option<Arc<NodePolicy>>>,
    cluster: watch::Sender<Arc<Cluster>>,
    view: watch::Sender<Arc<View>>,
}

impl Published {
    /// These values, until the server sends others.
    fn new(Decoded { policy, cluster, view }: Decoded) -> (Self, Sources) {
        let (policy, policy_receiver) = watch::channel(policy.map(Arc::new));
        let (cluster, cluster_receiver) = watch::channel(Arc::new(cluster.unwrap_or_default()));
        let (view, view_receiver) = watch::channel(Arc::new(view.unwrap_or_default()));
        let sources = Sources { policy: policy_receiver, cluster: cluster_receiver, view: view_receiver };
        (Self { policy, cluster, view }, sources)
    }
}

/// Runs a node agent until SIGTERM or SIGINT. What it has programmed stays in the kernel.
///
/// # Errors
/// When its configuration is invalid, or the kernel can't be programmed.
pub fn run(path: &Path) -> Result<(), CommandError> {
    let config = NodeConfig::load(path).map_err(CommandError::input)?;
    logging::start(config.log);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(blocking_threads::KEEP_ALIVE)
        .build()
        .map_err(|error| CommandError::runtime(error).context("cannot start the runtime"))?;
    blocking_threads::start(runtime.handle());
    runtime.block_on(run_agent(config))
}

/// Removes what an agent has programmed: pods' packets leave as the CNI has it.
///
/// # Errors
/// When the configuration is invalid, an agent runs, or the kernel refuses.
pub async fn detach(path: &Path) -> Result<(), CommandError> {
    let config = NodeConfig::load(path).map_err(CommandError::input)?;
    // It would put everything back.
    if tokio::net::UnixStream::connect(&config.admin.socket).await.is_ok() {
        let reason = "an agent runs here: stop it first, such as by deleting its DaemonSet";
        return Err(CommandError::runtime(reason));
    }
    let kernel = Kernel::open(settings(&config), numbers(&config), config.nft);
    kernel.map_err(CommandError::runtime)?.remove().await.map_err(CommandError::runtime)
}

/// The table of a node that has no agent and no policy yet, for `nft -f` at its boot: what pods send leaves it nowhere. The
/// agent replaces it.
///
/// # Errors
/// When the configuration is invalid, or has no `pod_cidrs`.
pub fn boot_table(path: &Path) -> Result<String, CommandError> {
    let config = NodeConfig::load(path).map_err(CommandError::input)?;
    if config.pod_cidrs.is_empty() {
        let reason = "`pod_cidrs` is empty: whose packets are to stay isn't known";
        return Err(CommandError::usage(reason).context(path.display()));
    }
    let inputs = Inputs {
        settings: &settings(&config),
        policy: None,
        cluster: &Cluster::default(),
        gateways: &[],
        local_addresses: &BTreeSet::new(),
        mtu: MIN_MTU,
    };
    Ok(replacement(&NodePlan::new(&inputs, &mut Indices::default()).table))
}

async fn run_agent(config: NodeConfig) -> Result<(), CommandError> {
    let (cached, decoded) = cache::read(&config.server.cache, &config.name).unzip();
    let (published, sources) = Published::new(decoded.unwrap_or_default());
    let socket = crate::admin::bind(&config.admin.socket).await.map_err(CommandError::runtime)?;
    let metrics_listener = metrics::bind(config.metrics.listen).await.map_err(CommandError::runtime)?;
    let agent_config = agent_config(&config);
    let (mask, numbers) = (agent_config.settings.mask, agent_config.numbers);
    let mut observer =
        Kernel::open(agent_config.settings.clone(), numbers, config.nft.clone()).map_err(CommandError::runtime)?;
    let (mark_users, mark_users_receiver) = watch::channel(MarkUsers::default());
    let (agent, handle) = Agent::start(agent_config, sources).await.map_err(CommandError::runtime)?;
    // Closed, whether or not there is a policy: pods may start.
    systemd::ready();
    let connection = ServerStatus::initial(None);
    let tasks = Tasks::default();
    let client = start_client(&config, cached, published, &connection, &tasks);
    tasks.spawn("indices", follow(handle.clone(), config.state));
    let service = admin::Service {
        name: config.name.clone(),
        agent: handle.clone(),
        connection: connection.clone(),
        device: config.tunnel.device,
        mask,
        numbers,
        mark_users: mark_users_receiver.clone(),
    };
    tasks.spawn("admin socket", admin::serve(service, socket.listener, tasks.clone()));
    let monitored = monitored(&handle, connection, mark_users_receiver);
    let connections = ConnectionLimiter::new("metrics", listener::METRICS_LIMITS);
    tasks.spawn("metrics", metrics::serve(monitored, metrics_listener, connections, tasks.clone()));
    let signal_error = |error| CommandError::runtime(error).context("cannot install signal handlers");
    let mut terminate = signal(SignalKind::terminate()).map_err(signal_error)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(signal_error)?;
    let signaled = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::select! {
        ended = agent.run(signaled) => ended.map_err(CommandError::runtime)?,
        // Doesn't end.
        () = mark_users::watch(&mut observer, &mark_users) => {}
    }
    systemd::stopping();
    // The writer of the cache ends with the client, which has the sender.
    drop(client);
    tasks.stop(STOP_TIMEOUT).await;
    drop(socket.file);
    tracing::info!(event = "stopped", "stopped: what is programmed stays in force");
    Ok(())
}

/// Starts the client of the policy server, and among `tasks` the writer of the cache, which has `cached`.
fn start_client(
    config: &NodeConfig,
    cached: Option<Cached>,
    published: Published,
    connection: &Arc<ArcSwap<ServerStatus>>,
    tasks: &Tasks,
) -> Task {
    let identity = Identity::agent(&config.name);
    let (confirmations, received) = mpsc::unbounded_channel();
    let resources = NodeResources::new(&config.name, published, confirmations);
    let client = DeltaClient::new(identity, config.server.connection(), RETRY_DELAY, connection.clone(), resources);
    tasks.spawn("policy cache", cache::write(config.server.cache.clone(), cached, connection.clone(), received));
    Task::spawn(client.run())
}

/// Stores the numbers of gateways, and says when pods' packets are steered for the first time.
async fn follow(mut agent: AgentHandle, file: PathBuf) {
    let (mut is_ready, mut stored) = (false, None);
    loop {
        let status = agent.status.borrow_and_update().clone();
        if stored.as_ref() != Some(&status.indices) {
            indices::write(&file, &status.indices);
            stored = Some(status.indices.clone());
        }
        if !is_ready
            && status.policy.is_some()
            && let Some(plan) = &status.plan
        {
            is_ready = true;
            tracing::info!(event = "ready", pods = plan.endpoints.len(), "ready: pods' packets are steered");
        }
        if agent.status.changed().await.is_err() {
            return;
        }
    }
}

fn monitored(
    agent: &AgentHandle,
    connection: Arc<ArcSwap<ServerStatus>>,
    mark_users: watch::Receiver<MarkUsers>,
) -> Monitored {
    let (for_metrics, for_readiness) = (agent.status.clone(), agent.status.clone());
    Monitored {
        families: Arc::new(move || {
            let status = for_metrics.borrow().clone();
            metric_families::families(&status, &connection.load(), &mark_users.borrow())
        }),
        ready: Arc::new(move || {
            let status = for_readiness.borrow();
            match (&status.error, &status.policy, &status.plan) {
                (None, Some(_), Some(_)) => Ok(()),
                (error, ..) => Err(NotReady::NoPolicy(error.clone())),
            }
        }),
    }
}

fn agent_config(config: &NodeConfig) -> AgentConfig {
    AgentConfig {
        settings: settings(config),
        numbers: numbers(config),
        nft: config.nft.clone(),
        sysctls: config.sysctls.clone(),
        mtu: config.tunnel.mtu,
        echo_interval: config.echo_interval,
        indices: indices::read(&config.state),
    }
}

fn settings(config: &NodeConfig) -> Settings {
    Settings {
        node: config.name.as_str().into(),
        mask: MarkMask::new(config.mark_mask).unwrap_or_default(),
        pod_prefixes: config.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
        tunnel_device: config.tunnel.device.clone(),
        hold_device: config.tunnel.hold_device.clone(),
    }
}

fn numbers(config: &NodeConfig) -> RoutingNumbers {
    RoutingNumbers { rule_priority: config.routing.rule_priority, first_table: config.routing.first_table }
}

#[cfg(test)]
mod tests;
