//! The shared state of a gateway at startup, and when its engine runs.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::mpsc;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::NetworkSpec;

use super::devices::{SteeredInterfaces, socket_status};
use super::engine::port_range;
use super::source::OpenedSource;
use super::workers::EngineParts;
use crate::command_error::CommandError;
use crate::config::{Config, PolicyServer, PolicySource};
use crate::gateway::device_stats::XdpStats;
use crate::natlog::NatLogStatus;
use crate::state::{ControlCommand, EngineHandle, GatewayState, ListenerConnections, PolicyStatus, VipPlacement};
use crate::xds::store::PolicyUpdate;
use crate::xds::tls::CertificateFiles;

/// The state before the initial policy: no policy in force, no engine.
pub(super) fn initial(
    config: &Config,
    source: &OpenedSource,
    network: Arc<NetworkSpec>,
    empty: Arc<Policy>,
) -> Result<GatewayState, CommandError> {
    Ok(GatewayState {
        name: config.name.clone(),
        node: config.node().to_owned(),
        zone: config.zone.clone(),
        started: Instant::now(),
        ready: AtomicBool::new(false),
        session_capacity: config.sessions.capacity,
        policy: ArcSwap::from_pointee(PolicyStatus::empty(source.description.clone())),
        server: source.server.clone(),
        certificates: certificate_files(&config.policy),
        files: source.subscription.files.clone(),
        health_errors: ArcSwap::default(),
        conflicts: ArcSwap::default(),
        compiled: ArcSwap::new(empty),
        placement: VipPlacement::default(),
        ports: (config.ports.range.first, config.ports.range.last),
        port_blocks: port_range(config)?.blocks(),
        network: ArcSwap::new(network),
        capture: ArcSwap::default(),
        tracking: ArcSwap::default(),
        group: ArcSwap::default(),
        nat_log: config.nat_log.as_ref().map(|settings| Arc::new(NatLogStatus::new(settings))),
        stalls: Arc::default(),
        connections: ListenerConnections::default(),
        engine: OnceLock::new(),
    })
}

/// The certificates of the connection to the policy server.
fn certificate_files(policy: &PolicySource) -> CertificateFiles {
    match policy {
        PolicySource::Server(PolicyServer { ca, cert, .. }) => CertificateFiles { own: cert.clone(), ca: ca.clone() },
        PolicySource::Files(_) => CertificateFiles::default(),
    }
}

/// Records that the initial policy is in force.
pub(super) fn set_policy(state: &GatewayState, update: &PolicyUpdate, policy: Arc<Policy>, generation: u32) {
    let status = state.policy.load_full();
    state.compiled.store(policy);
    state.placement.apply(&update.change);
    state.policy.store(Arc::new(PolicyStatus {
        generation,
        applied_at: SystemTime::now(),
        updates_applied: 1,
        last_error: None,
        peers: update.peers.clone().into(),
        ..(*status).clone()
    }));
}

/// Records that the engine runs. Returns the commands to the control thread.
pub(super) fn set_engine(
    state: &GatewayState,
    interfaces: &SteeredInterfaces,
    parts: EngineParts,
) -> mpsc::UnboundedReceiver<ControlCommand> {
    let EngineParts { handles, sockets, ring_stats, pool } = parts;
    let counters = handles.iter().map(|handle| handle.counters.clone()).collect();
    let (commands, receiver) = mpsc::unbounded_channel();
    let engine = EngineHandle {
        workers: handles,
        sockets: socket_status(&interfaces.nics, &interfaces.modes, sockets),
        device: Arc::new(XdpStats::new(interfaces.steering.clone(), ring_stats, pool, counters)),
        commands,
    };
    // It is set once only.
    let _ = state.engine.set(engine);
    receiver
}
