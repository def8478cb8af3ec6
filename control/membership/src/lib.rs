//! Membership of a group of gateways, as decisions: nothing in this crate does I/O, reads a clock or needs a runtime;
//! time is an argument. The policy server sends every gateway a membership view and grants active gateways leases as
//! long as they send heartbeats.
//!
//! ```text
//!   gateway:  heartbeat --------> policyd: authority (decides) -> store (shared by all servers)
//!             status, lease <---------------- view update
//! ```
//! `authority` decides which gateways are active, at the server. At a gateway, `member` turns inputs into effects, from
//! `group_state`, which decides when it may open sessions and which state it requests; `heartbeat` decides for the stream
//! to the server, `succession` which process of a peer counts while the server is away; `replication` has the state
//! machines of session replication between gateways. `view`, `status` and `secret` are the values that both sides
//! exchange. The processes around these decide nothing: they turn sockets and timers into inputs, and effects into sockets.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod authority;
#[cfg(test)]
mod fixtures;
pub mod group_state;
pub mod heartbeat;
pub mod member;
pub mod replication;
#[cfg(test)]
mod resharding_model;
pub mod secret;
pub mod status;
pub mod succession;
pub mod view;

pub use self::secret::{Commitment, Secret};
pub use self::view::{
    DesiredState, DrainBlock, DrainBlockReason, Fingerprint, Heartbeat, Member, MembershipView, TunnelKey,
};
