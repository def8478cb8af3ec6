//! Shards that move between running gateways: no session is lost, whatever was replicated, and no ended session
//! reappears.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::policy::spec::ShardSpec;
use vipgate_dataplane::session::timeout::Timeouts;

use super::*;

#[test]
fn a_shard_that_skips_its_standby_gateway_keeps_its_sessions() {
    let pods = [("10.244.1.5", REMOTE), ("[fd00:244:1::5]", "[2001:db8:51::10]:443")];
    for (one_by_one, sender) in [(true, 1), (true, 0), (false, 1), (false, 0)] {
        let mut cluster = three_gateways();
        let mut open = |(pod, remote), port| {
            let request = packet(Protocol::Udp, at(&format!("{pod}:{port}")), at(remote));
            let seen = cluster.pod_sends(0, 0, &request);
            (request, seen)
        };
        let ports = pods.into_iter().flat_map(|it| (4000..4010).map(move |port| (it, port)));
        let all: Vec<_> = ports.map(|(it, port)| open(it, port)).collect();
        cluster.advance(200);
        assert_eq!(
            (cluster.standby_sessions(1), cluster.standby_sessions(2)),
            (20, 0),
            "replicated only to the next owner"
        );
        // Both stop being active but keep running; the standby gateway replicated nothing of the sessions that it owned
        // for a moment.
        for number in [0, 1] {
            cluster.members[number].active = false;
            if one_by_one {
                cluster.publish_views();
            }
        }
        cluster.publish_views();
        // The new owner's sync includes none of them, and ends none.
        cluster.full_sync(2, 0);
        cluster.full_sync(2, 1);
        assert_eq!((cluster.full_sync(sender, 2), cluster.full_sync(sender, 2)), (20, 0));
        assert_continue(&mut cluster, 1, 2, &all);
        cluster.assert_delta(&["egress 20, created 20", "peer_out 20", "egress 20, peer_in 20, failed over 20"]);
    }
}

#[test]
fn a_new_standby_gateway_gets_all_sessions_of_the_former_one() {
    let mut cluster = three_gateways();
    let sessions = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.advance(200);
    assert_eq!((cluster.standby_sessions(1), cluster.standby_sessions(2)), (10, 0));
    cluster.change_policy(|set| {
        for share in set.vips.iter_mut().flat_map(|vip| &mut vip.shards).filter(|share| share.gateway == name(0)) {
            share.backups.reverse();
        }
    });
    // The gateway that had the replicas fails, and the owner stops before it has replicated to the other one.
    cluster.kill(1);
    cluster.members[0].active = false;
    cluster.publish_views();
    assert_eq!((cluster.full_sync(0, 2), cluster.full_sync(0, 2)), (10, 0));
    assert_continue(&mut cluster, 0, 2, &sessions);
    cluster.assert_delta(&["egress 10, peer_out 10, created 10", "", "egress 10, peer_in 10, failed over 10"]);
}

#[test]
fn a_shard_with_a_new_home_keeps_its_sessions() {
    let mut cluster = three_gateways();
    let sessions = open_sessions(&mut cluster, 1, "10.244.1.21", 4000..4010);
    cluster.advance(200);
    assert_eq!((cluster.standby_sessions(0), cluster.standby_sessions(2)), (0, 10));
    cluster.change_policy(|set| {
        let vip = set.vips.iter_mut().find(|vip| vip.address == ip("192.0.2.11")).unwrap();
        vip.shards = vec![ShardSpec { gateway: name(0), blocks: None, backups: vec![name(2), name(1)] }];
        let pods = set.endpoints.iter_mut().filter(|endpoint| endpoint.address == ip("10.244.1.21"));
        pods.for_each(|pod| pod.gateway = Some(name(0)));
    });
    assert_eq!((cluster.full_sync(0, 1), cluster.full_sync(0, 2)), (0, 0), "a sync without sessions ends none");
    assert_eq!((cluster.full_sync(1, 0), cluster.full_sync(1, 0)), (10, 0));
    assert_continue(&mut cluster, 1, 0, &sessions);
    cluster.skip_counter_check();
}

#[test]
fn a_policy_change_alone_starts_no_replication_epoch() {
    let mut cluster = three_gateways();
    let sessions = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.advance(200);
    let epoch = |cluster: &Cluster| cluster.gateways[0].builder.snapshot().policy.members().replication_epoch();
    let before = epoch(&cluster);
    cluster.change_policy(|set| {
        let mut vip = set.vips.iter().find(|vip| vip.address == ip("192.0.2.11")).unwrap().clone();
        vip.address = ip("192.0.2.12");
        set.vips.push(vip);
        set.vips[0].reserved_ports = vec![22, 23];
    });
    assert_eq!(epoch(&cluster), before, "no session has another replica target");
    cluster.members[0].active = false;
    cluster.publish_views();
    assert_eq!((epoch(&cluster), cluster.full_sync(0, 1)), (before, 0), "they were replicated when they opened");
    assert_continue(&mut cluster, 0, 1, &sessions);
    cluster.skip_counter_check();
}

