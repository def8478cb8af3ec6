//! Netlink (RFC 3549): the one client of gateway and node agent.
//!
//! [`Client`] sends requests and dumps tables; [`Subscription`] receives notifications. Requests are built with
//! [`packet_route`]'s types. What the kernel sends is decoded into an [`NetworkEvent`], which has only the attributes that are
//! used; a caller that needs a whole message, e.g. to delete exactly what was listed, decodes it with `packet_route`.
//! Sockets work in the network namespace of the thread that opens them, and need a tokio runtime.

mod client;
mod event;
mod message;
mod subscription;
mod tables;

pub use client::Client;
pub use event::{
    Address, Change, Link, LinkState, NTF_EXT_MANAGED, Neighbor, NetworkEvent, NextHop, NextHopObject,
    NextHopObjectTarget, Route,
};
pub use message::{Message, Messages, Request, attributes, push_attribute};
pub use netlink_packet_core::{DecodeError, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
pub use netlink_packet_route as packet_route;
pub use netlink_sys::protocols;
pub use subscription::Subscription;
pub use tables::{FAMILIES, neighbor_message};

/// The protocol number (`RTPROT_*`) of routes, rules and neighbors that vipgate installs, as `ip` shows it; no routing
/// daemon uses it.
pub const PROTOCOL: u8 = 118;
