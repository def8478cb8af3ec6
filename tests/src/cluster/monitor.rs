//! Monitor of every scenario: captures and a line server, verified at its end.

use super::{BGP_VIPS, Captures, ClientConfig, Clients, Cluster, L2_VIPS, LineServer, PEER_PORT, ServerRecord};
use crate::verifier::{concurrent_tuple_reuse, leaked_pod_addresses, most_traversed, shared_tuples, tunnel_packets};

/// The line server, and captures outside and between gateways.
#[derive(Debug)]
pub struct Monitor {
    server: LineServer,
    outside: Captures,
    between: Captures,
}

impl Cluster {
    /// Starts the line server and the captures.
    pub fn start_monitor(&self) -> Monitor {
        Monitor {
            outside: self.capture_outside("tcp or udp or icmp or icmp6"),
            between: self.capture_peers(&format!("udp port {PEER_PORT}")),
            server: LineServer::start(self.folder_path(), &self.server),
        }
    }

    /// Starts clients on the host of the bulk pods, with identities from `first`.
    pub fn start_clients(&self, name: &str, first: u32, traffic: &ClientConfig<'_>) -> Clients {
        Clients::start(self.folder_path(), &self.bulk_pods, name, first, traffic)
    }
}

impl Monitor {
    /// Stops the monitor and verifies: no tuple was used by two sessions at once, no pod address leaked, no packet
    /// crossed the tunnel twice, no reply was misdelivered. Returns the clients that the server has seen.
    pub fn verify(self, cluster: &Cluster) -> Vec<ServerRecord> {
        self.verify_traversals(cluster, 1)
    }

    /// The same while shards move (a gateway with an old membership view sends to the former owner, which forwards once
    /// more), or while ports are exhausted (an endpoint's gateway asks others in turn).
    pub fn verify_with_more_hops(self, cluster: &Cluster) -> Vec<ServerRecord> {
        self.verify_traversals(cluster, 3)
    }

    fn verify_traversals(self, cluster: &Cluster, max_traversals: usize) -> Vec<ServerRecord> {
        let records = self.server.end();
        let faulty: Vec<&ServerRecord> = records.iter().filter(|record| record.errors > 0).collect();
        assert!(
            faulty.is_empty(),
            "the server received mixed lines from {} clients, such as {:?}",
            faulty.len(),
            faulty[0]
        );
        let mut captured = Captures::end_all([self.outside, self.between]);
        let (between, outside) = (captured.remove(1), captured.remove(0));
        let vips = [BGP_VIPS, L2_VIPS].concat();
        assert_eq!(concurrent_tuple_reuse(&outside, &vips), Vec::<String>::new(), "two sessions used one tuple");
        assert_eq!(leaked_pod_addresses(&outside), Vec::<String>::new(), "a pod's address leaked");
        let sender =
            |capture: usize, address: std::net::IpAddr| cluster.gateways[capture].peer_address == address.to_string();
        let tunnelled = tunnel_packets(&between, PEER_PORT, sender);
        let macs: Vec<[u8; 6]> = cluster.gateways.iter().map(|gateway| gateway.mac("gw-out")).collect();
        let arrives = &|capture: usize, to: &[u8]| macs[capture] == to;
        // Fragments go to the gateway that reassembles them, and from there to the owner.
        for (fragmented, limit) in [(false, max_traversals), (true, max_traversals.max(2))] {
            let (copies, which) = most_traversed(&tunnelled, &outside, arrives, fragmented);
            assert!(copies <= limit, "a packet crossed the tunnel {copies} times: {which}");
        }
        records
    }
}

/// Asserts that no two clients were seen with one address and port.
pub fn check_unique_tuples(records: &[ServerRecord]) {
    let seen =
        records.iter().map(|it| (it.udp, it.peer.0.as_str(), it.peer.1, it.local.as_str(), it.identity.as_str()));
    assert_eq!(shared_tuples(seen), Vec::<String>::new(), "clients share a tuple");
}
