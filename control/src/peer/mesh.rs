//! All links of this gateway: a full mesh with one link per peer. The gateway with the lower name connects.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::rustls::CommonState;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use vipgate_common::Backoff;
use vipgate_dataplane::flow::time::Tick;

use super::frame::LinkError;
use super::handshakes::Handshakes;
use super::identity::{CERTIFICATE_NAME, Fingerprint, Identity, IdentityError, Pins};
use super::link::{self, Link, LinkStream, PeerHello};
use super::status::StatusPublisher;
use super::view::PeerView;
use super::{PeerConfig, PeerEvent};
use crate::membership::replication::sync_rounds::SyncRounds;
use crate::membership::succession::PeerProcess;
use crate::peer::failure_log::{FailureLog, RemoteEnd};
use crate::peer::replication::send_loop::SendCommand;
use crate::peer::workers::ApplyLocks;

/// Deadline for connecting, the TLS handshake and the exchange of Hello frames.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Reconnect delay. While the policy server is away, leases end until a restarted peer is linked.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(250));
/// A link that was up for this long resets the reconnect delay.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// Accept queue: includes connections from unknown addresses, which are closed as soon as they are accepted.
const ACCEPT_BACKLOG: u32 = 1024;
/// Socket send buffer in bytes: heartbeats queue behind it.
const SEND_BUFFER_BYTES: u32 = 256 << 10;

/// State shared by all links.
#[derive(Debug)]
pub(super) struct SharedState {
    pub(super) config: PeerConfig,
    pub(super) view: watch::Sender<Arc<PeerView>>,
    /// The view by which heartbeats are echoed.
    pub(super) promised_view: watch::Sender<Arc<PeerView>>,
    pub(super) status: StatusPublisher,
    pub(super) sync_rounds: SyncRounds,
    pub(super) apply_locks: ApplyLocks,
    pub(super) events: mpsc::Sender<PeerEvent>,
    pub(super) send_commands: mpsc::Sender<SendCommand>,
    pub(super) pins: Arc<Pins>,
    pub(super) handshakes: Arc<Handshakes>,
    pub(super) registry: Mutex<LinkRegistry>,
    /// Duration of leases, milliseconds.
    pub(super) lease_ms: AtomicU32,
    /// When this process was started.
    pub(super) started: Tick,
}

/// The end of a connection.
#[derive(Debug)]
struct ConnectionEnd {
    /// The peer, if authenticated.
    peer: Option<Arc<str>>,
    /// Whether the link was up.
    was_linked: bool,
    reason: LinkError,
}

/// The links that are up, at most one per peer, and the process of each peer that links are for.
#[derive(Debug, Default)]
pub(super) struct LinkRegistry {
    last: u64,
    current: HashMap<Arc<str>, ActiveLink>,
    processes: BTreeMap<Arc<str>, PeerProcess>,
    failures: FailureLog,
}

#[derive(Debug)]
struct ActiveLink {
    id: u64,
    fingerprint: Fingerprint,
    incarnation: u64,
    stop: mpsc::Sender<LinkError>,
}

impl SharedState {
    pub(super) async fn send_command(&self, order: SendCommand) {
        // Without the send loop, all links end.
        let _ = self.send_commands.send(order).await;
    }

    fn registry(&self) -> MutexGuard<'_, LinkRegistry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a view: closes links to gateways that it doesn't contain with the same certificate, and to processes that
    /// don't count any more.
    pub(super) fn apply_view(&self, view: &Arc<PeerView>) {
        let others = || view.members.iter().filter(|member| member.name != self.config.name);
        let pins: BTreeMap<_, _> =
            others().filter_map(|member| Some((member.name.clone(), member.fingerprint?))).collect();
        self.status.set_peers(&others().map(|member| member.name.clone()).collect::<Vec<_>>());
        self.pins.set(pins);
        let mut registry = self.registry();
        registry.processes.retain(|name, _| view.member(name).is_some());
        for member in others() {
            let known = self.config.successors.get(&member.name).copied();
            let first = || PeerProcess::new(member.incarnation, known, self.started);
            let process = registry.processes.entry(member.name.clone()).or_insert_with(first);
            process.set_named(member.incarnation);
            self.status.update(&member.name, |peer| peer.successor = process.successor());
        }
        self.view.send_replace(view.clone());
        for (name, link) in &registry.current {
            let process = registry.processes.get(name).map(PeerProcess::current);
            let reason = match view.member(name) {
                Some(member) if member.fingerprint != Some(link.fingerprint) => LinkError::UntrustedCertificate,
                Some(_) if process != Some(link.incarnation) => LinkError::IncarnationMismatch,
                Some(_) => continue,
                None => LinkError::UntrustedCertificate,
            };
            // If the channel is full, the link is ending already.
            let _ = link.stop.try_send(reason);
        }
    }

