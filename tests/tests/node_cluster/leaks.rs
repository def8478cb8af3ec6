//! Leak verifier: captures on the uplinks of nodes and outside of the gateways; no packet of a covered pod may leave
//! other than through a tunnel and with a VIP.

use vipgate_tests::cluster::{Captures, SERVER};
use vipgate_tests::verifier::{Frame, Packet};

use crate::cluster::{NEIGHBOR, NodeCluster};

/// Running captures.
pub(crate) struct LeakVerifier {
    uplinks: Captures,
    outside: Captures,
}

impl NodeCluster {
    /// Starts the captures. Meanwhile no uncovered pod may send to the servers.
    pub(crate) fn start_leak_verifier(&self) -> LeakVerifier {
        let folder = self.cluster.folder.path();
        let pods = ["10.244.0.0/16", "fd00:244::/32"].map(|prefix| format!("src net {prefix}")).join(" or ");
        let inside = ["10.244.0.0/16", "fd00:244::/32", "10.5.0.0/16", "fd00:5::/32"];
        let inside = inside.map(|prefix| format!("dst net {prefix}")).join(" or ");
        let neighbor = NEIGHBOR.map(|address| format!("dst host {address}")).join(" or ");
        let servers = SERVER.map(|server| format!("dst host {server}")).join(" or ");
        // Neighbor discovery has types 133 to 137.
        let discovery = "(icmp6 and ip6[40] >= 133 and ip6[40] <= 137)";
        let filter = format!("({servers} or (({pods}) and not ({inside} or {neighbor}))) and not {discovery}");
        let places: Vec<_> = self.nodes.iter().map(|node| self.cluster.uplink(&node.node)).collect();
        let uplinks = Captures::start(folder, "leaks-uplink", &places, &filter);
        let places: Vec<_> = (1..=self.cluster.gateways.len())
            .map(|number| (&self.cluster.outside, format!("gw{number}")))
            .chain([(&self.cluster.server, "eth0".to_owned())])
            .collect();
        let filter = "net 10.244.0.0/16 or net fd00:244::/32 or net 10.5.0.0/16 or net fd00:5::/32";
        let outside = Captures::start(folder, "leaks-outside", &places, filter);
        LeakVerifier { uplinks, outside }
    }
}

impl LeakVerifier {
    /// Stops; asserts that nothing has leaked.
    #[track_caller]
    pub(crate) fn check(self) {
        let leaked = self.end();
        assert!(leaked.is_empty(), "{} packets have leaked:\n{}", leaked.len(), describe(&leaked));
    }

    /// Stops; the packets that have leaked, in the order of time.
    pub(crate) fn end(self) -> Vec<Frame> {
        let mut leaked = Captures::end_all([self.uplinks, self.outside]).concat();
        leaked.sort_by_key(|frame| frame.time);
        leaked
    }
}

/// The first of these packets, for messages.
pub(crate) fn describe(frames: &[Frame]) -> String {
    let first = frames.iter().take(10);
    let line = |frame: &Frame| {
        let packet = Packet::in_frame(&frame.bytes);
        packet.map_or_else(
            || format!("{:02x?}", frame.bytes),
            |packet| {
                let [source, destination] = packet.addresses;
                let (protocol, ports, time) = (packet.protocol, packet.ports, frame.time / 1_000_000);
                format!("{time} ms at {}: {source} > {destination}, protocol {protocol}, {ports:?}", frame.capture)
            },
        )
    };
    first.map(line).collect::<Vec<_>>().join("\n")
}
