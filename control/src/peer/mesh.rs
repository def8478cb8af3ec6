//! All links of this gateway: one to each other gateway of the view, made by that of the two whose name comes first.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::rustls::CommonState;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::frame::Broken;
use super::handshakes::Handshakes;
use super::identity::{Fingerprint, IdentityError, NAME, Pins};
use super::link::{self, Introduced, Io, Link};
use super::replicate::pump::Order;
use super::replicate::rounds::Rounds;
use super::status::Board;
use super::troubles::{Troubles, With};
use super::view::View;
use super::work::Turns;
use super::{Event, Plan};

/// The longest a connection may take until both sides have said who they are.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause after the first failure, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(25), Duration::from_secs(1));
/// A link that has held for so long begins with the first pause again.
const HELD: Duration = Duration::from_secs(5);
/// The accept queue: connections of strangers are in it, too, and closed at once when they are accepted.
const BACKLOG: u32 = 1024;
/// Bytes that the kernel holds for a link: beats wait behind them.
const KERNEL: u32 = 256 << 10;

/// What all links share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) plan: Plan,
    pub(super) view: watch::Sender<Arc<View>>,
    pub(super) board: Board,
    pub(super) rounds: Rounds,
    pub(super) turns: Turns,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) links: mpsc::Sender<Order>,
    pub(super) pins: Arc<Pins>,
    pub(super) handshakes: Arc<Handshakes>,
    pub(super) registry: Mutex<Registry>,
}

/// How a connection has ended.
#[derive(Debug)]
struct Ended {
    /// Whose it was, if that was known.
    peer: Option<Arc<str>>,
    /// Whether it was a link.
    linked: bool,
    why: Broken,
}

/// The links that there are.
#[derive(Debug, Default)]
pub(super) struct Registry {
    last: u64,
    current: HashMap<Arc<str>, Current>,
    troubles: Troubles,
}

#[derive(Debug)]
struct Current {
    id: u64,
    fingerprint: Fingerprint,
    incarnation: u64,
    stop: mpsc::Sender<Broken>,
}