    /// Notes a promise to a peer's process: when it was made, and under which view; `None`: none must be made.
    pub(super) fn promise(&self, peer: &str, process: u64) -> Option<(Tick, u64)> {
        let view = self.promised_view.borrow().clone();
        let member = view.member(peer).filter(|member| member.active)?;
        let mut registry = self.registry();
        // Read once the promise before this one was made.
        let now = (self.config.clock)();
        let of_peer = registry.processes.get_mut(peer)?;
        let is_made = of_peer.promise(process, member.incarnation, now, self.lease_ms.load(Relaxed));
        is_made.then_some((now, view.number))
    }

    /// The fingerprint of this gateway in the view.
    fn own_fingerprint(&self) -> Option<Fingerprint> {
        self.view.borrow().member(&self.config.name).and_then(|member| member.fingerprint)
    }

    /// Registers a connection as the peer's link if name and certificate match the view, and if its process counts, or
    /// succeeds the one that did. It supersedes an older link.
    fn admit<S: LinkStream>(
        &self,
        hello: &PeerHello,
        fingerprint: Fingerprint,
        stream: S,
    ) -> Result<Link<S>, (LinkError, S)> {
        let mut registry = self.registry();
        let rejection = match self.pins.owner(fingerprint) {
            None => Some(LinkError::UntrustedCertificate),
            Some(pinned) if *pinned != *hello.name => {
                Some(LinkError::NameMismatch { claimed: hello.name.clone(), pinned })
            }
            Some(_) => {
                let linked = registry.current.get(&*hello.name).map(|link| link.incarnation);
                match registry.processes.get(&*hello.name) {
                    Some(process) => process.check(&hello.claim, linked).err().map(LinkError::from),
                    None => Some(LinkError::IncarnationMismatch),
                }
            }
        };
        if let Some(reason) = rejection {
            return Err((reason, stream));
        }
        let incarnation = hello.claim.incarnation;
        if let Some(process) = registry.processes.get_mut(&*hello.name)
            && process.accept(incarnation)
        {
            let (gateway, successor) = (&*hello.name, process.successor());
            self.status.update(gateway, |peer| peer.successor = successor);
            tracing::info!(
                event = "peer_succeeded",
                gateway,
                "a restarted process of gateway {gateway} has taken its place, which no view shows yet"
            );
        }
        registry.last += 1;
        let (id, peer) = (registry.last, Arc::from(hello.name.as_str()));
        let stop = mpsc::channel(1);
        let current = ActiveLink { id, fingerprint, incarnation, stop: stop.0.clone() };
        if let Some(previous) = registry.current.insert(Arc::clone(&peer), current) {
            let _ = previous.stop.try_send(LinkError::Superseded);
        }
        Ok(Link { id, peer, version: hello.version, incarnation, stream, stop })
    }

