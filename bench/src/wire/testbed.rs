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
use vipgate_lab::{Host, Lab, LinkConfig};

use crate::packets::VIP;

/// Addresses of a pod in the source, and of a remote host in the sink.
pub(super) const POD: Ipv4Addr = Ipv4Addr::new(10, 1, 4, 1);
pub(super) const REMOTE: Ipv4Addr = Ipv4Addr::new(198, 51, 0, 99);
/// MAC addresses.
pub(super) const SOURCE_MAC: Mac = [2, 0, 0, 0, 1, 1];
pub(super) const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
pub(super) const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
pub(super) const SINK_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// The hosts; removed on drop.
#[derive(Debug)]
pub(crate) struct Testbed {
    pub(super) source: Host,
    pub(crate) gateway: Host,
    pub(super) sink: Host,
    _lab: Lab,
}

impl Testbed {
    /// Creates namespaces, veth pairs, addresses and routes.
    pub(crate) fn build() -> Result<Self> {
        Self::with_links(LinkConfig::default())
    }

    /// The same with other links.
    pub(super) fn with_links(config: LinkConfig<'_>) -> Result<Self> {
        let lab = Lab::new("bench")?;
        let [source, gateway, sink] =
            [("source", false), ("gateway", true), ("sink", false)].map(|(name, forwards)| lab.host(name, forwards));
        let (source, gateway, sink) = (source?, gateway?, sink?);
        for host in [&source, &gateway, &sink] {
            // Prevents router solicitations and MLD reports of interfaces that come up.
            host.sysctl("net.ipv6.conf.default.disable_ipv6", 1)?;
            host.disable_rp_filter()?;
        }
        let macs = [SOURCE_MAC, INSIDE_MAC, OUTSIDE_MAC, SINK_MAC].map(format_mac);
        let [source_mac, inside_mac, outside_mac, sink_mac] = macs.each_ref().map(|mac| Some(mac.as_str()));
        let inside = LinkConfig { macs: [source_mac, inside_mac], ..config };
        lab.link_with((&source, "eth0"), (&gateway, "gw-in"), inside)?;
        let outside = LinkConfig { macs: [outside_mac, sink_mac], ..config };
        lab.link_with((&gateway, "gw-out"), (&sink, "eth0"), outside)?;
        gateway.addresses("gw-in", &["10.1.0.1/16"])?;
        gateway.addresses("gw-out", &["203.0.113.1/24"])?;
        gateway.route("default", "203.0.113.254")?;
        add_neighbor(&gateway, "203.0.113.254", SINK_MAC, "gw-out")?;
        Ok(Self { source, gateway, sink, _lab: lab })
    }

    /// Makes the source a pod and the sink a remote host, which use their kernels' transport protocols.
    pub(super) fn add_hosts(&self) -> Result<()> {
        let Self { source, gateway, sink, .. } = self;
        source.addresses("eth0", &[&format!("{POD}/16")])?;
        source.route("default", "10.1.0.1")?;
        add_neighbor(source, "10.1.0.1", INSIDE_MAC, "eth0")?;
        add_neighbor(gateway, &POD.to_string(), SOURCE_MAC, "gw-in")?;
        sink.addresses("eth0", &["203.0.113.254/24"])?;
        sink.addresses("lo", &[&format!("{REMOTE}/32")])?;
        // For gateways that don't translate.
        sink.route("10.1.0.0/16", "203.0.113.1")?;
        for gateway_address in [Ipv4Addr::from_bits(VIP), Ipv4Addr::new(203, 0, 113, 1)] {
            add_neighbor(sink, &gateway_address.to_string(), OUTSIDE_MAC, "eth0")?;
        }
        Ok(())
    }
}

/// Adds a permanent neighbor entry.
fn add_neighbor(host: &Host, address: &str, mac: Mac, interface: &str) -> Result<()> {
    let mac = format_mac(mac);
    Ok(host.ip(&["neigh", "replace", address, "lladdr", &mac, "dev", interface, "nud", "permanent"])?)
}

/// A MAC address as `ip` reads it.
pub(super) fn format_mac(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