impl Shared {
    pub(super) async fn order(&self, order: Order) {
        // Without the pump everything ends.
        let _ = self.links.send(order).await;
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another view counts: links to whom it doesn't name end.
    pub(super) fn enter(&self, view: &Arc<View>) {
        let others = || view.members.iter().filter(|member| member.name != self.plan.name);
        let pins: BTreeMap<_, _> =
            others().filter_map(|member| Some((member.name.clone(), member.fingerprint?))).collect();
        self.board.keep(&others().map(|member| member.name.clone()).collect::<Vec<_>>());
        self.pins.set(pins);
        self.view.send_replace(view.clone());
        for (name, link) in &self.registry().current {
            let member = view.member(name);
            let why = match member {
                Some(member) if member.fingerprint != Some(link.fingerprint) => Broken::Unpinned,
                Some(member) if member.incarnation != link.incarnation => Broken::Incarnation,
                Some(_) => continue,
                None => Broken::Unpinned,
            };
            // If it is full, it ends already.
            let _ = link.stop.try_send(why);
        }
    }

    /// Lets a connection in, if it is whose the view means; it takes the place of an older one.
    fn admit<S: Io>(&self, who: &Introduced, fingerprint: Fingerprint, stream: S) -> Result<Link<S>, (Broken, S)> {
        let mut registry = self.registry();
        let refused = match self.pins.owner(fingerprint) {
            None => Some(Broken::Unpinned),
            Some(pinned) if *pinned != *who.name => Some(Broken::Name { said: who.name.clone(), pinned }),
            Some(_) => match self.view.borrow().member(&who.name) {
                Some(member) if member.incarnation == who.incarnation => None,
                Some(_) | None => Some(Broken::Incarnation),
            },
        };
        if let Some(why) = refused {
            return Err((why, stream));
        }
        registry.last += 1;
        let (id, peer) = (registry.last, Arc::from(who.name.as_str()));
        let stop = mpsc::channel(1);
        let current = Current { id, fingerprint, incarnation: who.incarnation, stop: stop.0.clone() };
        if let Some(before) = registry.current.insert(Arc::clone(&peer), current) {
            let _ = before.stop.try_send(Broken::Replaced);
        }
        Ok(Link { id, peer, version: who.version, incarnation: who.incarnation, stream, stop })
    }

    /// Hello both ways, and then the link until it ends.
    async fn talk<S: Io>(&self, mut stream: S, fingerprint: Fingerprint, until: Instant) -> Ended {
        let owner = self.pins.owner(fingerprint);
        let ended = |why| Ended { peer: owner.clone(), linked: false, why };
        let introduced = match tokio::time::timeout_at(until, link::introduce(&mut stream, self)).await {
            Ok(Ok(introduced)) => introduced,
            Ok(Err(why)) => {
                link::leave(&mut stream, &why).await;
                return ended(why);
            }
            Err(_) => return ended(Broken::Connection("it doesn't say who it is".to_owned())),
        };
        let link = match self.admit(&introduced, fingerprint, stream) {
            Ok(link) => link,
            Err((why, mut stream)) => {
                link::leave(&mut stream, &why).await;
                return ended(why);
            }
        };
        let (peer, id, version) = (link.peer.clone(), link.id, link.version);
        tracing::info!(event = "peer_linked", peer = &*peer, version, "linked to gateway {peer}");
        let why = link.run(self).await;
        let mut registry = self.registry();
        if registry.current.get(&peer).is_some_and(|current| current.id == id) {
            registry.current.remove(&peer);
            let now = (self.plan.clock)();
            self.board.update(&peer, |peer| {
                (peer.linked, peer.since) = (false, Some(now));
                (peer.copies.in_sync_from, peer.copies.in_sync_to) = (false, false);
            });
        }
        Ended { peer: Some(peer), linked: true, why }
    }

    /// Says why there is no link, if that is news.
    fn failed(&self, ended: &Ended, address: IpAddr) {
        let Ended { peer, linked, why } = ended;
        if *why == Broken::Replaced {
            return;
        }
        let with = if let Some(peer) = peer {
            self.board.failed(peer, why);
            With::Gateway(peer.clone())
        } else {
            self.board.stranger();
            With::Stranger(address)
        };
        let news = self.registry().troubles.failed(with, *linked, why, Instant::now());
        let peer = peer.as_deref().unwrap_or("unknown");
        if news {
            tracing::warn!(event = "peer_unlinked", peer, %address, reason = %why, "no link to gateway {peer}: {why}");
        } else {
            tracing::debug!(event = "peer_unlinked", peer, %address, reason = %why, "no link to gateway {peer}: {why}");
        }
    }
}

/// Whose certificate a connection has shown.
fn shown(state: &CommonState) -> Result<Fingerprint, Broken> {
    state.peer_certificates().and_then(<[_]>::first).map(Fingerprint::of).ok_or(Broken::Unpinned)
}

/// Opens the port for links.
pub(super) fn bind(plan: &Plan) -> std::io::Result<TcpListener> {
    let socket = if plan.listen.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Connections inherit it.
    socket.set_send_buffer_size(KERNEL)?;
    socket.bind(plan.listen)?;
    socket.listen(BACKLOG)
}

/// What lets others in whom the view names.
pub(super) fn acceptor(shared: &Shared) -> Result<TlsAcceptor, IdentityError> {
    Ok(TlsAcceptor::from(Arc::new(shared.plan.identity.server(shared.pins.clone())?)))
}

/// Lets others in.
pub(super) async fn listen(shared: Arc<Shared>, listener: TcpListener, acceptor: TlsAcceptor) {
    // Ends with this task, and all of them with it.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a link from another gateway can't be accepted");
                // Out of descriptors, most likely: it passes.
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let mut slot = match shared.handshakes.admit(from.ip(), &shared.view.borrow(), &shared.plan.name) {
            Ok(slot) => slot,
            Err(why) => {
                shared.failed(&Ended { peer: None, linked: false, why }, from.ip());
                continue;
            }
        };
        let (shared, acceptor) = (shared.clone(), acceptor.clone());
        connections.spawn(async move {
            let until = Instant::now() + PATIENCE;
            let accepted = tokio::select! {
                accepted = accept(&acceptor, stream, until) => accepted,
                () = slot.superseded() => Err(Broken::Replaced),
            };
            let ended = match accepted {
                Ok((stream, fingerprint)) => {
                    // It has shown a certificate of the view.
                    drop(slot);
                    match shared.pins.owner(fingerprint) {
                        Some(peer) if peer > shared.plan.name => {
                            let why = Broken::Protocol("it connects, although its name comes after ours");
                            Ended { peer: Some(peer), linked: false, why }
                        }
                        Some(_) | None => shared.talk(stream, fingerprint, until).await,
                    }
                }
                Err(why) => Ended { peer: None, linked: false, why },
            };
            shared.failed(&ended, from.ip());
        });
    }
}

