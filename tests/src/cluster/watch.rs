//! What is watched in every scenario, and judged at its end.

use super::{CLAIMED, Captures, Clients, Cluster, LineServer, PEER, Record, SHARED, Traffic};
use crate::judge::{most_copies, pods_outside, shared_tuples, travelled, two_at_once};

/// The far side, and captures outside and between gateways.
#[derive(Debug)]
pub struct Watch {
    server: LineServer,
    outside: Captures,
    between: Captures,
}

impl Cluster {
    /// Begins to answer clients, and to watch.
    pub fn watch(&self) -> Watch {
        Watch {
            outside: self.capture_outside("tcp or udp or icmp or icmp6"),
            between: self.capture_peers(&format!("udp port {PEER}")),
            server: LineServer::start(self.path(), &self.server),
        }
    }

    /// Lets clients begin on the host of the crowd. `first` is the first one's identity.
    pub fn crowd(&self, name: &str, first: u32, traffic: &Traffic<'_>) -> Clients {
        Clients::start(self.path(), &self.crowd, name, first, traffic)
    }
}

impl Watch {
    /// Ends it. Never were two sessions seen as one, no pod's address left, no packet travelled twice, and nobody was answered
    /// for another. Whom the far side has seen.
    pub fn check(self, cluster: &Cluster) -> Vec<Record> {
        self.check_travels(cluster, 1)
    }

    /// The same where shares change hands: who hears of that late sends to the former owner, and that one sends on.
    pub fn check_handover(self, cluster: &Cluster) -> Vec<Record> {
        self.check_travels(cluster, 3)
    }

    fn check_travels(self, cluster: &Cluster, most_whole: usize) -> Vec<Record> {
        let records = self.server.end();
        let faulty: Vec<&Record> = records.iter().filter(|record| record.faults > 0).collect();
        assert!(faulty.is_empty(), "the far side heard {} mixed, as {:?}", faulty.len(), faulty[0]);
        let mut captured = Captures::end_all([self.outside, self.between]);
        let (between, outside) = (captured.remove(1), captured.remove(0));
        let vips = [SHARED, CLAIMED].concat();
        assert_eq!(two_at_once(&outside, &vips), Vec::<String>::new(), "two sessions were one");
        assert_eq!(pods_outside(&outside), Vec::<String>::new(), "a pod's address was seen outside");
        let sender = |place: usize, address: std::net::IpAddr| cluster.gateways[place].peer == address.to_string();
        let travelled = travelled(&between, PEER, sender);
        let links: Vec<[u8; 6]> = cluster.gateways.iter().map(|gateway| gateway.link("gw-out")).collect();
        let arrives = &|place: usize, to: &[u8]| links[place] == to;
        // Pieces go to whoever puts them together, and from there to whom they belong.
        for (in_pieces, most) in [(false, most_whole), (true, most_whole.max(2))] {
            let (copies, which) = most_copies(&travelled, &outside, arrives, in_pieces);
            assert!(copies <= most, "a packet travelled {copies} times: {which}");
        }
        records
    }
}

/// No two of these were seen with one address and port.
pub fn check_all_different(records: &[Record]) {
    let seen =
        records.iter().map(|it| (it.udp, it.peer.0.as_str(), it.peer.1, it.local.as_str(), it.identity.as_str()));
    assert_eq!(shared_tuples(seen), Vec::<String>::new(), "the far side can't tell them apart");
}
