//! Policy from a real Kubernetes API server.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access;
mod address_record;
mod apiserver;
mod fixture;
mod ipam;
mod membership;
mod pods;
mod source;
mod status;
