//! Prometheus: `/metrics`, and `/healthz` and `/readyz` beside it. Numbers are read from the workers' own counters when
//! somebody asks; nothing is counted twice.

mod exposition;
mod families;
mod group;

pub(crate) use self::families::{Family, Kind, Labels, family};

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::failure::Failure;
use crate::gateway::state::GatewayState;
use crate::listener::{self, Limits, Room};

/// Connections: of monitoring there are few, each for a moment.
const LIMITS: Limits = Limits { connections: 256, per_address: 64 };

/// The places of a metrics port.
pub fn room() -> Arc<Room> {
    Room::new("metrics", LIMITS)
}

/// The metrics port can't be had.
#[derive(Debug, Error)]
#[error("metrics.listen: cannot listen on {address}: {error}{hint}")]
pub struct BindError {
    address: SocketAddr,
    error: io::Error,
    hint: &'static str,
}

impl From<BindError> for Failure {
    fn from(error: BindError) -> Self {
        Self::runtime(error)
    }
}

/// Opens the port, before packets flow.
///
/// # Errors
/// When it is in use or not ours.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => "; another process has it (`ss -ltnp` says which): choose another port",
            io::ErrorKind::AddrNotAvailable => "; the address is on no interface of this machine",
            _ => "",
        };
        BindError { address, error, hint }
    })
}

/// What is monitored: values that are read whenever somebody asks, and whether all is ready.
#[derive(Clone)]
pub struct Monitored {
    /// All metrics.
    pub(crate) families: Arc<dyn Fn() -> Vec<Family> + Send + Sync>,
    /// Whether it does what it is for, or why not.
    pub(crate) ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

impl Monitored {
    /// A gateway.
    pub fn gateway(state: Arc<GatewayState>) -> Self {
        let readable = state.clone();
        Self {
            families: Arc::new(move || families::read(&readable)),
            ready: Arc::new(move || {
                if !state.ready.load(Ordering::Relaxed) {
                    return Err(state.waits_for().unwrap_or_default());
                }
                let tracking = state.tracking.load();
                match tracking.fault() {
                    Some(why) => Err(why),
                    // One that is held down serves as long as nobody else can.
                    None if state.group.load().is_open() => Ok(()),
                    None => Err(match &tracking.unable {
                        Some(why) => format!("held down, since until just now {why}"),
                        None => state.waits_for().unwrap_or_default(),
                    }),
                }
            }),
        }
    }
}

/// Answers until told to stop.
pub async fn serve(monitored: Monitored, listener: TcpListener, room: Arc<Room>, stop: watch::Receiver<bool>) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(monitored);
    listener::serve(listener, room, router, stop).await;
}

async fn metrics(State(monitored): State<Monitored>, headers: HeaderMap) -> impl IntoResponse {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    let open = accepted
        .flat_map(|accept| accept.split(','))
        .any(|kind| kind.trim().starts_with("application/openmetrics-text"));
    let families = (monitored.families)();
    let (kind, text) = if open {
        (exposition::OPEN_METRICS, exposition::open_metrics(families))
    } else {
        (exposition::TEXT, exposition::text(&families))
    };
    match text {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], format!("{error}\n")),
    }
}

async fn ready(State(monitored): State<Monitored>) -> impl IntoResponse {
    match (monitored.ready)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(why) if why.is_empty() => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::task::JoinHandle;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::listener::Reason;

    /// Far more than anything takes on a slow machine.
    const LONG: Duration = Duration::from_secs(20);
    /// Longer than what the kernel keeps for a client that reads nothing.
    const LONG_PAGE: usize = 8 << 20;
    const SCRAPE: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";

    /// A port with a page of at least so many bytes, and few places.
    struct Port {
        at: SocketAddr,
        room: Arc<Room>,
        stop: watch::Sender<bool>,
        server: JoinHandle<()>,
    }

    impl Port {
        async fn open(page: usize) -> Self {
            let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
            let at = listener.local_addr().unwrap();
            let room = Room::new("test", Limits { connections: 8, per_address: 4 });
            let page: Arc<str> = "x".repeat(page).into();
            let values = move || vec![(vec![("text", page.to_string())], 1)];
            let monitored = Monitored {
                families: Arc::new(move || vec![family("page", "A page", Kind::Gauge, values())]),
                ready: Arc::new(|| Ok(())),
            };
            let (stop, stopped) = watch::channel(false);
            let server = tokio::spawn(serve(monitored, listener, room.clone(), stopped));
            Self { at, room, stop, server }
        }

        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.at).await.unwrap()
        }

        /// A connection that has asked for the page, and got the first byte of it.
        async fn scrape(&self) -> TcpStream {
            let mut client = self.connect().await;
            client.write_all(SCRAPE).await.unwrap();
            assert_eq!(client.read_u8().await.unwrap(), b'H');
            client
        }
    }

    /// Reads until the connection ends; a reset is as good an end.
    async fn rest(mut client: TcpStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        let end = timeout(LONG, client.read_to_end(&mut bytes)).await;
        drop(end.expect("the connection ends"));
        bytes
    }

    #[tokio::test]
    async fn http_2_is_not_spoken() {
        let port = Port::open(1).await;
        // RFC 9113 section 3.4: the preface and empty settings. Then GET /metrics as a stream's only frame; its fields are RFC 7541's.
        let fields = b"\x82\x86\x04\x08/metrics\x01\x04test";
        let head = [0, 0, fields.len() as u8, 1, 5, 0, 0, 0, 1];
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        let mut client = port.connect().await;
        client.write_all(&[&preface[..], &head[..], &fields[..]].concat()).await.unwrap();
        let answer = rest(client).await;
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{}", answer.escape_ascii());
        let page = String::from_utf8(rest(port.scrape().await).await).unwrap();
        assert!(page.contains("vipgate_page{text=\"x\"} 1\n"), "{page}");
    }

    #[tokio::test]
    async fn a_scrape_under_way_gives_way_to_nobody() {
        let port = Port::open(LONG_PAGE).await;
        let scrape = port.scrape().await;
        let mut crowd = Vec::new();
        for _ in 0..20 {
            crowd.push(port.connect().await);
        }
        let taken = async {
            while port.room.len() as u64 + port.room.refused(Reason::Superseded) < 21 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, taken).await.expect("all are accepted");
        assert!(rest(scrape).await.len() > LONG_PAGE);
    }

    #[tokio::test]
    async fn who_asks_and_reads_nothing_keeps_no_scrape_out() {
        let port = Port::open(LONG_PAGE).await;
        let mut crowd = Vec::new();
        for _ in 0..6 {
            crowd.push(port.scrape().await);
        }
        assert_eq!(port.room.len(), 4);
        assert!(rest(port.scrape().await).await.len() > LONG_PAGE);
    }

    #[tokio::test]
    async fn what_is_answered_when_it_stops_is_finished_and_all_else_closed() {
        let port = Port::open(LONG_PAGE).await;
        let (silent, mut idle) = (port.connect().await, port.connect().await);
        idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\nok\n") {
            answer.push(timeout(LONG, idle.read_u8()).await.unwrap().unwrap());
        }
        let scrape = port.scrape().await;
        port.stop.send(true).unwrap();
        timeout(LONG, port.server).await.unwrap().unwrap();
        assert!(TcpStream::connect(port.at).await.is_err());
        assert_eq!((rest(silent).await.len(), rest(idle).await.len()), (0, 0));
        assert!(rest(scrape).await.len() > LONG_PAGE);
    }
}
