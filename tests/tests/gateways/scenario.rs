//! Common scenario of the tests: held connections, UDP flows that measure outages, and a monitor.

use std::collections::BTreeSet;
use std::time::Duration;

use vipgate_tests::cluster::{
    ClientConfig, ClientResults, Clients, Cluster, Monitor, SERVER, ServerRecord, check_unique_tuples, sleep_ms,
    sources_a,
};

/// Maximum outage that clients may observe, seconds.
pub(crate) const MAX_OUTAGE: f64 = 1.0;
/// Additional delay of TCP: a probe, then a retransmission every 0.2 s.
pub(crate) const RETRANSMISSION_DELAY: f64 = 0.5;
/// Clients with at most this interval between lines, in seconds, measure outages.
const MAX_PROBE_INTERVAL: f64 = 0.2;
/// Time until routers detect a dead gateway, milliseconds: BFD with three times 100 ms.
pub(crate) const BFD_DETECTION: u64 = 300;
/// Maximum replication delay, seconds.
pub(crate) const MAX_REPLICATION_DELAY: f64 = 0.2;
/// Seconds after the signal that kills a gateway: clients that start later were not answered by that gateway.
pub(crate) const KILL_GRACE: f64 = 0.2;

/// Running clients of tenant A on both families, and the monitor.
pub(crate) struct Scenario {
    monitor: Monitor,
    held: [Clients; 2],
    probes: [Clients; 2],
}

/// Results of a scenario.
pub(crate) struct ScenarioResults {
    /// Held connections.
    pub(crate) held: ClientResults,
    /// UDP flows.
    pub(crate) probes: ClientResults,
}

impl Scenario {
    /// Starts held connections, four in five of them over IPv4, and flows, half of them over IPv4.
    pub(crate) fn start(cluster: &Cluster, connections: u32, flows: u32) -> Self {
        Self::start_with_intervals(
            cluster,
            connections,
            flows,
            &ClientConfig::held_connections("", Vec::new(), 0).intervals,
        )
    }

    /// The same; held connections send lines at such intervals (see [`ClientConfig::intervals`]).
    pub(crate) fn start_with_intervals(
        cluster: &Cluster,
        connections: u32,
        flows: u32,
        intervals: &[(u32, f64, f64)],
    ) -> Self {
        let monitor = cluster.start_monitor();
        let parts = [(0, "four", connections * 4 / 5), (1, "six", connections / 5)];
        let mut held = parts.map(|(family, name, count)| {
            let held = ClientConfig::held_connections(SERVER[family], sources_a(family), count);
            let traffic = ClientConfig { intervals: intervals.to_vec(), ..held };
            cluster.start_clients(&format!("held-{name}"), 10_000_000 * (family as u32 + 1), &traffic)
        });
        for clients in &mut held {
            clients.wait_established(Duration::from_mins(1));
        }
        let probes = start_probes(cluster, "probes", 30_000_000, flows);
        Self { monitor, held, probes }
    }

    /// Stops the clients and the monitor, and verifies the general invariants.
    pub(crate) fn end(self, cluster: &Cluster) -> ScenarioResults {
        self.end_with_lost(cluster, &BTreeSet::new())
    }

    /// The same when the sessions of some clients, by identity, may have been lost with a gateway, and their ports given to others.
    pub(crate) fn end_with_lost(self, cluster: &Cluster, lost: &BTreeSet<String>) -> ScenarioResults {
        let ([held, held_ipv6], [probes, probes_ipv6]) = (self.held, self.probes);
        let [held, held_ipv6, probes, probes_ipv6] = Clients::end_all([held, held_ipv6, probes, probes_ipv6]);
        let [held, probes] =
            [(held, held_ipv6), (probes, probes_ipv6)].map(|(ipv4, ipv6)| ClientResults([ipv4.0, ipv6.0].concat()));
        println!("connections: {}\nflows: {}", held.summary(), probes.summary());
        for outcome in [&held, &probes] {
            outcome.check_no_misdelivery();
        }
        let records = self.monitor.verify_with_more_hops(cluster);
        let kept: Vec<ServerRecord> = records.iter().filter(|it| !lost.contains(&it.identity)).cloned().collect();
        check_unique_tuples(&kept);
        let reopened = with_several_ports(&records);
        assert!(reopened.is_empty(), "{} flows changed their port, such as {}", reopened.len(), reopened[0]);
        cluster.check_frames();
        ScenarioResults { held, probes }
    }
}

