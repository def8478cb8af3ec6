//! Entry points of the fuzz targets for untrusted input: messages from other machines, configuration and manifests.
//! Unit tests run them with the corpus in `fuzz/corpus`. Besides the absence of panics they assert round trips (decode,
//! encode, decode), equal results of independent paths, and bounded time and memory.

mod admin;
mod filter;
mod members;
mod node;
mod peer;
mod text;
mod xds;

#[cfg(test)]
mod corpus;

use prost::Message;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::policy::spec::{InterfaceSpec, NetworkSpec, Role};

pub use self::admin::{RejectedRequest, is_read_only, reply, request, state};
pub use self::filter::filter;
pub use self::members::members;
pub use self::node::node;
pub use self::peer::{RecordCommand, peer};
pub use self::text::{config, manifests};
pub use self::xds::xds;
pub use crate::admin::Request;

/// A network with one inside and one outside interface.
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
        frames: FrameLayout::default(),
        partial_checksums: false,
    };
    let interfaces = vec![interface(0, "gw-in", Role::Inside), interface(1, "gw-out", Role::Outside)];
    NetworkSpec { interfaces, ..NetworkSpec::default() }
}

/// The next length-delimited protobuf message; `None` at the end of the input or if it is invalid.
fn next<M: Message + Default>(bytes: &mut &[u8]) -> Option<M> {
    if bytes.is_empty() { None } else { M::decode_length_delimited(bytes).ok() }
}
