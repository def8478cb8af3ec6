//! Prometheus metrics (`/metrics`) and the health endpoints `/healthz` and `/readyz`. Values are read from the workers'
//! own counters at each scrape.

pub mod definitions;
mod exposition;
mod families;
mod group;
mod reference;

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
use vipgate_common::Tasks;

pub use self::reference::metrics_reference;
use crate::listener::{self, ConnectionLimiter};
use crate::metric::Family;
use crate::state::GatewayState;
use crate::state::lease::LeaseStatus;

/// Binds the metrics port.
///
/// # Errors
/// When the port is in use, or the address isn't local.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => "; another process uses it (`ss -ltnp` shows which): choose another port",
            io::ErrorKind::AddrNotAvailable => "; no interface of this host has that address",
            _ => "",
        };
        io::Error::new(error.kind(), format!("metrics.listen: cannot listen on {address}: {error}{hint}"))
    })
}

/// Why a process isn't ready.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum NotReady {
    /// No policy is in force, and why, if that is known.
    #[error("not ready{}", .0.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())]
    NoPolicy(Option<String>),
    /// The XDP program's maps don't hold all that policy needs.
    #[error("not ready: capture is incomplete: {0}")]
    CaptureIncomplete(Arc<str>),
    /// The gateway has a fault.
    #[error("not ready: {0}")]
    Fault(String),
    /// The gateway's lease has expired.
    #[error("not ready: the lease has expired: neither the policy server nor all other gateways are reachable")]
    NoLease,
    /// The gateway had a fault, and may be active again only after the hold-down time.
    #[error("not ready: hold-down after: {0}")]
    HoldDown(Arc<str>),
}

/// A monitored process: its metrics and its readiness, evaluated at each request.
#[derive(Clone)]
pub struct Monitored {
    /// All metrics.
    pub(crate) families: Arc<dyn Fn() -> Vec<Family> + Send + Sync>,
    /// Whether it is ready.
    pub(crate) ready: Arc<dyn Fn() -> Result<(), NotReady> + Send + Sync>,
}

impl Monitored {
    /// Monitors a gateway.
    pub fn gateway(state: Arc<GatewayState>) -> Self {
        let metrics_state = state.clone();
        Self {
            families: Arc::new(move || families::collect(&metrics_state)),
            ready: Arc::new(move || {
                if let Some(error) = &state.capture.load().error {
                    return Err(NotReady::CaptureIncomplete(error.clone()));
                }
                if !state.ready.load(Ordering::Relaxed) {
                    return Err(NotReady::NoPolicy(state.no_policy_reason()));
                }
                let (tracking, group) = (state.tracking.load(), state.group.load());
                match tracking.fault() {
                    Some(fault) => Err(NotReady::Fault(fault)),
                    None if group.is_active() && group.lease() == LeaseStatus::Expired => Err(NotReady::NoLease),
                    // During hold-down a gateway may still be active, if no other one is able.
                    None if group.may_open_sessions() => Ok(()),
                    None => Err(match &tracking.unable {
                        Some(fault) => NotReady::HoldDown(fault.clone()),
                        None => NotReady::NoPolicy(state.no_policy_reason()),
                    }),
                }
            }),
        }
    }
}

/// Serves HTTP until the stop signal of `tasks`, which connections are among.
pub async fn serve(monitored: Monitored, listener: TcpListener, connections: Arc<ConnectionLimiter>, tasks: Tasks) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(monitored);
    listener::serve(listener, connections, router, tasks).await;
}

async fn metrics(State(monitored): State<Monitored>, headers: HeaderMap) -> impl IntoResponse {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    let accepts_open_metrics = accepted
        .flat_map(|accept| accept.split(','))
        .any(|media_type| media_type.trim().starts_with("application/openmetrics-text"));
    let families = (monitored.families)();
    let (content_type, text) = if accepts_open_metrics {
        (exposition::OPEN_METRICS, exposition::open_metrics(families))
    } else {
        (exposition::TEXT, exposition::text(&families))
    };
    match text {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, content_type)], text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], format!("{error}\n")),
    }
}