/// Opens a pod's connection at a gateway; returns the pod's external address, and the pod's own.
fn connected(cluster: &mut Cluster, number: GatewayIndex) -> (SocketAddr, SocketAddr) {
    let pod = at("10.244.1.5:4000");
    (cluster.connect(number, pod, at(REMOTE)), pod)
}

/// Both sides close it.
fn close(cluster: &mut Cluster, number: GatewayIndex, (vip, pod): (SocketAddr, SocketAddr)) {
    let remote = at(REMOTE);
    cluster.pod_sends(number, number, &tcp(pod, remote, "FA", 1001, 5001));
    cluster.remote_sends(number, number, &tcp(remote, vip, "FA", 5001, 1002));
}

#[test]
fn a_reconnected_gateway_restores_no_ended_session() {
    let mut cluster = three_gateways();
    let connection = connected(&mut cluster, 0);
    cluster.advance(200);
    assert_eq!(cluster.standby_sessions(1), 1);
    // It keeps running, disconnected.
    cluster.kill(0);
    close(&mut cluster, 1, connection);
    cluster.advance(7_000);
    assert_eq!(
        (cluster.gateways[0].sessions(), cluster.gateways[1].sessions(), cluster.standby_sessions(1)),
        (1, 0, 0)
    );
    cluster.members[0] = MemberState { active: false, connected: true, may_open: true };
    cluster.publish_views();
    assert_eq!(cluster.full_sync(0, 1), 0, "the standby gateway already has it");
    cluster.full_sync(1, 0);
    assert_eq!((cluster.gateways[0].sessions(), cluster.standby_sessions(0), cluster.standby_sessions(1)), (0, 0, 0));
    cluster.skip_counter_check();
}

#[test]
fn outdated_records_do_not_replace_newer_ones() {
    let mut cluster = three_gateways();
    cluster.members[0] = MemberState { active: false, connected: true, may_open: true };
    cluster.publish_views();
    let connection = connected(&mut cluster, 1);
    cluster.advance(200);
    assert_eq!((cluster.standby_sessions(0), cluster.standby_sessions(2)), (1, 1));
    // One of them misses the close, and replicates its outdated state later.
    cluster.members[2].connected = false;
    cluster.publish_views();
    cluster.advance(100);
    close(&mut cluster, 1, connection);
    cluster.advance(100);
    cluster.members.iter_mut().for_each(|it| (it.connected, it.active) = (true, true));
    cluster.publish_views();
    assert_eq!((cluster.full_sync(1, 0), cluster.full_sync(2, 0)), (1, 1), "two gateways had replicas of it");
    cluster.pod_sends(0, 0, &tcp(connection.1, at(REMOTE), "A", 1002, 5002));
    assert_eq!(cluster.gateways[0].sessions(), 1);
    cluster.advance(5_000);
    assert_eq!(cluster.gateways[0].sessions(), 0, "closed: 4 s here, established would be 30 s");
    cluster.skip_counter_check();
}

/// A step of a scenario with three running gateways.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A pod opens a session, received by some gateway.
    Open {
        pod: usize,
        at: GatewayIndex,
    },
    /// A pod continues a session.
    Continue {
        which: prop::sample::Index,
        at: GatewayIndex,
    },
    Time(u32),
    Stop(GatewayIndex),
    /// A gateway gets a full sync from the active ones, and is active again.
    Activate(GatewayIndex),
    /// It disconnects from all others, or reconnects.
    ToggleConnection(GatewayIndex),
    Sync(GatewayIndex, GatewayIndex),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2_usize, 0..3_usize).prop_map(|(pod, at)| Step::Open { pod, at }),
        1 => (any::<prop::sample::Index>(), 0..3_usize).prop_map(|(which, at)| Step::Continue { which, at }),
        3 => (10..250_u32).prop_map(Step::Time),
        2 => (0..3_usize).prop_map(Step::Stop),
        2 => (0..3_usize).prop_map(Step::Activate),
        1 => (0..3_usize).prop_map(Step::ToggleConnection),
        3 => (0..3_usize, 0..3_usize).prop_map(|(from, to)| Step::Sync(from, to)),
    ]
}

/// Whether the owner of a session's shard has the session.
fn has_session(cluster: &Cluster, request: &[u8]) -> bool {
    let (source, destination) = ends(request);
    let (IpAddr::V4(from), IpAddr::V4(to)) = (source.ip(), destination.ip()) else { panic!("IPv4") };
    let home = usize::from(from.octets()[3] != 5);
    let owner = (0..3).map(|step| (home + step) % 3).find(|number| cluster.members[*number].active).unwrap();
    let tuple = Tuple {
        source: from.to_bits(),
        destination: to.to_bits(),
        source_port: source.port(),
        destination_port: destination.port(),
        protocol: 17,
    };
    let sessions = &cluster.gateways[owner].workers[0].tables().sessions;
    sessions.find(sessions.hash(&tuple), &tuple).is_some()
}

