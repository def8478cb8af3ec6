//! Membership, shared by both sides: the policy server sends every gateway a membership view and grants active gateways
//! leases as long as they send heartbeats.
//!
//! ```text
//!   gateway:  heartbeat --------> policyd: authority (decides) -> store (shared by all servers)
//!             status, lease <---------------- view update
//! ```

pub mod authority;
pub mod secret;
pub mod status;
pub mod view;

pub use self::secret::{Commitment, Secret};
pub use self::view::{DesiredState, Fingerprint, Heartbeat, Member, MembershipView, TunnelKey};
