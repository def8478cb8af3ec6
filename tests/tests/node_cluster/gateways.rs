//! Gateways are drained, added and removed under load; and the load itself.

use std::time::Duration;

use vipgate_lab::Host;
use vipgate_tests::cluster::{
    ClientConfig, ClientResults, Clients, Cluster, Gateway, L2_VIPS, LineServer, SERVER, sleep_ms,
};
use vipgate_tests::drop_accounting::RING_LOSSES;
use vipgate_tests::wait_for;

use crate::cluster::NodeCluster;
use crate::failover::MAX_OUTAGE;

/// UDP flows of each pod, 40 datagrams a second each, and its TCP connections.
const PROBES: u32 = 5;
const CONNECTIONS: u32 = 30;

/// Traffic from the covered pod of each node.
pub(crate) struct Load {
    probes: Vec<Clients>,
    connections: Vec<Clients>,
}

pub(crate) struct LoadResults {
    pub(crate) probes: ClientResults,
    pub(crate) connections: ClientResults,
}

impl Load {
    /// Starts, and waits until all clients have replies. Identities are numbered from `first`.
    pub(crate) fn start(cluster: &NodeCluster, name: &str, first: u32) -> Self {
        let folder = cluster.cluster.folder.path();
        let start = |node: usize, kind: &str, offset: u32, config: &ClientConfig<'_>| {
            let first = first + node as u32 * 10_000 + offset;
            Clients::start(folder, &cluster.covered(node).host, &format!("{name}-{kind}-{node}"), first, config)
        };
        let probe = ClientConfig::probes(SERVER[0], Vec::new(), PROBES);
        let held = ClientConfig::held_connections(SERVER[0], Vec::new(), CONNECTIONS);
        let mut probes: Vec<Clients> = (0..3).map(|node| start(node, "probes", 0, &probe)).collect();
        let mut connections: Vec<Clients> = (0..3).map(|node| start(node, "held", 5_000, &held)).collect();
        for clients in probes.iter_mut().chain(&mut connections) {
            clients.wait_established(Duration::from_secs(30));
        }
        // Sessions are replicated before anything fails.
        sleep_ms(1_000);
        Self { probes, connections }
    }

    /// Stops; its results.
    pub(crate) fn end(self, _: &NodeCluster) -> LoadResults {
        self.probes.iter().chain(&self.connections).for_each(Clients::stop);
        let wait = |clients: Vec<Clients>| {
            let results = clients.into_iter().map(|clients| clients.wait(Duration::from_mins(1)).0);
            ClientResults(results.flatten().collect())
        };
        LoadResults { probes: wait(self.probes), connections: wait(self.connections) }
    }
}

impl LoadResults {
    /// In one line; waits ended this long after an event.
    pub(crate) fn describe(&self, event: f64) -> String {
        let lost = self.lost();
        let longest = self.probes.describe_longest_waits(event);
        let first = longest.split(", ").take(2).collect::<Vec<_>>().join(", ");
        let when: Vec<String> = self
            .probes
            .0
            .iter()
            .flat_map(|client| client.lost.iter().take(3).map(|at| format!("{} at {:.3}", client.identity, at - event)))
            .take(5)
            .collect();
        format!(
            "{}; {lost} datagrams lost {when:?}; {first}; held: {}",
            self.probes.summary(),
            self.connections.summary()
        )
    }

    /// Datagrams without a reply.
    pub(crate) fn lost(&self) -> u64 {
        self.probes.0.iter().map(|client| client.lines[0].saturating_sub(client.lines[1])).sum()
    }

    /// Asserts that no datagram was lost but those that hosts of this machine had no time to receive: at gateways' rings,
    /// and at the sockets of the load.
    #[track_caller]
    pub(crate) fn check_none_lost(&self, cluster: &NodeCluster) {
        let stopped = cluster.cluster.accounting.totals();
        let stopped: u64 = RING_LOSSES.iter().filter_map(|reason| stopped.get(reason)).sum();
        let running = cluster.cluster.metric("vipgate_ring_losses_total", "");
        let running = running + cluster.cluster.drop_count(RING_LOSSES[0]);
        let pods = (0..3).map(|node| &cluster.covered(node).host);
        let full: u64 = pods.chain([&cluster.cluster.server]).map(full_sockets).sum();
        let lost = self.lost();
        println!("{lost} datagrams lost; {running} + {stopped} at rings, {full} at sockets");
        let unexcused = u32::try_from(lost.saturating_sub(stopped + full)).unwrap();
        assert!(f64::from(unexcused) <= running, "{}", self.describe(0.0));
    }

    /// Asserts that no connection broke, and no pod waited longer than this, in seconds.
    #[track_caller]
    pub(crate) fn check(&self, max_wait: f64) {
        self.connections.check_survived(100);
        self.connections.check_no_misdelivery();
        self.probes.check_no_misdelivery();
        assert!(self.probes.longest_wait(0.2) <= max_wait, "{}", self.probes.summary());
    }
}

/// Datagrams that full sockets of a host have lost.
fn full_sockets(host: &Host) -> u64 {
    let text = host.output(&["cat", "/proc/net/snmp"]).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let [names, values] = [lines.next().unwrap(), lines.next().unwrap()].map(|line| line.split(' '));
    let value = names.zip(values).find(|(name, _)| *name == "RcvbufErrors");
    value.and_then(|(_, value)| value.parse().ok()).unwrap_or_else(|| panic!("no RcvbufErrors in {text}"))
}