async fn ready(State(monitored): State<Monitored>) -> impl IntoResponse {
    match (monitored.ready)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::listener::{Limits, RejectReason};
    use crate::metric::{Kind, Label, Metric};

    /// Far more than any step takes on a slow machine.
    const TIMEOUT: Duration = Duration::from_secs(20);
    /// Larger than the socket buffers of a client that doesn't read.
    const LARGE_PAGE: usize = 8 << 20;
    const SCRAPE: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";

    static PAGE: Metric = Metric { name: "page", kind: Kind::Gauge, labels: &[Label::any("text", "")], help: "A page" };

    /// A metrics port with a page of at least the given size, and a low connection limit.
    struct Port {
        address: SocketAddr,
        connections: Arc<ConnectionLimiter>,
        tasks: Tasks,
    }

    impl Port {
        async fn open(page: usize) -> Self {
            let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
            let address = listener.local_addr().unwrap();
            let connections = ConnectionLimiter::new("test", Limits { connections: 8, per_address: 4 });
            let page: Arc<str> = "x".repeat(page).into();
            let monitored = Monitored {
                families: Arc::new(move || vec![PAGE.by_label([(&*page, 1)])]),
                ready: Arc::new(|| Ok(())),
            };
            let tasks = Tasks::default();
            tasks.spawn("server", serve(monitored, listener, connections.clone(), tasks.clone()));
            Self { address, connections, tasks }
        }

        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.unwrap()
        }

        /// A connection that has sent a request and received the first byte of the response.
        async fn scrape(&self) -> TcpStream {
            let mut client = self.connect().await;
            client.write_all(SCRAPE).await.unwrap();
            assert_eq!(client.read_u8().await.unwrap(), b'H');
            client
        }
    }

    /// Reads until the connection is closed or reset.
    async fn read_rest(mut client: TcpStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        let end = timeout(TIMEOUT, client.read_to_end(&mut bytes)).await;
        drop(end.expect("the connection is closed"));
        bytes
    }

    #[tokio::test]
    async fn http_2_is_rejected() {
        let port = Port::open(1).await;
        // RFC 9113 section 3.4: the preface and empty settings. Then GET /metrics as a single HEADERS frame, encoded by
        // RFC 7541.
        let fields = b"\x82\x86\x04\x08/metrics\x01\x04test";
        let head = [0, 0, fields.len() as u8, 1, 5, 0, 0, 0, 1];
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        let mut client = port.connect().await;
        client.write_all(&[&preface[..], &head[..], &fields[..]].concat()).await.unwrap();
        let response = read_rest(client).await;
        assert!(response.is_empty() || response.starts_with(b"HTTP/1.1 400"), "{}", response.escape_ascii());
        let page = String::from_utf8(read_rest(port.scrape().await).await).unwrap();
        assert!(page.contains("vipgate_page{text=\"x\"} 1\n"), "{page}");
    }

    #[tokio::test]
    async fn a_scrape_in_progress_is_not_superseded() {
        let port = Port::open(LARGE_PAGE).await;
        let scrape = port.scrape().await;
        let mut clients = Vec::new();
        for _ in 0..20 {
            clients.push(port.connect().await);
        }
        let accepted = async {
            while port.connections.len() as u64 + port.connections.rejected(RejectReason::Superseded) < 21 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TIMEOUT, accepted).await.expect("all connections are accepted");
        assert!(read_rest(scrape).await.len() > LARGE_PAGE);
    }

    #[tokio::test]
    async fn clients_that_do_not_read_do_not_block_a_scrape() {
        let port = Port::open(LARGE_PAGE).await;
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(port.scrape().await);
        }
        assert_eq!(port.connections.len(), 4);
        assert!(read_rest(port.scrape().await).await.len() > LARGE_PAGE);
    }

    #[tokio::test]
    async fn a_stop_finishes_responses_in_progress_and_closes_idle_connections() {
        let port = Port::open(LARGE_PAGE).await;
        let (silent, mut idle) = (port.connect().await, port.connect().await);
        idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
        let mut response = Vec::new();
        while !response.ends_with(b"\r\n\r\nok\n") {
            response.push(timeout(TIMEOUT, idle.read_u8()).await.unwrap().unwrap());
        }
        let scrape = port.scrape().await;
        let stopped = async {
            assert_eq!((read_rest(silent).await.len(), read_rest(idle).await.len()), (0, 0));
            while TcpStream::connect(port.address).await.is_ok() {}
            assert!(read_rest(scrape).await.len() > LARGE_PAGE);
        };
        let (is_stopped, ()) = tokio::join!(port.tasks.stop(TIMEOUT), stopped);
        assert!(is_stopped);
    }
}
