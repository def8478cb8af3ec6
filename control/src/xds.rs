//! The policy protocol: vipgate's resources over the delta variant of Envoy's discovery service. `resource` says what a
//! policy is made of on the wire. The gateway's side: `client` speaks, `book` keeps what was said, `cache` outlives the process.

pub mod book;
pub mod cache;
pub mod client;
#[cfg(test)]
pub(crate) mod fixtures;
pub mod resource;
pub mod tls;

/// The generated messages.
#[expect(missing_docs, unused_qualifications, clippy::pedantic, reason = "generated; the .proto file has the comments")]
pub mod proto {
    tonic::include_proto!("vipgate.policy.v1");
}