/// Allows the drops of shards that move to other gateways.
pub(crate) fn allow_shard_moves(cluster: &NodeCluster) {
    cluster.cluster.accounting.allow(["no_lease", "no_owner", "no_service", "no_session", "too_big", "vip_conflicts"]);
}

impl NodeCluster {
    /// Starts a gateway and waits until the group has converged.
    pub(crate) fn start_gateway(&mut self, number: usize) {
        self.cluster.gateways[number].start(&Cluster::overlay_config(number + 1));
        self.cluster.wait_converged();
    }

    /// Names of the gateways that a node sends its pods' packets to.
    pub(crate) fn targets(&self, node: usize) -> Vec<String> {
        let endpoints = self.nodes[node].node.query(&["endpoints"]);
        let endpoints = endpoints["endpoints"].as_array().unwrap().iter();
        endpoints.filter_map(|endpoint| endpoint["target"].as_str().map(str::to_owned)).collect()
    }

    /// Index of the gateway that owns the covered pods' IPv4 VIP: the one that the outside router has resolved it to.
    pub(crate) fn owner(&self) -> usize {
        let entry = self.cluster.outside.output(&["ip", "neigh", "show", L2_VIPS[0]]).unwrap();
        let has_mac = |gateway: &Gateway| {
            let mac = gateway.mac("gw-out").map(|byte| format!("{byte:02x}")).join(":");
            entry.contains(&mac)
        };
        self.cluster.gateways.iter().position(has_mac).unwrap_or_else(|| panic!("no gateway has {entry}"))
    }

    /// Waits until no node sends to a gateway.
    #[track_caller]
    pub(crate) fn wait_no_target(&self, number: usize) {
        let name = format!("gw-{}", number + 1);
        self.wait_targets(|targets| !targets.contains(&name));
    }

    /// Waits until the targets of all nodes' pods are as wanted.
    #[track_caller]
    pub(crate) fn wait_targets(&self, is_right: impl Fn(&[String]) -> bool) {
        let targets = || (0..3).flat_map(|node| self.targets(node)).collect::<Vec<_>>();
        assert!(wait_for(Duration::from_secs(20), || is_right(&targets())), "{:?}\n{}", targets(), self.evidence(0));
    }
}

#[test]
fn a_drained_gateway_costs_no_packet() {
    let mut cluster = NodeCluster::with_gateways("nc-drain", 2, 2);
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    let leaks = cluster.start_leak_verifier();
    allow_shard_moves(&cluster);
    let load = Load::start(&cluster, "drain", 1_000_000);
    let drained = cluster.owner();
    let (code, stdout, stderr) = cluster.cluster.gateways[drained].command(&["drain"]);
    assert!(code == 0 && stdout.contains("it owns no shards"), "{code}: {stdout}{stderr}");
    cluster.wait_no_target(drained);
    cluster.cluster.gateways[drained].stop("TERM");
    sleep_ms(2_000);
    let results = load.end(&cluster);
    println!("gateway {drained} drained and stopped: {}", results.describe(0.0));
    results.check(MAX_OUTAGE);
    results.check_none_lost(&cluster);
    leaks.check();
    server.end();
    cluster.check_kernels_agree();
}

#[test]
fn gateways_are_added_and_removed_without_breaking_a_connection() {
    let mut cluster = NodeCluster::with_gateways("nc-reshard", 3, 2);
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    let leaks = cluster.start_leak_verifier();
    allow_shard_moves(&cluster);
    let load = Load::start(&cluster, "reshard", 1_000_000);

    cluster.cluster.define_gateways(&[0, 1, 2]);
    cluster.apply_gateways();
    cluster.start_gateway(2);
    let has_third = || {
        let knows = |node: &crate::cluster::ClusterNode| {
            let status = node.node.query(&["status"]);
            let gateways = status["gateways"].as_array().unwrap();
            gateways.iter().any(|gateway| gateway["name"] == "gw-3" && gateway["usable"] == true)
        };
        cluster.nodes.iter().all(knows)
    };
    assert!(wait_for(Duration::from_secs(20), has_third), "{}", cluster.nodes[0].node.query(&["status"]));

    // The one that the pods use.
    let removed = cluster.owner();
    let name = format!("gw-{}", removed + 1);
    cluster.api.kubectl(&["delete", "vipgateways.vipgate.io", &name]);
    cluster.wait_no_target(removed);
    let others = cluster.cluster.indices_except(removed);
    let has_left = || others.iter().all(|other| cluster.cluster.gateways[*other].peers_up() == 1);
    assert!(wait_for(Duration::from_secs(20), has_left), "{}", cluster.cluster.gateways[others[0]].log_tail());
    cluster.cluster.gateways[removed].stop("TERM");
    sleep_ms(2_000);
    let results = load.end(&cluster);
    println!("gateway 2 added, gateway {removed} removed: {}", results.describe(0.0));
    results.check(MAX_OUTAGE);
    for node in 0..3 {
        cluster.wait_translated(node);
    }
    leaks.check();
    server.end();
    cluster.check_kernels_agree();
}
