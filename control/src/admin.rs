//! The admin socket: gRPC on a Unix socket, for the command line and whoever else may open the file.
//!
//! `socket` has the file and the server, `server` and those beside it the answers, `client` the other end.

pub mod capture;
pub mod capture_filter;
mod client;
mod drops;
mod explain;
pub mod filter;
mod group;
pub(crate) mod ports;
mod server;
mod services;
mod sessions;
mod socket;
mod trace;
mod tracking;

pub use client::{Client, ClientError, Packets, Slices};
#[cfg(any(test, fuzzing))]
pub(crate) use server::Service;
pub use socket::{Socket, SocketError, bind, serve};

/// The generated messages and services.
#[expect(missing_docs, unused_qualifications, clippy::pedantic, reason = "generated; the .proto file has the comments")]
pub mod proto {
    tonic::include_proto!("vipgate.admin.v1");
}

/// Version of the interface: raised when an older client would misunderstand.
pub const PROTOCOL: u32 = 1;
