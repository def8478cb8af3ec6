//! Verifiers: invariants of captured traffic that must hold in every scenario.
//!
//! They parse tcpdump's files and share no code with the product. Clients and servers begin every payload with the
//! client's identity, eight digits.

mod address_claims;
mod packet;
mod pcap;
mod sessions;
#[cfg(test)]
mod tests;
mod tunnel;

pub use packet::{Packet, client_identity};
pub use pcap::{Frame, read_pcap};
pub use sessions::{concurrent_tuple_reuse, leaked_pod_addresses, shared_tuples};
pub use tunnel::{TunnelPacket, most_traversed, tunnel_packets};

pub use crate::verifier::address_claims::{AddressClaim, ClaimKind, address_claims};
