//! The network that every subject is measured in:
//!
//! ```text
//!   [source] eth0 ---- gw-in [gateway] gw-out ---- eth0 [sink]
//!            10.1.4.0/22     10.1.0.1  203.0.113.1      203.0.113.254, router to 198.51.0.0/22
//! ```
//! One queue each, no offloads, fixed neighbours: a frame on it is what a frame on a wire would be, and there are no others.

use anyhow::Result;
use vipgate_dataplane::wire::ethernet::Mac;

use crate::netns::{self, Namespace};

/// Link addresses.
pub(super) const SOURCE_MAC: Mac = [2, 0, 0, 0, 1, 1];
pub(super) const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
const SINK_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// The namespaces of one subject; dropping them removes everything.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(super) source: Namespace,
    pub(crate) gateway: Namespace,
    pub(super) sink: Namespace,
}

impl Ground {
    /// Namespaces, cables, addresses, routes.
    pub(crate) fn build() -> Result<Self> {
        let ground = Self {
            source: Namespace::create("source")?,
            gateway: Namespace::create("gateway")?,
            sink: Namespace::create("sink")?,
        };
        let Self { source, gateway, sink } = &ground;
        link((source, "eth0", SOURCE_MAC), (gateway, "gw-in", INSIDE_MAC))?;
        link((gateway, "gw-out", OUTSIDE_MAC), (sink, "eth0", SINK_MAC))?;
        gateway.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"])?;
        gateway.exec(&["ip", "address", "add", "10.1.0.1/16", "dev", "gw-in"])?;
        gateway.exec(&["ip", "address", "add", "203.0.113.1/24", "dev", "gw-out"])?;
        gateway.exec(&["ip", "route", "add", "default", "via", "203.0.113.254"])?;
        let router = ["ip", "neigh", "add", "203.0.113.254", "lladdr", &text(SINK_MAC), "dev", "gw-out"];
        gateway.exec(&[&router[..], &["nud", "permanent"]].concat())?;
        Ok(ground)
    }
}

type End<'a> = (&'a Namespace, &'a str, Mac);

fn link(one: End<'_>, other: End<'_>) -> Result<()> {
    let end = |(namespace, interface, mac): End<'_>| {
        let words = ["name", interface, "netns", namespace.name(), "address", &text(mac)];
        let mut words: Vec<String> = words.map(str::to_owned).into();
        words.extend(["numtxqueues", "1", "numrxqueues", "1"].map(str::to_owned));
        words
    };
    let words = [
        vec!["ip".into(), "link".into(), "add".into()],
        end(one),
        vec!["type".into(), "veth".into(), "peer".into()],
        end(other),
    ];
    let words = words.concat();
    netns::output(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    for (namespace, interface, _) in [one, other] {
        let off = ["rx", "off", "tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off"];
        namespace.exec(&[&["ethtool", "-K", interface], &off[..]].concat())?;
        namespace.exec(&["ip", "link", "set", interface, "up"])?;
    }
    Ok(())
}

fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
