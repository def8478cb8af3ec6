//! Policy, without I/O: texts to manifests, manifests to a compiled policy of all gateways, and each gateway's part of
//! it.
//!
//! Read up from the ground: [`yaml`] gives every value its line, [`diagnostic`] is what is wrong where, [`schema`] has
//! the shapes of fields, [`manifest`] turns documents into objects, [`compiler`] turns objects into VIPs, policies,
//! endpoints and Services, placed on gateways. [`ipam`] decides which addresses of pools Services get; what is given of
//! pools, to policies too, is in the [`address_record`].
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod address_record;
pub mod compiler;
pub mod diagnostic;
pub mod fingerprint;
pub mod ipam;
pub mod manifest;
pub mod schema;
mod shortage;
pub mod yaml;

pub use self::shortage::Shortage;
