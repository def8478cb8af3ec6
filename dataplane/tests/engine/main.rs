//! Black-box tests of the engine: packets in, packets out, with a clock that the test controls.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test fails by panicking")]

mod support;

mod address_conflicts;
mod address_selection;
mod allocations;
mod backends;
mod bad_input;
mod batch_boundaries;
mod captures;
mod coverage;
mod egress;
mod failover;
mod fair_shares;
mod flood;
mod fragments;
mod gateways;
mod hairpin;
mod health_checks;
mod icmp;
mod inbound;
mod model;
mod neighbors;
mod observe;
mod overlay;
mod policy_changes;
mod properties;
mod quarantine;
mod restarts;
mod scenario;
mod sctp;
mod spoofing;
mod tcp;
mod timers;
mod trace;
mod tunnel_authentication;
mod unassigned_endpoints;
mod uncovered;
mod vip_owner;
mod workers;
