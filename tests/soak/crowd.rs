//! Clients of a soak, and what became of them.

use std::time::Duration;

use vipgate_tests::cluster::{Client, Clients, Cluster, HTTP, Outcome, SERVER, SHARED, Traffic, sources_a, sources_b};

/// Who speaks at least this often, in seconds, is asked how long it had to wait.
const OFTEN: f64 = 0.2;
/// After an event, what was lost meanwhile is sent again: so long, in seconds, a new connection may still notice it.
const AFTERWARDS: f64 = 3.0;
/// New connections a second, of each kind.
const RATE: u32 = 10;

/// What clients are asked in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Duty {
    /// Connections that stand: to be kept.
    Keep,
    /// Flows of datagrams: to be answered, sooner or later.
    Probe,
    /// New connections: to be answered.
    New,
}

/// Clients of one kind.
#[derive(Debug)]
struct Set {
    name: String,
    duty: Duty,
    clients: Clients,
}

/// Clients that run at the same time.
#[derive(Debug, Default)]
pub(crate) struct Crowd(Vec<Set>);

/// What became of all clients so far.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Connections that stood, and that were kept.
    pub(crate) stood: usize,
    pub(crate) kept: usize,
    /// New connections, those without an answer while something happened, and those without one while nothing did.
    pub(crate) begun: usize,
    pub(crate) unanswered: usize,
    pub(crate) unanswered_in_peace: usize,
    /// Answers that were meant for others.
    pub(crate) wrong: u64,
    /// The longest waits of those who speak often: seconds, when it was over, and who it was.
    pub(crate) longest: Vec<(f64, f64, String)>,
}

impl Crowd {
    /// Connections that stand, of pods and of clients of the VIP, each over both families.
    pub(crate) fn standing(cluster: &Cluster, tag: &str, first: &mut u32, scale: u32) -> Self {
        let mut sets = Vec::new();
        for (family, count) in [(0, 2 * scale), (1, scale)] {
            let version = 4 + 2 * family;
            let a = Traffic::held(SERVER[family], sources_a(family), count);
            sets.push((format!("{tag}-a{version}"), Duty::Keep, false, a));
            let b = Traffic::held(SERVER[family], sources_b(family), count / 2);
            sets.push((format!("{tag}-b{version}"), Duty::Keep, false, b));
            let to = (SHARED[family], HTTP);
            let inbound = Traffic { to, ..Traffic::held(SHARED[family], Vec::new(), count) };
            sets.push((format!("{tag}-in{version}"), Duty::Keep, true, inbound));
        }
        Self::start(cluster, first, sets)
    }

    /// Flows that show every gap, and new connections for so many seconds.
    pub(crate) fn passing(cluster: &Cluster, tag: &str, first: &mut u32, seconds: u32) -> Self {
        let mut sets = Vec::new();
        for family in 0..2 {
            let version = 4 + 2 * family;
            let probes = Traffic::probes(SERVER[family], sources_a(family), 6);
            sets.push((format!("{tag}-probe{version}"), Duty::Probe, false, probes));
            let out = Traffic::brief(SERVER[family], sources_a(family), RATE * seconds, RATE);
            sets.push((format!("{tag}-new-out{version}"), Duty::New, false, out));
            let to = (SHARED[family], HTTP);
            let inbound = Traffic { to, ..Traffic::brief(SHARED[family], Vec::new(), RATE * seconds, RATE) };
            sets.push((format!("{tag}-new-in{version}"), Duty::New, true, inbound));
        }
        Self::start(cluster, first, sets)
    }

    fn start(cluster: &Cluster, first: &mut u32, sets: Vec<(String, Duty, bool, Traffic<'_>)>) -> Self {
        let start = |(name, duty, is_inbound, traffic): (String, Duty, bool, Traffic<'_>)| {
            let host = if is_inbound { &cluster.server } else { &cluster.crowd };
            let clients = Clients::start(cluster.folder.path(), host, &name, *first, &traffic);
            *first += traffic.count + 1;
            Set { name, duty, clients }
        };
        Self(sets.into_iter().map(start).collect())
    }

    /// Waits until all that are to stand do.
    pub(crate) fn wait_open(&mut self) {
        for set in self.0.iter_mut().filter(|set| set.duty != Duty::New) {
            set.clients.wait_open(Duration::from_secs(40));
        }
    }

    /// Ends them and adds up what became of them; what must not be, each a sentence. `disturbed` are times at which something happened.
    pub(crate) fn end(self, totals: &mut Totals, disturbed: &[(f64, f64)]) -> Vec<String> {
        let stop = |set: &Set| set.duty != Duty::New;
        self.0.iter().filter(|set| stop(set)).for_each(|set| set.clients.stop());
        let mut failures = Vec::new();
        for Set { name, duty, clients } in self.0 {
            let outcome = clients.wait(Duration::from_mins(2));
            failures.extend(totals.add(&name, duty, &outcome, disturbed));
        }
        failures
    }
}

impl Totals {
    fn add(&mut self, name: &str, duty: Duty, outcome: &Outcome, disturbed: &[(f64, f64)]) -> Vec<String> {
        let mut failures = Vec::new();
        let wrong: u64 = outcome.0.iter().map(|client| client.wrong).sum();
        self.wrong += wrong;
        if wrong > 0 {
            failures.push(format!("{name}: {wrong} answers were meant for others"));
        }
        let bad: Vec<&Client> = outcome.0.iter().filter(|client| !client.is_well()).collect();
        let [all, lost] = outcome.lost();
        match duty {
            Duty::Keep => {
                self.stood += all;
                self.kept += all - lost;
                if lost * 100 > all {
                    failures.push(format!("{name}: {lost} of {all} connections were lost, as {:?}", bad[0]));
                }
            }
            Duty::Probe => {
                let waits = outcome.0.iter().filter(|client| client.pace <= OFTEN);
                let longest = waits.max_by(|one, other| one.longest[0].total_cmp(&other.longest[0]));
                self.longest.extend(longest.map(|client| (client.longest[0], client.longest[1], name.to_owned())));
            }
            Duty::New => {
                let in_peace = |client: &&&Client| {
                    !disturbed.iter().any(|(from, to)| (from - 1.0..to + AFTERWARDS).contains(&client.opened))
                };
                let peaceful = bad.iter().filter(in_peace).count();
                self.begun += all;
                self.unanswered += lost - peaceful;
                self.unanswered_in_peace += peaceful;
                if let Some(client) = bad.iter().find(in_peace) {
                    failures.push(format!(
                        "{name}: {peaceful} new connections failed while nothing happened, as {client:?}"
                    ));
                }
            }
        }
        failures
    }
}
