//! Captures of one segment of the soak, and their verdict.

use std::fs;
use std::net::IpAddr;

use vipgate_lab::Host;
use vipgate_tests::cluster::{BGP_VIPS, Captures, Cluster, L2_VIPS, PEER_PORT, sleep_ms};
use vipgate_tests::soak::evidence::capture_error;
use vipgate_tests::verifier::{concurrent_tuple_reuse, leaked_pod_addresses, most_traversed, tunnel_packets};

/// Traffic of pods and servers, without the flood's own packets.
const OUTSIDE: &str = "(tcp or udp or icmp or icmp6) and not src net 11.0.0.0/8 and not src net 2001:db8:b00::/48";
/// Maximum tunnel traversals of a packet: three while shards move, as in the other tests.
const MAX_TRAVERSALS: usize = 3;

/// Running captures of a segment.
#[derive(Debug)]
pub(crate) struct SegmentCaptures {
    outside: Captures,
    between: Captures,
    files: [String; 2],
}

/// Verdict on a segment's captures.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) frames: usize,
    /// Frames that the captures missed.
    pub(crate) missed: u64,
    pub(crate) leaked: usize,
    pub(crate) misdelivered: usize,
    pub(crate) failures: Vec<String>,
    files: [String; 2],
}

impl SegmentCaptures {
    pub(crate) fn start(cluster: &Cluster, segment: usize) -> Self {
        let files = ["outside", "between"].map(|what| format!("{what}-{segment}"));
        let start = |file: &str, host: &Host, filter: &str| {
            let interfaces: Vec<_> = (1..=cluster.gateways.len()).map(|number| (host, format!("gw{number}"))).collect();
            Captures::start(cluster.folder.path(), file, &interfaces, filter)
        };
        Self {
            outside: start(&files[0], &cluster.outside, OUTSIDE),
            between: start(&files[1], &cluster.peers, &format!("udp port {PEER_PORT}")),
            files,
        }
    }

    /// Stops the captures and verifies them. The files are kept.
    pub(crate) fn end(self, cluster: &Cluster) -> Verdict {
        // The kernel delivers packets in blocks, the last of which is up to a second late.
        sleep_ms(1_200);
        let (outside, missed_outside) = self.outside.end_counted();
        let (between, missed_between) = self.between.end_counted();
        let mut violations: Vec<String> = capture_error("outside", outside.len(), missed_outside).into_iter().collect();
        violations.extend(capture_error("between gateways", between.len(), missed_between));
        let vips = [BGP_VIPS, L2_VIPS].concat();
        let reused = concurrent_tuple_reuse(&outside, &vips);
        violations
            .extend(reused.first().map(|first| format!("{} pairs of sessions shared a tuple: {first}", reused.len())));
        let leaked = leaked_pod_addresses(&outside);
        violations
            .extend(leaked.first().map(|first| format!("{} packets leaked a pod's address: {first}", leaked.len())));
        let sender = |capture: usize, address: IpAddr| cluster.gateways[capture].peer_address == address.to_string();
        let tunnelled = tunnel_packets(&between, PEER_PORT, sender);
        let macs: Vec<[u8; 6]> = cluster.gateways.iter().map(|gateway| gateway.mac("gw-out")).collect();
        let arrives = &|capture: usize, to: &[u8]| macs[capture] == to;
        for fragmented in [false, true] {
            let (copies, which) = most_traversed(&tunnelled, &outside, arrives, fragmented);
            if copies > MAX_TRAVERSALS {
                violations.push(format!("a packet crossed the tunnel {copies} times: {which}"));
            }
        }
        Verdict {
            frames: outside.len() + between.len(),
            missed: missed_outside + missed_between,
            leaked: leaked.len(),
            misdelivered: reused.len(),
            failures: violations,
            files: self.files,
        }
    }
}

impl Verdict {
    /// Removes the captures of a segment without violations.
    pub(crate) fn remove_captures(&self, cluster: &Cluster) {
        let captures = 0..cluster.gateways.len();
        for (file, capture) in self.files.iter().flat_map(|file| captures.clone().map(move |capture| (file, capture))) {
            let _ = fs::remove_file(cluster.folder.path().join(format!("{file}-{capture}.pcap")));
        }
    }
}
