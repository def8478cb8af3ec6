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
use crate::listener::{Http, Limits, Room};

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
pub async fn serve(monitored: Monitored, listener: TcpListener, room: Arc<Room>, mut stop: watch::Receiver<bool>) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(monitored);
    let server = axum::serve(Http::new(listener, room), router);
    tokio::select! {
        result = server => if let Err(error) = result {
            tracing::error!(%error, "the metrics port has failed");
        },
        _ = stop.wait_for(|stop| *stop) => {}
    }
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
