//! Startup of the group of gateways: membership client, peer links, tunnel keys.

use std::net::SocketAddr;
use std::sync::Arc;

use super::engine::Shared;
use crate::command_error::CommandError;
use crate::config::{Config, Overlay, PolicySource};
use crate::gateway::group::{Group, PeerLinks, ReplicationWorkers};
use crate::gateway::process_secret;
use crate::gateway::session_store::SessionStore;
use crate::heartbeat::HeartbeatClient;
use crate::peer::{self, Identity, Peers, TunnelSecret};
use crate::state::GatewayState;
use crate::state::lease::GroupLease;
use crate::{clock, heartbeat};

/// Joins the group of gateways: starts the membership client and the peer links.
pub(super) fn join(
    config: &Config,
    state: &Arc<GatewayState>,
    shared: Shared,
    store: &SessionStore,
) -> Result<Group, CommandError> {
    let lease = Arc::new(GroupLease::new(shared.lease));
    let PolicySource::Server(server) = &config.policy else { return Ok(Group::new(config, lease, None, None, None)) };
    let name: Arc<str> = config.name.as_str().into();
    let no_random = |error| CommandError::runtime(error).context("cannot get random bytes from the kernel");
    let secret = process_secret::generate().map_err(no_random)?;
    let incarnation = secret.incarnation();
    // If the previous process is still running, its secret stays with it.
    let predecessor = if store.is_in_use() { None } else { process_secret::exchange(config, &secret) };
    let identity = Identity::generate().map_err(CommandError::runtime)?;
    let tunnel_secret = TunnelSecret::generate().map_err(CommandError::runtime)?;
    let plan = heartbeat::ClientConfig {
        name: name.clone(),
        secret,
        predecessor,
        server: server.clone(),
        fingerprint: identity.fingerprint().0,
        tunnel_key: *tunnel_secret.public(),
        peer: config.peer_tunnel_endpoint(),
        overlay: config.overlay.map(Overlay::tunnel_endpoint),
        lease: lease.clone(),
    };
    let links = match &config.peer {
        None => None,
        Some(peer) => {
            let (peers, events) = Peers::start(peer::PeerConfig {
                name,
                incarnation,
                identity,
                listen: SocketAddr::new(peer.address, peer.port),
                heartbeat: peer.heartbeat,
                versions: peer::PROTOCOL_VERSIONS,
                workers: Arc::new(ReplicationWorkers(state.clone())),
                waker: shared.replication_wakeup,
                sends_at_once: peer.replicate_after.is_zero(),
                clock: clock::now,
            })
            .map_err(CommandError::usage)?;
            let status = peers.status();
            Some(PeerLinks { peers, events, status, view: Arc::default() })
        }
    };
    let (client, handle) = HeartbeatClient::open(plan);
    Ok(Group::new(config, lease, Some((handle, tokio::spawn(client.run()))), links, Some(tunnel_secret)))
}
