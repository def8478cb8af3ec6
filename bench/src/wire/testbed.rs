//! Testbed of the wire benchmark:
//!
//! ```text
//!   [source] eth0 ---- gw-in [gateway] gw-out ---- eth0 [sink]
//!            10.1.4.0/22     10.1.0.1  203.0.113.1      203.0.113.254, router to 198.51.0.0/22
//! ```
//! By default one queue per veth, no offloads, permanent neighbor entries: each frame is sent as on a physical link, and
//! there is no other traffic.

use std::net::Ipv4Addr;

use anyhow::Result;
use vipgate_dataplane::wire::ethernet::Mac;

use crate::netns::Namespace;
use crate::packets::VIP;
use crate::veth::{VethConfig, add_veth_pair, format_mac};

/// Addresses of a pod in the source, and of a remote host in the sink.
pub(super) const POD: Ipv4Addr = Ipv4Addr::new(10, 1, 4, 1);
pub(super) const REMOTE: Ipv4Addr = Ipv4Addr::new(198, 51, 0, 99);
/// MAC addresses.
pub(super) const SOURCE_MAC: Mac = [2, 0, 0, 0, 1, 1];
pub(super) const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
pub(super) const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
pub(super) const SINK_MAC: Mac = [2, 0, 0, 0, 2, 1];

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
        Self::with_veths(VethConfig::default())
    }

    /// The same with other veths.
    pub(super) fn with_veths(config: VethConfig) -> Result<Self> {
        let testbed = Self {
            source: Namespace::create("source")?,
            gateway: Namespace::create("gateway")?,
            sink: Namespace::create("sink")?,
        };
        let Self { source, gateway, sink } = &testbed;
        add_veth_pair((source, "eth0", SOURCE_MAC), (gateway, "gw-in", INSIDE_MAC), config)?;
        add_veth_pair((gateway, "gw-out", OUTSIDE_MAC), (sink, "eth0", SINK_MAC), config)?;
        gateway.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"])?;
        gateway.exec(&["ip", "address", "add", "10.1.0.1/16", "dev", "gw-in"])?;
        gateway.exec(&["ip", "address", "add", "203.0.113.1/24", "dev", "gw-out"])?;
        gateway.exec(&["ip", "route", "add", "default", "via", "203.0.113.254"])?;
        let router = ["ip", "neigh", "add", "203.0.113.254", "lladdr", &format_mac(SINK_MAC), "dev", "gw-out"];
        gateway.exec(&[&router[..], &["nud", "permanent"]].concat())?;
        Ok(testbed)
    }

    /// Makes the source a pod and the sink a remote host, which use their kernels' transport protocols.
    pub(super) fn add_hosts(&self) -> Result<()> {
        let Self { source, gateway, sink } = self;
        let permanent = |host: &Namespace, address: &str, mac: Mac, interface: &str| {
            let entry = ["ip", "neigh", "replace", address, "lladdr", &format_mac(mac), "dev", interface];
            host.exec(&[&entry[..], &["nud", "permanent"]].concat())
        };
        source.exec(&["ip", "address", "add", &format!("{POD}/16"), "dev", "eth0"])?;
        source.exec(&["ip", "route", "add", "default", "via", "10.1.0.1"])?;
        permanent(source, "10.1.0.1", INSIDE_MAC, "eth0")?;
        permanent(gateway, &POD.to_string(), SOURCE_MAC, "gw-in")?;
        sink.exec(&["ip", "address", "add", "203.0.113.254/24", "dev", "eth0"])?;
        sink.exec(&["ip", "address", "add", &format!("{REMOTE}/32"), "dev", "lo"])?;
        // For gateways that don't translate.
        sink.exec(&["ip", "route", "add", "10.1.0.0/16", "via", "203.0.113.1"])?;
        for gateway_address in [Ipv4Addr::from_bits(VIP), Ipv4Addr::new(203, 0, 113, 1)] {
            permanent(sink, &gateway_address.to_string(), OUTSIDE_MAC, "eth0")?;
        }
        Ok(())
    }
}
