//! Admin API: JSON on a Unix socket, for the command line and other local clients with access to the file. Each reply is one
//! type, beside what makes it from the gateway's state: the socket, `-o json` and the tables have it in common.
//!
//! `socket` creates the socket file, `connection` serves its clients by the `protocol`, `server` answers the requests by
//! its siblings, `client` is the client side.

use std::sync::Arc;

use tokio::net::UnixListener;
use vipgate_common::Tasks;

use crate::state::GatewayState;

pub mod capture;
pub mod capture_filter;
pub(crate) mod client;
mod connection;
pub mod drops;
pub mod endpoints;
pub mod explain;
pub mod filter;
pub mod membership;
mod placement;
pub mod ports;
pub mod protocol;
pub mod server;
pub mod services;
mod socket;
pub mod status;
#[cfg(test)]
mod tests;
pub mod trace;
pub mod tracking;
pub mod vips;
pub mod workers;

pub use client::{Client, ClientError};
pub(crate) use connection::{AdminService, Replies, one, serve as serve_requests};
pub use protocol::PROTOCOL;
pub use server::Request;
pub(crate) use server::Service;
pub use socket::{Socket, SocketFile, bind};

/// Runs a gateway's admin API until the stop signal of `tasks`.
pub async fn serve(state: Arc<GatewayState>, listener: UnixListener, tasks: Tasks) {
    let connections = state.connections.admin.clone();
    serve_requests(Service::new(state), listener, connections, tasks).await;
}