/// Starts UDP flows on both families that measure outages.
pub(crate) fn start_probes(cluster: &Cluster, name: &str, first: u32, count: u32) -> [Clients; 2] {
    let mut probes = [0, 1].map(|family| {
        let traffic = ClientConfig::probes(SERVER[family], sources_a(family), count / 2);
        cluster.start_clients(&format!("{name}-{family}"), first + 1_000_000 * family as u32, &traffic)
    });
    for clients in &mut probes {
        clients.wait_established(Duration::from_secs(20));
    }
    probes
}

impl ScenarioResults {
    /// Asserts that 99 % of the connections established at a time survived, and that frequent senders' waits are
    /// within the maximum outage.
    pub(crate) fn check_outage(&self, died: f64) {
        self.check_outage_within(MAX_OUTAGE, died);
    }

    /// The same, with another maximum outage in seconds.
    pub(crate) fn check_outage_within(&self, max_outage: f64, died: f64) {
        let older = self.held.established_before(MAX_REPLICATION_DELAY, died);
        older.check_survived(99);
        assert!(self.probes.p99_wait(MAX_PROBE_INTERVAL) <= max_outage, "{}", self.probes.summary());
        assert!(
            older.p99_wait(MAX_PROBE_INTERVAL) <= max_outage + RETRANSMISSION_DELAY,
            "{}; {}",
            older.summary(),
            older.describe_longest_waits(died)
        );
    }

    /// Asserts that every client succeeded and no frequent sender waited longer than this.
    pub(crate) fn check_uninterrupted(&self, longest: f64) {
        self.held.check_all_succeeded();
        self.probes.check_all_succeeded();
        assert!(self.probes.longest_wait(MAX_PROBE_INTERVAL) <= longest, "{}", self.probes.summary());
        assert!(
            self.held.longest_wait(MAX_PROBE_INTERVAL) <= longest + RETRANSMISSION_DELAY,
            "{}; {}",
            self.held.summary(),
            self.held.describe_longest_waits(self.held.first_started())
        );
    }
}

/// Kills a gateway, and removes its routes after the routers' detection time; returns the time of the kill.
pub(crate) fn kill_gateway(cluster: &mut Cluster, number: usize) -> f64 {
    allow_shard_moves(cluster);
    let died = cluster.gateways[number].kill();
    reroute_after_detection(cluster, number);
    died
}

/// Allows the drops of moving shards: for a moment packets arrive at a gateway that doesn't own the shard or have the
/// session any more or yet, and what a killed gateway hasn't replicated is lost. Clients measure how long and for how
/// many. Queued data is sent in segments that exceed the MTU of the tunnel between gateways, which TCP then learns.
pub(crate) fn allow_shard_moves(cluster: &Cluster) {
    cluster.accounting.allow(["no_lease", "no_owner", "no_service", "no_session", "too_big"]);
}

/// Expects packets that exceed the MTU of the tunnel between gateways: senders learn it from rate-limited ICMP
/// errors.
pub(crate) fn expect_too_big(cluster: &Cluster) {
    cluster.accounting.expect(["too_big"]);
    cluster.accounting.allow(["answers_limited"]);
}

/// Removes the routes via a gateway after the routers' detection time.
pub(crate) fn reroute_after_detection(cluster: &Cluster, number: usize) {
    sleep_ms(BFD_DETECTION);
    cluster.route_via(&cluster.indices_except(number));
}

/// Starts a gateway, waits until it is active, and restores its routes.
pub(crate) fn restart_gateway(cluster: &mut Cluster, number: usize) {
    allow_shard_moves(cluster);
    cluster.gateways[number].start("");
    cluster.wait_converged();
    cluster.route_via(&cluster.indices());
}

/// Asserts that new connections succeed, 200 per second.
pub(crate) fn check_new_connections(cluster: &Cluster, name: &str, first: u32, count: u32) {
    let brief =
        cluster.start_clients(name, first, &ClientConfig::short_connections(SERVER[0], sources_a(0), count, 200));
    let outcome = brief.wait(Duration::from_mins(1));
    outcome.check_all_succeeded();
}

/// Clients with more than one address and port at the server: their session was lost and opened again.
fn with_several_ports(records: &[ServerRecord]) -> Vec<&str> {
    let mut identities: Vec<&str> = records.iter().map(|record| record.identity.as_str()).collect();
    identities.sort_unstable();
    let mut repeated: Vec<&str> = identities.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    repeated.dedup();
    repeated
}

/// The source addresses of clients at the server.
pub(crate) fn source_addresses(records: &[ServerRecord]) -> Vec<&str> {
    let mut sources: Vec<&str> = records.iter().map(|record| record.peer.0.as_str()).collect();
    sources.sort_unstable();
    sources.dedup();
    sources
}
