//! The engine from outside: packets in, packets out, and time that tests make.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test fails by panicking")]

mod support;

mod allocations;
mod backends;
mod bad_input;
mod captures;
mod conflicts;
mod cuts;
mod egress;
mod explain;
mod fair_shares;
mod flood;
mod forged;
mod fragments;
mod gateways;
mod hairpin;
mod health;
mod homeless;
mod icmp;
mod inbound;
mod model;
mod neighbours;
mod overlay;
mod policy_changes;
mod pool;
mod properties;
mod quarantine;
mod restarts;
mod sctp;
mod spoofing;
mod story;
mod takeover;
mod tally;
mod tcp;
mod timers;
mod uncovered;
mod vip_owner;
mod watch;
mod workers;