    /// Exchanges Hello frames, then runs the link until it ends.
    async fn run_connection<S: LinkStream>(
        &self,
        mut stream: S,
        fingerprint: Fingerprint,
        deadline: Instant,
    ) -> ConnectionEnd {
        let owner = self.pins.owner(fingerprint);
        let ended = |reason| ConnectionEnd { peer: owner.clone(), was_linked: false, reason };
        let hello = match tokio::time::timeout_at(deadline, link::exchange_hello(&mut stream, self)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(reason)) => {
                link::send_farewell(&mut stream, &reason).await;
                return ended(reason);
            }
            Err(_) => return ended(LinkError::Connection("no Hello frame from the peer in time".to_owned())),
        };
        let link = match self.admit(&hello, fingerprint, stream) {
            Ok(link) => link,
            Err((reason, mut stream)) => {
                link::send_farewell(&mut stream, &reason).await;
                return ended(reason);
            }
        };
        let (peer, id, version) = (link.peer.clone(), link.id, link.version);
        tracing::info!(event = "peer_linked", peer = &*peer, version, "link to {peer} is up");
        let reason = link.run(self).await;
        let mut registry = self.registry();
        if registry.current.get(&peer).is_some_and(|current| current.id == id) {
            registry.current.remove(&peer);
            let now = (self.config.clock)();
            self.status.update(&peer, |peer| {
                (peer.linked, peer.since) = (false, Some(now));
                peer.replication.link_down();
            });
        }
        ConnectionEnd { peer: Some(peer), was_linked: true, reason }
    }

    /// Records a link failure, and logs it as a warning if it is new.
    fn record_failure(&self, ended: &ConnectionEnd, address: IpAddr) {
        let ConnectionEnd { peer, was_linked, reason } = ended;
        if *reason == LinkError::Superseded {
            return;
        }
        let with = if let Some(peer) = peer {
            self.status.record_failure(peer, reason);
            RemoteEnd::Gateway(peer.clone())
        } else {
            self.status.count_unauthenticated();
            RemoteEnd::Unauthenticated(address)
        };
        let is_warning = self.registry().failures.should_warn(with, *was_linked, reason, Instant::now());
        let peer = peer.as_deref();
        let end = peer.map_or_else(|| address.to_string(), str::to_owned);
        if is_warning {
            tracing::warn!(event = "peer_unlinked", peer, %address, %reason, "link to {end} failed: {reason}");
        } else {
            tracing::debug!(event = "peer_unlinked", peer, %address, %reason, "link to {end} failed: {reason}");
        }
    }
}

/// The fingerprint of the certificate that the peer has presented.
fn peer_fingerprint(state: &CommonState) -> Result<Fingerprint, LinkError> {
    state.peer_certificates().and_then(<[_]>::first).map(Fingerprint::of).ok_or(LinkError::UntrustedCertificate)
}

/// Opens the listening port.
pub(super) fn bind(config: &PeerConfig) -> std::io::Result<TcpListener> {
    let socket = if config.listen.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Accepted connections inherit it.
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.bind(config.listen)?;
    socket.listen(ACCEPT_BACKLOG)
}

/// The TLS acceptors with this gateway's certificates. They accept the certificates in the current view.
pub(super) struct Acceptors {
    own: TlsAcceptor,
    inherited: Option<(Fingerprint, TlsAcceptor)>,
}

impl Acceptors {
    /// The one to use under a view with this fingerprint of this gateway.
    fn presenting(&self, named: Option<Fingerprint>) -> &TlsAcceptor {
        let inherited = self.inherited.as_ref().filter(|(fingerprint, _)| Some(*fingerprint) == named);
        inherited.map_or(&self.own, |(_, acceptor)| acceptor)
    }
}

pub(super) fn acceptors(shared: &SharedState) -> Result<Acceptors, IdentityError> {
    let acceptor = |identity: &Identity| {
        Ok::<_, IdentityError>(TlsAcceptor::from(Arc::new(identity.server_config(shared.pins.clone())?)))
    };
    let identities = &shared.config.identities;
    let inherited = match identities.inherited() {
        Some(identity) => Some((identity.fingerprint(), acceptor(identity)?)),
        None => None,
    };
    Ok(Acceptors { own: acceptor(identities.own())?, inherited })
}

/// Accepts connections from peers.
pub(super) async fn listen(shared: Arc<SharedState>, listener: TcpListener, acceptors: Acceptors) {
    // Dropped with this task, which aborts all connections.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection on the peer port");
                // Most likely out of file descriptors, which is temporary.
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let mut slot = match shared.handshakes.admit(from.ip(), &shared.view.borrow(), &shared.config.name) {
            Ok(slot) => slot,
            Err(reason) => {
                shared.record_failure(&ConnectionEnd { peer: None, was_linked: false, reason }, from.ip());
                continue;
            }
        };
        let (shared, acceptor) = (shared.clone(), acceptors.presenting(shared.own_fingerprint()).clone());
        connections.spawn(async move {
            let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
            let accepted = tokio::select! {
                accepted = accept(&acceptor, stream, deadline) => accepted,
                () = slot.superseded() => Err(LinkError::Superseded),
            };
            let ended = match accepted {
                Ok((stream, fingerprint)) => {
                    // The peer is authenticated.
                    drop(slot);
                    match shared.pins.owner(fingerprint) {
                        Some(peer) if peer > shared.config.name => {
                            let reason = LinkError::ProtocolViolation("only the gateway with the lower name connects");
                            ConnectionEnd { peer: Some(peer), was_linked: false, reason }
                        }
                        Some(_) | None => shared.run_connection(stream, fingerprint, deadline).await,
                    }
                }
                Err(reason) => ConnectionEnd { peer: None, was_linked: false, reason },
            };
            shared.record_failure(&ended, from.ip());
        });
    }
}

