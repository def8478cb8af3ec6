//! What most scenarios begin with: connections that stand, flows that show every gap, and everything watched.

use std::time::Duration;

use vipgate_tests::cluster::{
    Clients, Cluster, Outcome, Record, SERVER, Traffic, Watch, check_all_different, pass, sources_a,
};

/// The longest time without a gateway that clients may notice, seconds.
pub(crate) const OUTAGE: f64 = 1.0;
/// What TCP may add to that: it probes, and then sends again every 0.2 s, and has just done so.
pub(crate) const RETRANSMISSION: f64 = 0.5;
/// Who speaks more often than this, in seconds, is asked how long it had to wait.
const OFTEN: f64 = 0.2;
/// How long routers go on sending to a dead gateway: BFD with three times 100 ms.
pub(crate) const DETECTED: u64 = 300;
/// Copies may be this late, seconds.
pub(crate) const AGE: f64 = 0.2;
/// After the signal that kills a gateway, in seconds: what a client notes as begun later than this was not answered by that gateway.
pub(crate) const NOTICED: f64 = 0.2;

/// Clients of tenant A on both families.
pub(crate) struct Scene {
    watch: Watch,
    held: [Clients; 2],
    probes: [Clients; 2],
}

/// What became of a scene.
pub(crate) struct Ended {
    /// Connections.
    pub(crate) held: Outcome,
    /// Flows.
    pub(crate) probes: Outcome,
}

impl Scene {
    /// So many connections, four in five of them over IPv4, and so many flows, half of them.
    pub(crate) fn begin(cluster: &Cluster, connections: u32, flows: u32) -> Self {
        let watch = cluster.watch();
        let parts = [(0, "four", connections * 4 / 5), (1, "six", connections / 5)];
        let mut held = parts.map(|(family, name, count)| {
            let traffic = Traffic::held(SERVER[family], sources_a(family), count);
            cluster.crowd(&format!("held-{name}"), 10_000_000 * (family as u32 + 1), &traffic)
        });
        for clients in &mut held {
            clients.wait_open(Duration::from_secs(30));
        }
        let probes = probes(cluster, "probes", 30_000_000, flows);
        Self { watch, held, probes }
    }

    /// Ends all, and judges what must hold always.
    pub(crate) fn end(self, cluster: &Cluster) -> Ended {
        let ([held, held_six], [probes, probes_six]) = (self.held, self.probes);
        let [held, held_six, probes, probes_six] = Clients::end_all([held, held_six, probes, probes_six]);
        let [held, probes] =
            [(held, held_six), (probes, probes_six)].map(|(four, six)| Outcome([four.0, six.0].concat()));
        println!("connections: {}\nflows: {}", held.summary(), probes.summary());
        for outcome in [&held, &probes] {
            outcome.check_nobody_else_was_heard();
        }
        let records = self.watch.check_handover(cluster);
        check_all_different(&records);
        let changed = seen_twice(&records);
        assert!(changed.is_empty(), "{} flows lost their port, as {}", changed.len(), changed[0]);
        cluster.check_frames();
        Ended { held, probes }
    }
}

/// Flows on both families that show every gap.
pub(crate) fn probes(cluster: &Cluster, name: &str, first: u32, count: u32) -> [Clients; 2] {
    let mut probes = [0, 1].map(|family| {
        let traffic = Traffic::probes(SERVER[family], sources_a(family), count / 2);
        cluster.crowd(&format!("{name}-{family}"), first + 1_000_000 * family as u32, &traffic)
    });
    for clients in &mut probes {
        clients.wait_open(Duration::from_secs(20));
    }
    probes
}

impl Ended {
    /// Of those that stood when this moment came, 99 in 100 live, and nobody who speaks often had to wait too long.
    pub(crate) fn check_outage(&self, died: f64) {
        let older = self.held.older(AGE, died);
        older.check_survived(99);
        assert!(self.probes.p99(OFTEN) <= OUTAGE, "{}", self.probes.summary());
        assert!(older.p99(OFTEN) <= OUTAGE + RETRANSMISSION, "{}", older.summary());
    }

    /// Nothing was lost, and nobody waited longer than this.
    pub(crate) fn check_unharmed(&self, longest: f64) {
        self.held.check_all_well();
        self.probes.check_all_well();
        assert!(self.probes.longest(OFTEN) <= longest, "{}", self.probes.summary());
        assert!(self.held.longest(OFTEN) <= longest + RETRANSMISSION, "{}", self.held.summary());
    }
}

/// Kills a gateway; the routers notice when such routers do. The moment at which it died.
pub(crate) fn kill(cluster: &mut Cluster, number: usize) -> f64 {
    shares_move(cluster);
    let died = cluster.gateways[number].kill();
    routers_notice(cluster, number);
    died
}

/// Shares go from one gateway to another: for a moment packets come to one that doesn't have the share, or the session, any more or not
/// yet, and what a gateway that dies hasn't replicated is lost. How long that is, and for how many, clients notice. What they say
/// meanwhile comes, and is answered, in segments that are too long for the tunnel between gateways: TCP learns of that.
pub(crate) fn shares_move(cluster: &Cluster) {
    cluster.ledger.allow(["no_lease", "no_owner", "no_service", "no_session", "too_big"]);
}

/// Packets come that don't fit the tunnel between gateways: their senders learn what does, from a few ICMP errors a second.
pub(crate) fn tunnels_are_narrow(cluster: &Cluster) {
    cluster.ledger.expect(["too_big"]);
    cluster.ledger.allow(["answers_limited"]);
}

/// After the time that routers need for it, they send nothing to this gateway any more.
pub(crate) fn routers_notice(cluster: &Cluster, number: usize) {
    pass(DETECTED);
    cluster.spread_over(&cluster.but(number));
}

/// A gateway that was away is started, and the routers send to it again once it is at work.
pub(crate) fn come_back(cluster: &mut Cluster, number: usize) {
    shares_move(cluster);
    cluster.gateways[number].start("");
    cluster.wait_whole();
    cluster.spread_over(&cluster.all());
}

/// New connections all work, from so many in a second for some seconds.
pub(crate) fn new_ones_work(cluster: &Cluster, name: &str, first: u32, count: u32) {
    let brief = cluster.crowd(name, first, &Traffic::brief(SERVER[0], sources_a(0), count, 200));
    let outcome = brief.wait(Duration::from_mins(1));
    outcome.check_all_well();
}

/// Who was seen with more than one address and port: a session was lost and opened again.
fn seen_twice(records: &[Record]) -> Vec<&str> {
    let mut seen: Vec<&str> = records.iter().map(|record| record.identity.as_str()).collect();
    seen.sort_unstable();
    let mut twice: Vec<&str> = seen.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    twice.dedup();
    twice
}

/// The addresses that the far side has seen of these clients.
pub(crate) fn seen_as(records: &[Record]) -> Vec<&str> {
    let mut seen: Vec<&str> = records.iter().map(|record| record.peer.0.as_str()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}
