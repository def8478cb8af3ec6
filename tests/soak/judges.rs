//! What is captured of a segment, and what the judges say of it.

use std::fs;
use std::net::IpAddr;

use vipgate::lab::Host;
use vipgate_tests::cluster::{CLAIMED, Captures, Cluster, PEER, SHARED, pass};
use vipgate_tests::judge::{most_copies, pods_outside, travelled, two_at_once};

use crate::evidence::capture_error;

/// What pods and their far sides say, without the flood's own packets.
const OUTSIDE: &str = "(tcp or udp or icmp or icmp6) and not src net 11.0.0.0/8 and not src net 2001:db8:b00::/48";
/// How often a packet may be passed on between gateways: three times where shares change hands, as everywhere in these tests.
const MOST_TRAVELS: usize = 3;

/// Captures of a segment.
#[derive(Debug)]
pub(crate) struct Watch {
    outside: Captures,
    between: Captures,
    files: [String; 2],
}

/// What the judges found.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) frames: usize,
    /// Frames that the captures had no room for.
    pub(crate) missed: u64,
    pub(crate) leaked: usize,
    pub(crate) misdelivered: usize,
    pub(crate) failures: Vec<String>,
    files: [String; 2],
}

impl Watch {
    pub(crate) fn begin(cluster: &Cluster, segment: usize) -> Self {
        let files = ["outside", "between"].map(|what| format!("{what}-{segment}"));
        let start = |file: &str, host: &Host, filter: &str| {
            let places: Vec<_> = (1..=cluster.gateways.len()).map(|number| (host, format!("gw{number}"))).collect();
            Captures::start(cluster.folder.path(), file, &places, filter)
        };
        Self {
            outside: start(&files[0], &cluster.outside, OUTSIDE),
            between: start(&files[1], &cluster.peers, &format!("udp port {PEER}")),
            files,
        }
    }

    /// Ends them, and judges. The files stay.
    pub(crate) fn end(self, cluster: &Cluster) -> Verdict {
        // The kernel hands packets over in blocks, the last of which is a second late.
        pass(1_200);
        let (outside, missed_outside) = self.outside.end_counted();
        let (between, missed_between) = self.between.end_counted();
        let mut failures: Vec<String> = capture_error("outside", outside.len(), missed_outside).into_iter().collect();
        failures.extend(capture_error("between gateways", between.len(), missed_between));
        let vips = [SHARED, CLAIMED].concat();
        let mixed = two_at_once(&outside, &vips);
        failures.extend(mixed.first().map(|first| format!("{} pairs of sessions were one: {first}", mixed.len())));
        let leaked = pods_outside(&outside);
        failures
            .extend(leaked.first().map(|first| format!("{} packets showed a pod's address: {first}", leaked.len())));
        let sender = |place: usize, address: IpAddr| cluster.gateways[place].peer == address.to_string();
        let travelled = travelled(&between, PEER, sender);
        let links: Vec<[u8; 6]> = cluster.gateways.iter().map(|gateway| gateway.link("gw-out")).collect();
        let arrives = &|place: usize, to: &[u8]| links[place] == to;
        for in_pieces in [false, true] {
            let (copies, which) = most_copies(&travelled, &outside, arrives, in_pieces);
            if copies > MOST_TRAVELS {
                failures.push(format!("a packet travelled {copies} times: {which}"));
            }
        }
        Verdict {
            frames: outside.len() + between.len(),
            missed: missed_outside + missed_between,
            leaked: leaked.len(),
            misdelivered: mixed.len(),
            failures,
            files: self.files,
        }
    }
}

impl Verdict {
    /// Removes the captures: nothing is wrong in them, or with those who were captured.
    pub(crate) fn forget(&self, cluster: &Cluster) {
        let places = 0..cluster.gateways.len();
        for (file, place) in self.files.iter().flat_map(|file| places.clone().map(move |place| (file, place))) {
            let _ = fs::remove_file(cluster.folder.path().join(format!("{file}-{place}.pcap")));
        }
    }
}
