//! What fuzz targets call with any bytes, and ordinary tests with the inputs that are kept in `fuzz/corpus`: what comes from other
//! machines and from people, read and refused. Each asserts more than that nothing panics: what was read comes back the same, two ways
//! come to the same, and no input costs more than its length allows.

mod admin;
mod filter;
mod members;
mod peer;
mod text;
mod xds;

#[cfg(test)]
mod corpus;

pub use self::admin::{Request, answer, request, state};
pub use self::filter::filter;
pub use self::members::members;
pub use self::peer::{Copies, peer};
pub use self::text::{config, manifests};
pub use self::xds::xds;

use prost::Message;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, NetworkSpec, Role};

/// A gateway's network: one side each.
fn network() -> NetworkSpec {
    let interface = |id, name: &str, role| InterfaceSpec {
        id: InterfaceId(id),
        name: name.to_owned(),
        ifindex: u32::from(id) + 1,
        role,
        mac: [2, 0, 0, 0, 0, id],
        mtu: 1500,
        up: true,
        addresses: Vec::new(),
    };
    let interfaces = vec![interface(0, "gw-in", Role::Inside), interface(1, "gw-out", Role::Outside)];
    NetworkSpec { interfaces, ..NetworkSpec::default() }
}

/// The next message of bytes in which each has its length before it, as protobuf has it; `None` when there is none any more.
fn next<M: Message + Default>(bytes: &mut &[u8]) -> Option<M> {
    if bytes.is_empty() { None } else { M::decode_length_delimited(bytes).ok() }
}
