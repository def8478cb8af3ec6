//! The port that gateways connect to, with or without TLS. Certificates are looked at every second and count from the next
//! connection on; what is wrong with a connection is said with the address that it came from.

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

use super::figures::Figures;
use super::identity::Refusals;
use crate::config::Tls;
use crate::failure::Failure;
use crate::listener::{self, Activity, Guard, Pace, Room, Slot};
use crate::xds::tls::{self, TlsError};

/// The longest a client may take for its handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often files of certificates are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Connections that the kernel takes before we do: all gateways come at once when a server is back. It has a limit of its own
/// (`net.core.somaxconn`).
const BACKLOG: u32 = 16_384;
/// Connections that wait to be served.
const QUEUE: usize = 128;

/// Who is at the other end, as requests see it.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Where it connects from.
    pub remote: Option<SocketAddr>,
    /// Where it connects to.
    pub local: Option<SocketAddr>,
    /// The certificates that it has presented, where that is asked for.
    pub certificates: Option<Arc<[CertificateDer<'static>]>>,
    /// Its streams.
    pub activity: Arc<Activity>,
}

impl Connection {
    fn of<S>(guard: &Guard<S>, stream: &TcpStream, certificates: Option<&[CertificateDer<'static>]>) -> Self {
        let activity = match guard.pace() {
            Pace::Streams { activity, .. } => activity.clone(),
            Pace::Requests { .. } | Pace::Free => Arc::default(),
        };
        let (remote, local) = (stream.peer_addr().ok(), stream.local_addr().ok());
        Self { remote, local, certificates: certificates.map(Into::into), activity }
    }
}

impl Connected for Guard<TcpStream> {
    type ConnectInfo = Connection;

    fn connect_info(&self) -> Connection {
        Connection::of(self, self.get_ref(), None)
    }
}

impl Connected for Guard<TlsStream<TcpStream>> {
    type ConnectInfo = Connection;

    fn connect_info(&self) -> Connection {
        let (stream, session) = self.get_ref().get_ref();
        Connection::of(self, stream, session.peer_certificates())
    }
}

/// Connections that wait to be served.
type Incoming<S> = mpsc::Receiver<std::io::Result<Guard<S>>>;

/// Opens the port.
///
/// # Errors
/// When it is in use or not ours.
pub fn bind(address: SocketAddr) -> Result<TcpListener, Failure> {
    let listener = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A server that was restarted has its port at once.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listener()
        .map_err(|error: std::io::Error| Failure::runtime(format_args!("listen: cannot listen on {address}: {error}")))
}

/// Connections without TLS.
pub fn plain(listener: TcpListener, room: Arc<Room>) -> Incoming<TcpStream> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        while let Some((stream, from, slot)) = accept(&listener, &room, &sender).await {
            if sender.send(Ok(guard(stream, from, slot))).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// Connections whose TLS stands.
pub fn secure(
    listener: TcpListener,
    room: Arc<Room>,
    certificates: Arc<Certificates>,
    (figures, refusals): (Arc<Figures>, Arc<Refusals>),
) -> Incoming<TlsStream<TcpStream>> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        while let Some((stream, from, mut slot)) = accept(&listener, &room, &sender).await {
            let acceptor = TlsAcceptor::from(certificates.current());
            let (sender, figures, refusals) = (sender.clone(), figures.clone(), refusals.clone());
            // A task of its own: one slow client keeps nobody waiting.
            tokio::spawn(async move {
                let handshake = tokio::select! {
                    handshake = timeout(PATIENCE, acceptor.accept(stream)) => handshake,
                    () = slot.superseded() => return,
                };
                let why = match handshake {
                    // Nobody takes connections any more: the server stops.
                    Ok(Ok(stream)) => return drop(sender.send(Ok(guard(stream, from, slot))).await),
                    Ok(Err(error)) => explain(&error),
                    Err(_) => {
                        slot.expire(Some(from.ip()));
                        format!("no TLS handshake within {} s", PATIENCE.as_secs())
                    }
                };
                figures.tls_refused.add();
                refusals.log_client(from, &why);
            });
        }
    });
    receiver
}

fn guard<S>(stream: S, from: SocketAddr, slot: Slot) -> Guard<S> {
    Guard::new(stream, slot, Pace::streams(Arc::default())).seen_from(from.ip())
}

/// The next connection; `None` when nobody takes them any more.
async fn accept<T>(
    listener: &TcpListener,
    room: &Arc<Room>,
    sender: &mpsc::Sender<T>,
) -> Option<(TcpStream, SocketAddr, Slot)> {
    let accepted = tokio::select! {
        accepted = listener::accept(listener, room) => accepted,
        () = sender.closed() => return None,
    };
    // Without it, small responses wait for each other; a kernel that refuses is no reason to.
    let _ = accepted.0.set_nodelay(true);
    Some(accepted)
}

/// What a failed handshake says, in words for people.
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

/// Certificate, key and trusted authorities, kept up to date.
#[derive(Debug)]
pub struct Certificates {
    files: Tls,
    current: RwLock<Arc<ServerConfig>>,
}

impl Certificates {
    /// Reads them.
    ///
    /// # Errors
    /// When one can't be used.
    pub fn read(files: Tls) -> Result<Self, TlsError> {
        let current = RwLock::new(Arc::new(load(&files)?));
        Ok(Self { files, current })
    }

    fn current(&self) -> Arc<ServerConfig> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes up files that have changed, for as long as the server runs. What can't be used is said, and the last good ones stay.
    pub async fn follow(self: Arc<Self>) {
        let mut seen = self.state();
        loop {
            tokio::time::sleep(LOOK).await;
            let now = self.state();
            if now == seen {
                continue;
            }
            seen = now;
            match load(&self.files) {
                Ok(config) => {
                    *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
                    tracing::info!(event = "certificates", "certificates read again");
                }
                Err(error) => {
                    tracing::error!(event = "certificates_wrong", %error, "new certificates can't be used; the last good ones stay");
                }
            }
        }
    }

    /// What tells whether a file is another one: its content may be long, and a secret.
    fn state(&self) -> Vec<Option<(SystemTime, u64)>> {
        let files = [Some(&self.files.cert), Some(&self.files.key), self.files.ca.as_ref()];
        let state = |path: &std::path::PathBuf| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        };
        files.into_iter().flatten().map(state).collect()
    }
}

fn load(files: &Tls) -> Result<ServerConfig, TlsError> {
    tls::server(files.ca.as_deref(), &files.cert, &files.key)
}

/// Where a request comes from.
pub fn peer_address<T>(request: &Request<T>) -> Option<SocketAddr> {
    let connection = request.extensions().get::<Connection>().and_then(|it| it.remote);
    connection.or_else(|| request.extensions().get::<TcpConnectInfo>()?.remote_addr())
}
