//! Policy protocol: vipgate resources over Envoy's delta discovery service (xDS, `DeltaAggregatedResources`).
//!
//! `resource` encodes and decodes resources, `publication` has those of a policy version, and what differs from the one
//! before; `client` runs the streams of gateways and of nodes' agents. Gateway side: `store` holds the resources, `cache`
//! persists them. `membership_message` has views and heartbeats.

pub mod cache;
pub mod client;
#[cfg(test)]
pub(crate) mod fixtures;
pub mod membership_message;
pub mod publication;
pub mod resource;
pub mod store;
pub mod tls;

/// The generated messages.
#[expect(unused_qualifications, clippy::pedantic, reason = "generated")]
pub mod proto {
    tonic::include_proto!("vipgate.policy.v1");
}
