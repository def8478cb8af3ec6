//! Admin API: gRPC on a Unix socket, for the command line and other local clients with access to the file.
//!
//! `socket` creates the socket file and runs the server, `server` and its siblings answer requests, `client` is the
//! client side.

pub mod capture;
pub mod capture_filter;
pub(crate) mod client;
mod drops;
mod explain;
pub mod filter;
mod membership;
mod placement;
pub(crate) mod ports;
mod server;
pub(crate) mod services;
mod socket;
mod status;
#[cfg(test)]
mod tests;
mod trace;
mod tracking;
mod workers;

pub use client::{Client, ClientError, PacketStream, SessionStream};
pub use placement::PlacementError;
#[cfg(any(test, fuzzing))]
pub(crate) use server::Service;
pub use socket::{Socket, SocketError, SocketFile, bind, serve, serve_router};

/// Generated messages and services.
#[expect(unused_qualifications, clippy::pedantic, reason = "generated")]
pub mod proto {
    tonic::include_proto!("vipgate.admin.v1");
}

/// Version of the API: raised by each incompatible change.
pub const PROTOCOL: u32 = 1;
