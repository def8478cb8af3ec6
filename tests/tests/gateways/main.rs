//! Several gateways between ECMP routers: together they act as one, whichever of them fails.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod connections;
mod drain;
mod ecmp_rehash;
mod failover;
mod forwarding_loops;
mod icmp_errors;
mod inbound;
mod l2_vips;
mod large_packets;
mod link_failure;
mod lossy_replication;
mod partition;
mod port_allocation;
mod resharding;
mod scenario;
mod shard_exhaustion;
mod startup;
mod succession;
mod suspended;
mod testbed;
mod unauthenticated_peers;
