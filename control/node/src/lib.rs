//! The node's half of the gateway: which packets of which pods go to which gateway, and how the kernel of a node is
//! programmed for it.

pub mod agent;
pub mod destinations;
pub mod drops;
pub mod echo;
pub mod error;
pub mod hold;
pub mod indices;
pub mod kernel;
pub mod liveness;
pub mod mark_users;
pub mod marks;
pub mod nft;
pub mod plan;
pub mod policy;
pub mod selection;
pub mod tunnel;
