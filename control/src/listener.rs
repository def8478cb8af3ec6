//! TCP listeners with connection limits, in total and per source address. When a limit is reached, the longest idle
//! connection is evicted, so idle connections can't lock out other clients.

mod guard;
mod limiter;
mod reserve;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt as _;
use vipgate_common::Tasks;

pub use self::guard::{ConnectionGuard, Deadlines, OpenStream, StreamCounter};
pub use self::limiter::{ConnectionLimiter, Exchange, Limits, RejectReason, Slot, source_prefix};
pub use self::reserve::{DescriptorReserve, limit_by_descriptors, raise_descriptor_limit};
use crate::metric::{Family, Label, metrics};

/// Limits of a metrics port: scrapes are few and short.
pub(crate) const METRICS_LIMITS: Limits = Limits { connections: 256, per_address: 64 };

/// Delay after a failed accept(2), usually for lack of file descriptors.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum size of an HTTP/1 request header, bytes.
const MAX_HEADER_BYTES: usize = 16 << 10;

/// Accepts the next connection that gets a slot. Others are closed at once.
pub async fn accept(listener: &TcpListener, limiter: &Arc<ConnectionLimiter>) -> (TcpStream, SocketAddr, Slot) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let admitted = limiter.admit(from.ip());
                // Lets the task of an evicted connection close it now.
                tokio::task::yield_now().await;
                if let Ok(slot) = admitted {
                    return (stream, from, slot);
                }
            }
            Err(error) => accept_failed(limiter, &error).await,
        }
    }
}

/// Counts and logs a failed accept(2), and waits before the next attempt.
pub async fn accept_failed(limiter: &ConnectionLimiter, error: &io::Error) {
    limiter.accept_failed(error);
    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
}

/// Serves HTTP/1 until the stop signal of `tasks`, whose connections then finish the current responses. HTTP/2 is
/// excluded: its concurrent streams would share one slot.
pub async fn serve(listener: TcpListener, limiter: Arc<ConnectionLimiter>, router: Router, tasks: Tasks) {
    loop {
        let (stream, from, slot) = tokio::select! {
            accepted = accept(&listener, &limiter) => accepted,
            () = tasks.stopped() => return,
        };
        let exchange = slot.exchange();
        let guard = ConnectionGuard::new(stream, slot, Deadlines::http1(exchange.clone())).with_remote(from.ip());
        tasks.spawn("HTTP connection", serve_connection(guard, exchange, router.clone(), tasks.clone()));
    }
}

/// Serves the requests of one connection.
async fn serve_connection(guard: ConnectionGuard<TcpStream>, exchange: Arc<Exchange>, router: Router, tasks: Tasks) {
    let service = service_fn(move |request: Request<Incoming>| {
        exchange.begin();
        router.clone().oneshot(request)
    });
    let connection =
        http1::Builder::new().max_buf_size(MAX_HEADER_BYTES).serve_connection(TokioIo::new(guard), service);
    let mut connection = pin!(connection);
    tokio::select! {
        // Fails when the client disconnects, times out or doesn't speak HTTP/1: not logged.
        _ = connection.as_mut() => {}
        () = tasks.stopped() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

const LISTENER: Label = Label::any("listener", "`admin`, `metrics`, `health`; of a policy server `grpc`, `metrics`");
const REASON: Label = Label::names("reason", || RejectReason::ALL.map(RejectReason::name).to_vec());

metrics! {
    /// Connections of listeners.
    pub CONNECTION_METRICS:
    CONNECTIONS = Gauge("connections", [LISTENER]): "Open connections, by listener";
    CONNECTIONS_REFUSED = Counter("connections_refused", [LISTENER, REASON]):
        "Connections closed or never accepted: too many per address or in total, idle and superseded by newer ones, \
         too slow, or no file descriptors left";
}

/// The metrics of these listeners.
pub(crate) fn families(limiters: &[&ConnectionLimiter]) -> [Family; 2] {
    let open = limiters.iter().map(|limiter| (limiter.name(), limiter.len() as u64));
    let rejected = limiters.iter().flat_map(|limiter| {
        RejectReason::ALL.map(|reason| {
            let labels = vec![("listener", limiter.name().to_owned()), ("reason", reason.name().to_owned())];
            (labels, limiter.rejected(reason))
        })
    });
    [CONNECTIONS.by_label(open), CONNECTIONS_REFUSED.family(rejected.collect())]
}
