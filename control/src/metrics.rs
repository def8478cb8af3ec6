//! Prometheus: `/metrics`, and `/healthz` and `/readyz` beside it. Numbers are read from the workers' own counters when
//! somebody asks; nothing is counted twice.

mod collect;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::failure::Failure;
use crate::gateway::state::GatewayState;

/// What Prometheus calls its text format.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Opens the port, before packets flow.
///
/// # Errors
/// When it is in use or not ours.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address)
        .await
        .map_err(|error| Failure::runtime(format_args!("metrics.listen: cannot listen on {address}: {error}")))
}

/// Answers until told to stop.
pub async fn serve(state: Arc<GatewayState>, listener: TcpListener, mut stop: watch::Receiver<bool>) {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collect::Collector(state.clone())));
    let shared = Arc::new(Shared { registry, state });
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(shared);
    let server = axum::serve(listener, router);
    tokio::select! {
        result = server => if let Err(error) = result {
            tracing::error!(%error, "the metrics port has failed");
        },
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

struct Shared {
    registry: Registry,
    state: Arc<GatewayState>,
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &shared.registry) {
        Ok(()) => (StatusCode::OK, [(header::CONTENT_TYPE, CONTENT_TYPE)], text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], error.to_string()),
    }
}

async fn ready(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    if shared.state.ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}