async fn accept(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    until: Instant,
) -> Result<(tokio_rustls::server::TlsStream<TcpStream>, Fingerprint), Broken> {
    stream.set_nodelay(true)?;
    let handshake = tokio::time::timeout_at(until, acceptor.accept(stream)).await;
    let stream = handshake.map_err(|_| Broken::Connection("no TLS handshake in time".to_owned()))??;
    let fingerprint = shown(stream.get_ref().1)?;
    Ok((stream, fingerprint))
}

/// Keeps links to those whose names come after ours.
pub(super) async fn dial_all(shared: Arc<Shared>) {
    let mut views = shared.view.subscribe();
    let mut dialers: HashMap<Arc<str>, tokio::task::AbortHandle> = HashMap::new();
    let mut tasks = JoinSet::new();
    loop {
        let view = views.borrow_and_update().clone();
        let wanted = |name: &Arc<str>| *name > shared.plan.name && view.member(name).is_some();
        dialers.retain(|name, task| {
            if !wanted(name) {
                task.abort();
            }
            wanted(name)
        });
        for member in view.members.iter().filter(|member| wanted(&member.name)) {
            let dial = || tasks.spawn(dial(shared.clone(), member.name.clone()));
            dialers.entry(member.name.clone()).or_insert_with(dial);
        }
        while tasks.try_join_next().is_some() {}
        if views.changed().await.is_err() {
            return;
        }
    }
}

/// Connects to one gateway, again and again.
async fn dial(shared: Arc<Shared>, name: Arc<str>) {
    let mut views = shared.view.subscribe();
    let mut pause = PAUSES.0;
    loop {
        let view = views.borrow_and_update().clone();
        let known = view.member(&name).and_then(|member| Some((member.address?, member.fingerprint?)));
        if let Some((address, _)) = known {
            let began = Instant::now();
            let ended = match connect(&shared, &name, address).await {
                Ok((stream, fingerprint)) => shared.talk(stream, fingerprint, began + PATIENCE).await,
                Err(why) => Ended { peer: Some(name.clone()), linked: false, why },
            };
            shared.failed(&ended, address.ip());
            if began.elapsed() > HELD {
                pause = PAUSES.0;
            }
        }
        // Another view may be the end of what was wrong.
        let changed = match known {
            Some(_) => timeout(pause, views.changed()).await.unwrap_or(Ok(())),
            None => views.changed().await,
        };
        if changed.is_err() {
            return;
        }
        let fresh = views.has_changed().unwrap_or(false);
        pause = if fresh { PAUSES.0 } else { (pause * 2).min(PAUSES.1) };
    }
}

async fn connect(
    shared: &Shared,
    name: &Arc<str>,
    address: SocketAddr,
) -> Result<(tokio_rustls::client::TlsStream<TcpStream>, Fingerprint), Broken> {
    let config = shared.plan.identity.client(shared.pins.clone(), name);
    let config = config.map_err(|error| Broken::Connection(error.to_string()))?;
    let server = ServerName::try_from(NAME).map_err(|error| Broken::Connection(error.to_string()))?;
    let attempt = async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_send_buffer_size(KERNEL)?;
        // The address that the view tells of this gateway: others accept no handshake from another one.
        socket.bind(SocketAddr::new(shared.plan.listen.ip(), 0))?;
        let stream = socket.connect(address).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(Arc::new(config)).connect(server, stream).await
    };
    let stream = timeout(PATIENCE, attempt)
        .await
        .map_err(|_| Broken::Connection(format!("no connection to {address} within {} s", PATIENCE.as_secs())))??;
    let fingerprint = shown(stream.get_ref().1)?;
    Ok((stream, fingerprint))
}
