//! Startup of the group of gateways: membership client, peer links, and what the previous process has left.

use std::net::SocketAddr;
use std::sync::Arc;

use vipgate_common::Tasks;
use vipgate_dataplane::policy::members::MembersSpec;

use super::engine::Shared;
use crate::command_error::CommandError;
use crate::config::{Config, Overlay, PolicySource};
use crate::gateway::group::{Group, PeerLinks, Process, ReplicationWorkers};
use crate::gateway::process_secret;
use crate::gateway::session_store::{MEMBERSHIP, SessionStore, path_beside};
use crate::gateway::succession::{self, Inheritance};
use crate::heartbeat::{FormerMembership, HeartbeatClient};
use crate::peer::{self, Peers};
use crate::state::GatewayState;
use crate::state::lease::GroupLease;
use crate::{clock, heartbeat};

/// Joins the group of gateways: starts the membership client and the peer links. The first snapshot has this membership.
pub(super) fn join(
    config: &Config,
    state: &Arc<GatewayState>,
    published: MembersSpec,
    shared: Shared,
    store: &SessionStore,
    tasks: &Tasks,
) -> Result<Group, CommandError> {
    let lease = Arc::new(GroupLease::new(shared.lease));
    let PolicySource::Server(server) = &config.policy else { return Ok(Group::new(config, published, lease, None)) };
    let name: Arc<str> = config.name.as_str().into();
    let no_random = |error| CommandError::runtime(error).context("cannot get random bytes from the kernel");
    let secret = process_secret::generate().map_err(no_random)?;
    let incarnation = secret.incarnation();
    // If the previous process is still running, its secret stays with it.
    let predecessor = if store.is_in_use() { None } else { process_secret::exchange(config, &secret)? };
    let file = path_beside(config, MEMBERSHIP).zip(store.origin());
    let Inheritance { claim, identities, tunnel_secrets, membership, writer } =
        succession::inherit(file, &name, incarnation, tasks)?;
    let plan = heartbeat::ClientConfig {
        name: name.clone(),
        secret,
        predecessor,
        server: server.clone(),
        fingerprint: identities.own().fingerprint().0,
        tunnel_key: *tunnel_secrets.own.public(),
        peer: config.peer_tunnel_endpoint(),
        overlay: config.overlay.map(Overlay::tunnel_endpoint),
        former: membership.as_ref().map(|left| FormerMembership { view: left.view.clone(), ttl: left.ttl }),
        lease: lease.clone(),
    };
    let process = Process { claim: claim.clone(), tunnel_secrets, writer };
    let links = match &config.peer {
        None => None,
        Some(peer) => {
            let (peers, events) = Peers::start(peer::PeerConfig {
                name,
                claim,
                identities,
                successors: membership.map(|left| left.successors).unwrap_or_default(),
                listen: SocketAddr::new(peer.address, peer.port),
                heartbeat: peer.heartbeat,
                versions: peer::PROTOCOL_VERSIONS,
                workers: Arc::new(ReplicationWorkers(state.clone())),
                waker: shared.replication_wakeup,
                sends_at_once: peer.replicate_after.is_zero(),
                clock: clock::now,
            })
            .map_err(CommandError::runtime)?;
            let status = peers.status();
            Some(PeerLinks { peers, events, status })
        }
    };
    let (client, handle) = HeartbeatClient::open(plan);
    // Not ended by its handle: it gives the lease back then.
    let connections = (handle, tokio::spawn(client.run()), links, process);
    Ok(Group::new(config, published, lease, Some(connections)))
}
