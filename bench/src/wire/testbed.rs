//! Testbed of the wire benchmark:
//!
//! ```text
//!   [source] eth0 ---- gw-in [gateway] gw-out ---- eth0 [sink]
//!            10.1.4.0/22     10.1.0.1  203.0.113.1      203.0.113.254, router to 198.51.0.0/22
//! ```
//! One queue per veth, no offloads, permanent neighbor entries: each frame is sent as on a physical link, and there is
//! no other traffic.

use anyhow::Result;
use vipgate_dataplane::wire::ethernet::Mac;

use crate::netns::Namespace;
use crate::veth::{add_veth_pair, format_mac};

/// MAC addresses.
pub(super) const SOURCE_MAC: Mac = [2, 0, 0, 0, 1, 1];
pub(super) const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
const SINK_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// The namespaces; removed on drop.
#[derive(Debug)]
pub(crate) struct Testbed {
    pub(super) source: Namespace,
    pub(crate) gateway: Namespace,
    pub(super) sink: Namespace,
}

impl Testbed {
    /// Creates namespaces, veth pairs, addresses and routes.
    pub(crate) fn build() -> Result<Self> {
        let testbed = Self {
            source: Namespace::create("source")?,
            gateway: Namespace::create("gateway")?,
            sink: Namespace::create("sink")?,
        };
        let Self { source, gateway, sink } = &testbed;
        add_veth_pair((source, "eth0", SOURCE_MAC), (gateway, "gw-in", INSIDE_MAC))?;
        add_veth_pair((gateway, "gw-out", OUTSIDE_MAC), (sink, "eth0", SINK_MAC))?;
        gateway.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"])?;
        gateway.exec(&["ip", "address", "add", "10.1.0.1/16", "dev", "gw-in"])?;
        gateway.exec(&["ip", "address", "add", "203.0.113.1/24", "dev", "gw-out"])?;
        gateway.exec(&["ip", "route", "add", "default", "via", "203.0.113.254"])?;
        let router = ["ip", "neigh", "add", "203.0.113.254", "lladdr", &format_mac(SINK_MAC), "dev", "gw-out"];
        gateway.exec(&[&router[..], &["nud", "permanent"]].concat())?;
        Ok(testbed)
    }
}
