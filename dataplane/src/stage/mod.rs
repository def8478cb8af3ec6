//! The stages of the packet pipeline, one file each, in this order: decap, `complete_checksum`, parse, `arp_nd`, `tunnel_echo`,
//! `virtual_reassembly`, `forward_to_owner`, lookup, `fast_path`, failover, revalidate, `icmp_error`, classify, snat,
//! `load_balance`, rewrite (which uses route), `stateless_reply`, `health_check`, encap, reject. `health_check` and reject write their packets
//! with `icmp_reply`.
//!
//! A stage is a function over a batch. It gets exactly the tables that it may read or change.

pub mod arp_nd;
pub mod classify;
pub mod complete_checksum;
pub mod context;
pub mod decap;
pub mod encap;
pub mod failover;
pub mod fast_path;
pub mod flow_owner;
pub mod forward_to_owner;
pub mod health_check;
pub mod icmp_error;
pub mod icmp_reply;
pub mod load_balance;
pub mod lookup;
pub mod parse;
pub mod pipeline;
pub mod reject;
pub mod reply_limiter;
pub mod revalidate;
pub mod rewrite;
pub mod route;
pub mod snat;
pub mod stateless_reply;
pub mod trace;
pub mod tunnel_echo;
pub mod virtual_reassembly;