async fn accept(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    deadline: Instant,
) -> Result<(tokio_rustls::server::TlsStream<TcpStream>, Fingerprint), LinkError> {
    stream.set_nodelay(true)?;
    let handshake = tokio::time::timeout_at(deadline, acceptor.accept(stream)).await;
    let stream = handshake.map_err(|_| LinkError::Connection("TLS handshake timed out".to_owned()))??;
    let fingerprint = peer_fingerprint(stream.get_ref().1)?;
    Ok((stream, fingerprint))
}

/// Maintains one dialer per peer with a higher name.
pub(super) async fn dial_all(shared: Arc<SharedState>) {
    let mut views = shared.view.subscribe();
    let mut dialers: HashMap<Arc<str>, tokio::task::AbortHandle> = HashMap::new();
    let mut tasks = JoinSet::new();
    loop {
        let view = views.borrow_and_update().clone();
        let is_dialed = |name: &Arc<str>| *name > shared.config.name && view.member(name).is_some();
        dialers.retain(|name, task| {
            if !is_dialed(name) {
                task.abort();
            }
            is_dialed(name)
        });
        for member in view.members.iter().filter(|member| is_dialed(&member.name)) {
            let dial = || tasks.spawn(dial(shared.clone(), member.name.clone()));
            dialers.entry(member.name.clone()).or_insert_with(dial);
        }
        while tasks.try_join_next().is_some() {}
        if views.changed().await.is_err() {
            return;
        }
    }
}

/// Connects to one gateway, and reconnects with exponential backoff.
async fn dial(shared: Arc<SharedState>, name: Arc<str>) {
    let mut views = shared.view.subscribe();
    let mut backoff = Backoff::new(RETRY_DELAY);
    loop {
        let view = views.borrow_and_update().clone();
        let target = view.member(&name).and_then(|member| Some((member.address?, member.fingerprint?)));
        if let Some((address, _)) = target {
            let started_at = Instant::now();
            let ended = match connect(&shared, &name, address).await {
                Ok((stream, fingerprint)) => {
                    shared.run_connection(stream, fingerprint, started_at + HANDSHAKE_TIMEOUT).await
                }
                Err(reason) => ConnectionEnd { peer: Some(name.clone()), was_linked: false, reason },
            };
            shared.record_failure(&ended, address.ip());
            if started_at.elapsed() > STABLE_AFTER {
                backoff.reset();
            }
        }
        // A new view may fix the failure.
        let changed = match target {
            Some(_) => timeout(backoff.next_delay(), views.changed()).await,
            None => Ok(views.changed().await),
        };
        match changed {
            Ok(Ok(())) => backoff.reset(),
            Ok(Err(_)) => return,
            Err(_) => {}
        }
    }
}

async fn connect(
    shared: &SharedState,
    name: &Arc<str>,
    address: SocketAddr,
) -> Result<(tokio_rustls::client::TlsStream<TcpStream>, Fingerprint), LinkError> {
    let identity = shared.config.identities.presented(shared.own_fingerprint());
    let config = identity.client_config(shared.pins.clone(), name);
    let config = config.map_err(|error| LinkError::Connection(error.to_string()))?;
    let server = ServerName::try_from(CERTIFICATE_NAME).map_err(|error| LinkError::Connection(error.to_string()))?;
    let attempt = async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
        // This gateway's address in the view: peers accept handshakes from no other one.
        socket.bind(SocketAddr::new(shared.config.listen.ip(), 0))?;
        let stream = socket.connect(address).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(Arc::new(config)).connect(server, stream).await
    };
    let stream = timeout(HANDSHAKE_TIMEOUT, attempt).await.map_err(|_| {
        LinkError::Connection(format!("connecting to {address} timed out after {} s", HANDSHAKE_TIMEOUT.as_secs()))
    })??;
    let fingerprint = peer_fingerprint(stream.get_ref().1)?;
    Ok((stream, fingerprint))
}
