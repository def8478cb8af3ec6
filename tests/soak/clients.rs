//! Clients of the soak and their results.

use std::time::Duration;

use vipgate_tests::cluster::{
    BGP_VIPS, Client, ClientConfig, ClientResults, Clients, Cluster, HTTP_PORT, SERVER, sources_a, sources_b,
};

/// Clients with at most this interval between lines, in seconds, measure gaps.
const MAX_PROBE_INTERVAL: f64 = 0.2;
/// Seconds after an event in which a new connection may still fail: packets lost meanwhile are retransmitted.
const RECOVERY_SECONDS: f64 = 3.0;
/// New connections per second, of each kind.
const CONNECTIONS_PER_SECOND: u32 = 10;

/// Requirement on a set of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requirement {
    /// Held connections: must survive.
    Keep,
    /// UDP flows: must get replies again after a gap.
    Probe,
    /// New connections: must get a reply.
    New,
}

/// A set of clients of one kind.
#[derive(Debug)]
struct Set {
    name: String,
    requirement: Requirement,
    clients: Clients,
}

/// Sets of clients that run at the same time.
#[derive(Debug, Default)]
pub(crate) struct ClientSets(Vec<Set>);

/// Accumulated results of all clients.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Held connections, and those that survived.
    pub(crate) held: usize,
    pub(crate) survived: usize,
    /// New connections, those without a reply during a disruption, and those without one at other times.
    pub(crate) opened: usize,
    pub(crate) unanswered: usize,
    pub(crate) unanswered_undisturbed: usize,
    /// Replies delivered to another client.
    pub(crate) misdelivered: u64,
    /// The longest waits of frequent senders: seconds, when it ended, and the set's name.
    pub(crate) longest_waits: Vec<(f64, f64, String)>,
}

impl ClientSets {
    /// Held connections of pods and of clients of a VIP, over both families.
    pub(crate) fn held(cluster: &Cluster, tag: &str, first: &mut u32, scale: u32) -> Self {
        let mut sets = Vec::new();
        for (family, count) in [(0, 2 * scale), (1, scale)] {
            let version = 4 + 2 * family;
            let a = ClientConfig::held_connections(SERVER[family], sources_a(family), count);
            sets.push((format!("{tag}-a{version}"), Requirement::Keep, false, a));
            let b = ClientConfig::held_connections(SERVER[family], sources_b(family), count / 2);
            sets.push((format!("{tag}-b{version}"), Requirement::Keep, false, b));
            let to = (BGP_VIPS[family], HTTP_PORT);
            let inbound =
                ClientConfig { server: to, ..ClientConfig::held_connections(BGP_VIPS[family], Vec::new(), count) };
            sets.push((format!("{tag}-in{version}"), Requirement::Keep, true, inbound));
        }
        Self::start(cluster, first, sets)
    }

    /// UDP flows that measure gaps, and new connections for this many seconds.
    pub(crate) fn probes_and_new(cluster: &Cluster, tag: &str, first: &mut u32, seconds: u32) -> Self {
        let mut sets = Vec::new();
        for family in 0..2 {
            let version = 4 + 2 * family;
            let probes = ClientConfig::probes(SERVER[family], sources_a(family), 6);
            sets.push((format!("{tag}-probe{version}"), Requirement::Probe, false, probes));
            let connections = CONNECTIONS_PER_SECOND * seconds;
            let out =
                ClientConfig::short_connections(SERVER[family], sources_a(family), connections, CONNECTIONS_PER_SECOND);
            sets.push((format!("{tag}-new-out{version}"), Requirement::New, false, out));
            let to = (BGP_VIPS[family], HTTP_PORT);
            let inbound = ClientConfig {
                server: to,
                ..ClientConfig::short_connections(BGP_VIPS[family], Vec::new(), connections, CONNECTIONS_PER_SECOND)
            };
            sets.push((format!("{tag}-new-in{version}"), Requirement::New, true, inbound));
        }
        Self::start(cluster, first, sets)
    }

    fn start(cluster: &Cluster, first: &mut u32, sets: Vec<(String, Requirement, bool, ClientConfig<'_>)>) -> Self {
        let start = |(name, requirement, is_inbound, traffic): (String, Requirement, bool, ClientConfig<'_>)| {
            let host = if is_inbound { &cluster.server } else { &cluster.bulk_pods };
            let clients = Clients::start(cluster.folder.path(), host, &name, *first, &traffic);
            *first += traffic.count + 1;
            Set { name, requirement, clients }
        };
        Self(sets.into_iter().map(start).collect())
    }

    /// Waits until all held connections and flows are established.
    pub(crate) fn wait_established(&mut self) {
        for set in self.0.iter_mut().filter(|set| set.requirement != Requirement::New) {
            set.clients.wait_established(Duration::from_secs(40));
        }
    }

    /// Stops the clients, adds their results to the totals, and returns violations. `disturbed` are the intervals of
    /// disruptive events.
    pub(crate) fn end(self, totals: &mut Totals, disturbed: &[(f64, f64)]) -> Vec<String> {
        let runs_until_stopped = |set: &Set| set.requirement != Requirement::New;
        self.0.iter().filter(|set| runs_until_stopped(set)).for_each(|set| set.clients.stop());
        let mut violations = Vec::new();
        for Set { name, requirement, clients } in self.0 {
            let outcome = clients.wait(Duration::from_mins(2));
            violations.extend(totals.add(&name, requirement, &outcome, disturbed));
        }
        violations
    }
}

impl Totals {
    fn add(
        &mut self,
        name: &str,
        requirement: Requirement,
        outcome: &ClientResults,
        disturbed: &[(f64, f64)],
    ) -> Vec<String> {
        let mut violations = Vec::new();
        let wrong: u64 = outcome.0.iter().map(|client| client.misdelivered).sum();
        self.misdelivered += wrong;
        if wrong > 0 {
            violations.push(format!("{name}: {wrong} replies were delivered to another client"));
        }
        let failed: Vec<&Client> = outcome.0.iter().filter(|client| !client.succeeded()).collect();
        let [all, lost] = outcome.total_and_failed();
        match requirement {
            Requirement::Keep => {
                self.held += all;
                self.survived += all - lost;
                if lost * 100 > all {
                    violations.push(format!("{name}: {lost} of {all} connections were lost, such as {:?}", failed[0]));
                }
            }
            Requirement::Probe => {
                let waits = outcome.0.iter().filter(|client| client.interval <= MAX_PROBE_INTERVAL);
                let longest = waits.max_by(|one, other| one.longest_wait[0].total_cmp(&other.longest_wait[0]));
                self.longest_waits
                    .extend(longest.map(|client| (client.longest_wait[0], client.longest_wait[1], name.to_owned())));
            }
            Requirement::New => {
                let is_undisturbed = |client: &&&Client| {
                    !disturbed.iter().any(|(from, to)| (from - 1.0..to + RECOVERY_SECONDS).contains(&client.started_at))
                };
                let undisturbed = failed.iter().filter(is_undisturbed).count();
                self.opened += all;
                self.unanswered += lost - undisturbed;
                self.unanswered_undisturbed += undisturbed;
                if let Some(client) = failed.iter().find(is_undisturbed) {
                    violations.push(format!(
                        "{name}: {undisturbed} new connections failed without a disruption, such as {client:?}"
                    ));
                }
            }
        }
        violations
    }
}