fn sync(cluster: &mut Cluster, from: GatewayIndex, to: GatewayIndex) -> usize {
    let is_linked = from != to && cluster.members[from].connected && cluster.members[to].connected;
    if is_linked { cluster.full_sync(from, to) } else { 0 }
}

/// Three gateways, and the sessions opened through them: the first packet as sent by the pod, and as seen outside.
struct Run<'a> {
    cluster: Cluster,
    sessions: Vec<(Vec<u8>, Vec<u8>)>,
    coverage: &'a Coverage,
}

impl Run<'_> {
    fn step(&mut self, step: Step) -> TestCaseResult {
        match step {
            Step::Open { pod, at } => return self.open(pod, at),
            Step::Continue { which, at } => return self.continue_session(which, at),
            Step::Time(ms) => self.cluster.advance(ms),
            Step::Stop(number) => {
                let active = self.cluster.members.iter().filter(|it| it.active).count();
                if self.cluster.members[number].active && active > 1 {
                    self.cluster.members[number].active = false;
                    self.cluster.publish_views();
                    self.coverage.count("stopped");
                }
            }
            Step::Activate(number) => self.activate(number),
            Step::ToggleConnection(number) => {
                self.cluster.members[number].connected = !self.cluster.members[number].connected;
                self.cluster.publish_views();
                // A new connection starts with a full sync.
                for other in 0..3 {
                    sync(&mut self.cluster, number, other);
                    sync(&mut self.cluster, other, number);
                }
                self.coverage.count("disconnected");
            }
            Step::Sync(from, to) => self.coverage.add("synced", sync(&mut self.cluster, from, to) as u64),
        }
        Ok(())
    }

    fn open(&mut self, pod: usize, number: GatewayIndex) -> TestCaseResult {
        // Each session has its own remote, so no port is in use, whatever an owner doesn't have yet.
        let n = self.sessions.len();
        let pod = format!("10.244.1.{}:{}", 5 + pod, 4000 + n);
        let request = packet(Protocol::Udp, at(&pod), at(&format!("198.51.100.10:{}", 1000 + n)));
        let sent = self.cluster.receive(number, INSIDE, &request);
        prop_assert_eq!(sent.len(), 1);
        self.sessions.extend(sent.into_iter().map(|(_, _, seen)| (request.clone(), seen)));
        self.coverage.count("opened");
        Ok(())
    }

    fn continue_session(&mut self, which: prop::sample::Index, number: GatewayIndex) -> TestCaseResult {
        // At an owner that doesn't have the session yet, it would be reopened; in production such an owner may not open
        // sessions.
        let existing = (!self.sessions.is_empty()).then(|| which.get(&self.sessions));
        let Some((request, seen)) = existing.filter(|it| has_session(&self.cluster, &it.0)) else { return Ok(()) };
        let again = self.cluster.receive(number, INSIDE, request);
        prop_assert_eq!(again.len(), 1, "{:?}", self.cluster.drops());
        prop_assert_eq!(ends(&again[0].2), ends(seen));
        self.coverage.count("continued");
        Ok(())
    }

    fn activate(&mut self, number: GatewayIndex) {
        let cluster = &mut self.cluster;
        if cluster.members[number].active || !cluster.members[number].connected {
            return;
        }
        let active: Vec<_> = (0..3).filter(|other| cluster.members[*other].active).collect();
        for other in active {
            sync(cluster, other, number);
        }
        cluster.members[number].active = true;
        cluster.publish_views();
        self.coverage.count("returned");
    }
}

/// Whatever stops, returns or disconnects while all gateways run, and whatever was replicated by then: after full
/// syncs, every session continues with its port.
#[test]
fn no_session_is_lost_while_its_gateways_live() {
    let classes = ["opened", "continued", "stopped", "returned", "disconnected", "synced", "failed over"];
    let steps = prop::collection::vec(step(), 1..60);
    property(ProptestConfig::with_cases(256), &steps, &classes, |steps, coverage| {
        let timeouts = Timeouts { udp: 60_000, ..Setup::default().timeouts };
        let mut cluster = Cluster::new(3, &Setup { timeouts, ..Setup::default() });
        cluster.skip_counter_check();
        let mut run = Run { cluster, sessions: Vec::new(), coverage };
        for step in steps {
            run.step(step)?;
        }
        let Run { mut cluster, sessions, .. } = run;
        cluster.members.iter_mut().for_each(|it| it.connected = true);
        cluster.publish_views();
        for pair in (0..27).map(|n| n % 9) {
            sync(&mut cluster, pair / 3, pair % 3);
        }
        for (number, (request, seen)) in sessions.iter().enumerate() {
            let again = cluster.receive(number % 3, INSIDE, request);
            prop_assert_eq!(again.len(), 1, "{:?}", cluster.drops());
            prop_assert_eq!(ends(&again[0].2), ends(seen), "session {}", number);
        }
        let failed_over =
            cluster.gateways.iter().flat_map(|it| &it.workers).map(|it| it.counters().sessions_failed_over.get());
        coverage.add("failed over", failed_over.sum());
        Ok(())
    });
}
