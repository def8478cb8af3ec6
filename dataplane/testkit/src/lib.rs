//! Gateways under test, for the engine's tests and the fuzz targets: workers over in-memory devices, a policy, and a
//! clock that only the test advances. Every packet sent is checked, no frame may get lost, and every counter change
//! must be asserted.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod accounting;
pub mod capture;
pub mod cluster;
pub mod connection;
pub mod gateway;
pub mod oracle;
pub mod packets;
pub mod policy_set;
pub mod prediction;
pub mod services;
pub mod setup;
pub mod spec;

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::flow::ids::InterfaceId;

pub use self::capture::*;
pub use self::connection::*;
pub use self::gateway::*;
pub use self::oracle::*;
pub use self::packets::*;
pub use self::policy_set::*;
pub use self::setup::*;
pub use self::spec::*;

/// The gateway's inside interface.
pub const INSIDE: InterfaceId = InterfaceId(0);
/// Its outside interface.
pub const OUTSIDE: InterfaceId = InterfaceId(1);
/// MAC address of the inside interface.
pub const INSIDE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x10];
/// MAC address of the outside interface.
pub const OUTSIDE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x20];
/// MAC address of every pod.
pub const POD_MAC: [u8; 6] = [2, 0, 0, 0, 1, 0x01];
/// MAC address of the router outside.
pub const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 2, 0x01];

/// An IP address from text.
pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// An address and port from text.
pub fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}
