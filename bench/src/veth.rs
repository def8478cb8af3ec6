//! veth pairs between namespaces, which carry each frame as a physical link does.

use anyhow::Result;
use vipgate_dataplane::wire::ethernet::Mac;

use crate::netns::{self, Namespace};

/// One end of a veth pair: namespace, interface name, MAC address.
pub(crate) type VethEnd<'a> = (&'a Namespace, &'a str, Mac);

/// Properties of both ends of a veth pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VethConfig {
    /// Receive queues, and as many transmit queues.
    pub(crate) queues: usize,
    pub(crate) mtu: u16,
    /// Whether offloads keep their defaults: partial checksums, and segments larger than the MTU.
    pub(crate) offloads: bool,
}

impl Default for VethConfig {
    fn default() -> Self {
        Self { queues: 1, mtu: 1500, offloads: false }
    }
}

/// Adds a veth pair and sets both ends up.
pub(crate) fn add_veth_pair(first: VethEnd<'_>, second: VethEnd<'_>, config: VethConfig) -> Result<()> {
    let (queues, mtu) = (config.queues.to_string(), config.mtu.to_string());
    let device = |(namespace, interface, mac): VethEnd<'_>| {
        let identity = ["name", interface, "netns", namespace.name(), "address", &format_mac(mac)];
        [&identity[..], &["mtu", &mtu, "numtxqueues", &queues, "numrxqueues", &queues]].concat().join(" ")
    };
    let command = format!("ip link add {} type veth peer {}", device(first), device(second));
    netns::run_command(&command.split(' ').collect::<Vec<_>>())?;
    for (namespace, interface, _) in [first, second] {
        if !config.offloads {
            let off = ["rx", "off", "tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off"];
            namespace.exec(&[&["ethtool", "-K", interface], &off[..]].concat())?;
        }
        namespace.exec(&["ip", "link", "set", interface, "up"])?;
    }
    Ok(())
}

/// A MAC address as `ip` reads it.
pub(crate) fn format_mac(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
