//! TCP and TLS listener of the policy server. Certificate files are checked for changes every second; a change applies
//! to new connections. Failed handshakes are logged with the client's address.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::server::TlsStream;
use tonic::Request;
use tonic::transport::server::{Connected, TcpConnectInfo};
use vipgate_common::Tasks;

use super::identity::RejectionLog;
use crate::command_error::CommandError;
use crate::config::Tls;
use crate::listener::{self, ConnectionGuard, ConnectionLimiter, Deadlines, Slot, StreamCounter};
use crate::policyd::stats::Stats;
use crate::xds::tls::{self, CertificateFiles, CertificateValidity, ClientCertificates, TlsError};

/// Timeout of the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often certificate files are checked for changes.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// Listen backlog: all gateways reconnect at once after a restart of the server. The kernel caps it at
/// `net.core.somaxconn`.
const BACKLOG: u32 = 16_384;
/// Capacity of the queue of accepted connections.
const QUEUE: usize = 128;

/// Connection of a request, as a request extension.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    pub remote: Option<SocketAddr>,
    pub local: Option<SocketAddr>,
    /// The client's certificate chain, where clients are identified by certificates; empty: it has shown none, which is
    /// accepted from gateways and agents of nodes that have a token.
    pub certificates: Option<Arc<[CertificateDer<'static>]>>,
    /// Its streams that are in use.
    pub activity: Arc<StreamCounter>,
}

impl ConnectionInfo {
    fn of<S>(guard: &ConnectionGuard<S>, stream: &TcpStream, certificates: Option<&[CertificateDer<'static>]>) -> Self {
        let activity = match guard.deadlines() {
            Deadlines::Http2 { activity, .. } => activity.clone(),
            Deadlines::Http1 { .. } => Arc::default(),
        };
        let (remote, local) = (stream.peer_addr().ok(), stream.local_addr().ok());
        Self { remote, local, certificates: certificates.map(Into::into), activity }
    }
}

impl Connected for ConnectionGuard<TcpStream> {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        ConnectionInfo::of(self, self.get_ref(), None)
    }
}

impl Connected for ConnectionGuard<TlsStream<TcpStream>> {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        let (stream, session) = self.get_ref().get_ref();
        let none: Option<&[_]> = self.requires_certificate().then_some(&[]);
        ConnectionInfo::of(self, stream, session.peer_certificates().or(none))
    }
}

/// Accepted connections.
type Incoming<S> = mpsc::Receiver<std::io::Result<ConnectionGuard<S>>>;

/// Binds the listening socket.
///
/// # Errors
/// When the port is in use or the address isn't local.
pub fn bind(address: SocketAddr) -> Result<TcpListener, CommandError> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A restarted server may bind at once, while old connections are in TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|error: std::io::Error| {
        CommandError::runtime(error).context(format_args!("listen: cannot listen on {address}"))
    })
}

