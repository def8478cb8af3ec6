//! Which gateways serve, as both sides say it: a policy server tells each gateway of its policy a view, and gives those that
//! serve leases for as long as they beat.
//!
//! ```text
//!   gateway: wish -> client -> beat ------------> policyd/members: roster -> store
//!            status, lease <- client <- notice <---------------------+
//! ```

pub mod client;
pub mod secret;
pub mod view;

pub use self::client::{Authority, Handle, LeaseClock, MembersClient, Plan, Status, Wanted};
pub use self::secret::{Commitment, Secret};
pub use self::view::{Beat, Fingerprint, Member, TunnelKey, View, Wish};