/// Accepts connections without TLS.
pub fn accept_plain(listener: TcpListener, room: Arc<ConnectionLimiter>, tasks: &Tasks) -> Incoming<TcpStream> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    tasks.spawn("listener", async move {
        while let Some((stream, from, slot)) = accept(&listener, &room, &sender).await {
            if sender.send(Ok(guard(stream, from, slot))).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// Accepts connections with TLS; the queue gets those whose handshake has succeeded.
pub fn accept_tls(
    listener: TcpListener,
    room: Arc<ConnectionLimiter>,
    certificates: Arc<Certificates>,
    stats: Arc<Stats>,
    rejections: Arc<RejectionLog>,
    tasks: &Tasks,
) -> Incoming<TlsStream<TcpStream>> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let handshakes = tasks.clone();
    tasks.spawn("listener", async move {
        while let Some((stream, from, mut slot)) = accept(&listener, &room, &sender).await {
            let acceptor = TlsAcceptor::from(certificates.current());
            let requires_certificate = certificates.identify_clients();
            let (sender, stats, rejections) = (sender.clone(), stats.clone(), rejections.clone());
            // One task per handshake: a slow client delays no other.
            handshakes.spawn_until_stopped("TLS handshake", async move {
                let handshake = tokio::select! {
                    handshake = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)) => handshake,
                    () = slot.evicted() => return,
                };
                let reason = match handshake {
                    // If the receiver is gone, the server is stopping.
                    Ok(Ok(stream)) => {
                        let connection = guard(stream, from, slot).requiring_certificate(requires_certificate);
                        return drop(sender.send(Ok(connection)).await);
                    }
                    Ok(Err(error)) => explain(&error),
                    Err(_) => {
                        slot.timed_out(Some(from.ip()));
                        format!("no TLS handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())
                    }
                };
                stats.tls_rejected.increment();
                rejections.log_client(from, &reason);
            });
        }
    });
    receiver
}

fn guard<S>(stream: S, from: SocketAddr, slot: Slot) -> ConnectionGuard<S> {
    ConnectionGuard::new(stream, slot, Deadlines::http2(Arc::default())).with_remote(from.ip())
}

/// The next connection; `None` when the receiver was dropped.
async fn accept<T>(
    listener: &TcpListener,
    room: &Arc<ConnectionLimiter>,
    sender: &mpsc::Sender<T>,
) -> Option<(TcpStream, SocketAddr, Slot)> {
    let accepted = tokio::select! {
        accepted = listener::accept(listener, room) => accepted,
        () = sender.closed() => return None,
    };
    // Nagle's algorithm would delay small responses; without the option the connection still works.
    let _ = accepted.0.set_nodelay(true);
    Some(accepted)
}

/// Error message of a failed handshake, with a hint at the cause.
fn explain(error: &std::io::Error) -> String {
    let text = error.to_string();
    let hint = if text.contains("peer sent no certificates") {
        ": the client presents no certificate (its `policy.server.cert`)"
    } else if text.contains("UnknownIssuer") {
        ": the client's certificate isn't signed by `tls.ca`"
    } else if text.contains("InvalidContentType") || text.contains("corrupt message") {
        ": the client doesn't speak TLS; its url must begin with https://"
    } else if text.contains("UnknownCA") || text.contains("CertificateUnknown") {
        ": the client doesn't trust this server's certificate (its `policy.server.ca`)"
    } else {
        ""
    };
    format!("{text}{hint}")
}

/// Certificate, key and trusted CAs, reloaded when their files change.
#[derive(Debug)]
pub struct Certificates {
    files: Tls,
    presence: ClientCertificates,
    current: RwLock<Loaded>,
}

/// What was read from the files.
#[derive(Clone, Debug)]
struct Loaded {
    config: Arc<ServerConfig>,
    validity: CertificateValidity,
}

impl Certificates {
    /// Loads the files. `presence`: with `ca`, whether clients must show a certificate.
    ///
    /// # Errors
    /// When one is missing or invalid.
    pub fn read(files: Tls, presence: ClientCertificates) -> Result<Self, TlsError> {
        let current = RwLock::new(load(&files, presence)?);
        Ok(Self { files, presence, current })
    }

    /// Whether clients are identified by certificates.
    fn identify_clients(&self) -> bool {
        self.files.ca.is_some()
    }

    fn current(&self) -> Arc<ServerConfig> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).config.clone()
    }

    /// The validity of those in use.
    pub fn validity(&self) -> CertificateValidity {
        self.current.read().unwrap_or_else(PoisonError::into_inner).validity.clone()
    }

    /// Reloads changed files, for as long as the server runs. Invalid ones are logged; the last good ones stay in use.
    pub async fn watch(self: Arc<Self>) {
        let mut last = self.stamps();
        loop {
            tokio::time::sleep(RELOAD_INTERVAL).await;
            let now = self.stamps();
            if now == last {
                continue;
            }
            last = now;
            match load(&self.files, self.presence) {
                Ok(loaded) => {
                    *self.current.write().unwrap_or_else(PoisonError::into_inner) = loaded;
                    tracing::info!(event = "certificates", "certificates reloaded");
                }
                Err(error) => {
                    tracing::error!(event = "certificates_wrong", %error,
                        "new certificates are invalid; the last good ones stay in use");
                }
            }
        }
    }

    /// Modification time and length of each file, for change detection; `None`: it can't be read.
    fn stamps(&self) -> Vec<Option<(SystemTime, u64)>> {
        let files = [Some(&self.files.cert), Some(&self.files.key), self.files.ca.as_ref()];
        let stamp = |path: &std::path::PathBuf| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        };
        files.into_iter().flatten().map(stamp).collect()
    }
}

fn load(files: &Tls, presence: ClientCertificates) -> Result<Loaded, TlsError> {
    let config = Arc::new(tls::server_config(files.ca.as_deref(), presence, &files.cert, &files.key)?);
    let files = CertificateFiles { own: Some(files.cert.clone()), ca: files.ca.clone() };
    Ok(Loaded { config, validity: CertificateValidity::read(&files) })
}

/// Remote address of a request.
pub fn peer_address<T>(request: &Request<T>) -> Option<SocketAddr> {
    let connection = request.extensions().get::<ConnectionInfo>().and_then(|it| it.remote);
    connection.or_else(|| request.extensions().get::<TcpConnectInfo>()?.remote_addr())
}
