//! Port requests between gateways: ports of a VIP run out only when those of all gateways are in use.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use proptest::prelude::*;
use vipgate_coverage::property;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::OnExhaustion;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::ports::pool::{PortPool, RefusedAllocations};
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

/// Pods of gateway 0, with a remote and the VIP.
const FLOWS: [(&str, &str, &str); 2] =
    [("10.244.1.5", "198.51.100.10:53", "192.0.2.10"), ("fd00:244:1::5", "[2001:db8:51::10]:53", "2001:db8::10")];

/// A cluster whose VIPs have this number of blocks.
fn cluster(gateways: usize, blocks: u16, workers: u8) -> Cluster {
    let range = PortRange::new(20_032, 20_032 + blocks * 64 - 1).unwrap();
    // A frame that one worker hands off is free at the other one afterwards.
    let mut cluster = Cluster::new(gateways, &Setup { range, workers, frames: 8192, ..Setup::default() });
    cluster.skip_counter_check();
    cluster
}

fn pool(cluster: &Cluster, number: usize, vip: &str) -> std::sync::Arc<PortPool> {
    cluster.gateways[number].builder.snapshot().policy.vip_at(ip(vip)).unwrap().ports.pool.clone()
}

/// A pod sends the first packet of a session at gateway 0; how the remote sees it, if it arrives.
fn open(cluster: &mut Cluster, pod: SocketAddr, remote: &str) -> Option<Vec<u8>> {
    let sent = cluster.receive(0, INSIDE, &packet(Protocol::Udp, pod, at(remote)));
    assert!(sent.len() <= 1 && sent.iter().all(|(_, out, _)| *out == OUTSIDE), "{sent:?}");
    sent.into_iter().next().map(|(_, _, seen)| seen)
}

#[test]
fn ports_run_out_only_when_those_of_all_gateways_do() {
    for (pod, remote, vip) in FLOWS {
        for workers in [1, 2] {
            let mut cluster = cluster(3, 6, workers);
            let mut sessions = Vec::new();
            for n in 0..6 * 64 {
                let client = (ip(pod), 1000 + n).into();
                let seen = open(&mut cluster, client, remote);
                sessions.push((client, seen.unwrap_or_else(|| panic!("{n}: {:?}", cluster.drops()))));
                cluster.replicate();
            }
            let seen: BTreeSet<_> = sessions.iter().map(|(_, seen)| ends(seen).0).collect();
            assert_eq!(seen.len(), sessions.len(), "no port is given out twice");
            assert_eq!(cluster.gateways.iter().map(Gateway::sessions).collect::<Vec<_>>(), [128; 3]);
            // Further ones are refused by the last gateway that was asked.
            for n in 0..5 {
                assert!(open(&mut cluster, (ip(pod), 5000 + n).into(), remote).is_none());
            }
            assert_eq!(cluster.drops(), [(DropReason::PortsExhausted, 5)].into());
            assert_eq!(pool(&cluster, 0, vip).refused(), RefusedAllocations::default());
            assert_eq!(pool(&cluster, 2, vip).refused(), RefusedAllocations { whole: 0, in_shard: 5 });
            check_all(&mut cluster, remote, &sessions);
        }
    }
}

/// A gateway fails; the others send each other what their new successors lack.
fn kill(cluster: &mut Cluster, number: usize) {
    cluster.advance(200);
    cluster.kill(number);
    let live: Vec<usize> = (0..cluster.gateways.len()).filter(|number| cluster.members[*number].active).collect();
    for (&from, &to) in live.iter().flat_map(|from| live.iter().map(move |to| (from, to))).filter(|(a, b)| a != b) {
        cluster.full_sync(from, to);
    }
}

/// Every session continues at every gateway, in both directions.
fn check_all(cluster: &mut Cluster, remote: &str, sessions: &[(SocketAddr, Vec<u8>)]) {
    let active: Vec<usize> = (0..cluster.gateways.len()).filter(|number| cluster.members[*number].active).collect();
    for (client, seen) in sessions {
        for &number in &active {
            let sent = cluster.receive(number, INSIDE, &packet(Protocol::Udp, *client, at(remote)));
            let now: Vec<_> = sent.iter().map(|(_, out, bytes)| (*out, ends(bytes))).collect();
            assert_eq!(now, [(OUTSIDE, ends(seen))], "at {number}: {:?}", cluster.drops());
            let received = cluster.receive(number, OUTSIDE, &reply_to(seen, Protocol::Udp));
            let to: Vec<_> = received.iter().map(|(_, out, bytes)| (*out, ends(bytes).1)).collect();
            assert_eq!(to, [(INSIDE, *client)], "at {number}: {:?}", cluster.drops());
        }
    }
}

#[test]
fn a_connection_opened_by_another_gateway_continues_before_its_record_has_arrived() {
    let (pod, remote, _) = FLOWS[0];
    let mut cluster = cluster(2, 2, 1);
    for n in 0..64 {
        open(&mut cluster, (ip(pod), 1000 + n).into(), remote).unwrap();
    }
    assert_eq!(cluster.tunneled, 0);
    cluster.drops_replication = true;
    let client = at("10.244.1.5:4000");
    let sent = cluster.receive(0, INSIDE, &tcp(client, at(remote), "S", 1000, 0));
    // TCP has ports of its own: those of UDP sessions are free for it.
    let own = expect_one(sent, 0, OUTSIDE, &cluster);
    assert_eq!(cluster.tunneled, 0);
    for n in 1..64 {
        let syn = tcp((ip(pod), 4000 + n).into(), at(remote), "S", 1000, 0);
        cluster.pod_sends(0, 0, &syn);
    }
    let client = at("10.244.1.5:5000");
    let seen = cluster.pod_sends(0, 1, &tcp(client, at(remote), "S", 1000, 0));
    assert_ne!(ends(&seen).0, ends(&own).0);
    assert_eq!(ends(&cluster.remote_sends(0, 1, &tcp(at(remote), ends(&seen).0, "SA", 5000, 1001))).1, client);
    assert_eq!(ends(&cluster.pod_sends(0, 1, &tcp(client, at(remote), "A", 1001, 5001))), ends(&seen));
    // A retransmitted SYN of another connection finds the session that it has opened there.
    let other = at("10.244.1.5:5001");
    assert_eq!(
        ends(&cluster.pod_sends(0, 1, &tcp(other, at(remote), "S", 1000, 0))),
        ends(&cluster.pod_sends(0, 1, &tcp(other, at(remote), "S", 1000, 0)))
    );
    // Stray segments are asked for only as long as a record may be on its way.
    let stray = tcp(at("10.244.1.5:6000"), at(remote), "A", 1, 1);
    assert!(cluster.receive(0, INSIDE, &stray).is_empty());
    assert_eq!(cluster.gateways[1].drops().get(&DropReason::NoSession), Some(&1));
    cluster.advance(1100);
    assert!(cluster.receive(0, INSIDE, &stray).is_empty());
    assert_eq!(cluster.gateways[0].drops().get(&DropReason::NoSession), Some(&1));
}

#[test]
fn the_endpoints_gateway_gets_the_record_at_once() {
    let (pod, remote, _) = FLOWS[0];
    let mut cluster = cluster(3, 3, 1);
    for n in 0..64 {
        open(&mut cluster, (ip(pod), 1000 + n).into(), remote).unwrap();
    }
    assert_eq!(cluster.standby_sessions(0), 0);
    open(&mut cluster, (ip(pod), 3000).into(), remote).unwrap();
    cluster.gateways.iter_mut().for_each(Gateway::turn);
    cluster.replicate();
    assert_eq!(cluster.standby_sessions(0), 1);
}

#[test]
fn a_session_of_another_gateway_fails_over_with_it() {
    for (pod, remote, _) in FLOWS {
        let mut cluster = cluster(3, 6, 1);
        let sessions: Vec<_> = (0..6 * 64)
            .map(|n| {
                let client = (ip(pod), 1000 + n).into();
                let seen = open(&mut cluster, client, remote).unwrap();
                (client, seen)
            })
            .collect();
        kill(&mut cluster, 1);
        check_all(&mut cluster, remote, &sessions);
        // Those of the endpoint's gateway, too.
        kill(&mut cluster, 0);
        check_all(&mut cluster, remote, &sessions);
    }
}

/// The endpoint's policy rejects with a message; it comes from the last gateway that was asked.
#[test]
fn a_refused_connection_is_reset() {
    let (pod, remote, _) = FLOWS[0];
    let range = PortRange::new(20_032, 20_032 + 2 * 64 - 1).unwrap();
    let mut cluster = Cluster::new(2, &Setup { range, ..Setup::default() });
    cluster.skip_counter_check();
    cluster.change_policy(|set| set.policies.iter_mut().for_each(|it| it.on_exhaustion = OnExhaustion::Reject));
    for n in 0..128 {
        let syn = tcp((ip(pod), 1000 + n).into(), at(remote), "S", 1000, 0);
        assert_eq!(cluster.receive(0, INSIDE, &syn).len(), 1, "{n}: {:?}", cluster.drops());
    }
    let refused = cluster.receive(0, INSIDE, &tcp((ip(pod), 9000).into(), at(remote), "S", 1000, 0));
    let reset = expect_one(refused, 1, INSIDE, &cluster);
    assert_eq!(ends(&reset), (at(remote), (ip(pod), 9000).into()));
}

#[derive(Clone, Debug)]
enum Step {
    Open(usize),
    Kill(usize),
    Idle,
}

/// Whatever gateways fail: sessions open as long as the VIP has ports, no port is given out twice, and all continue.
#[test]
fn sessions_open_while_any_gateway_has_ports() {
    let step = prop_oneof![60 => (1..40_usize).prop_map(Step::Open), 2 => (0..4_usize).prop_map(Step::Kill), 2 => Just(Step::Idle)];
    let strategy = (2..=4_usize, 1..6_u16, any::<bool>(), prop::collection::vec(step, 1..16));
    let classes = ["opened", "tunneled", "refused", "killed"];
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() };
    property(config, &strategy, &classes, |(gateways, blocks, v6, steps), coverage| {
        let (pod, remote, _) = FLOWS[usize::from(v6)];
        let mut cluster = cluster(gateways, blocks, 2);
        let mut sessions: Vec<(SocketAddr, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Open(count) => {
                    for _ in 0..count {
                        let client = (ip(pod), 1000 + sessions.len() as u16).into();
                        let number = (0..gateways).find(|number| cluster.members[*number].active).unwrap();
                        let sent = cluster.receive(number, INSIDE, &packet(Protocol::Udp, client, at(remote)));
                        cluster.replicate();
                        let Some((_, OUTSIDE, seen)) = sent.into_iter().next() else {
                            prop_assert_eq!(sessions.len(), usize::from(blocks) * 64, "{:?}", cluster.drops());
                            coverage.count("refused");
                            break;
                        };
                        let is_new = sessions.iter().all(|(_, other)| ends(other).0 != ends(&seen).0);
                        prop_assert!(is_new, "{} is given out twice", ends(&seen).0);
                        sessions.push((client, seen));
                        coverage.count("opened");
                    }
                }
                Step::Kill(number) => {
                    let active = cluster.members.iter().filter(|it| it.active).count();
                    if number < gateways && active > 1 && cluster.members[number].active {
                        kill(&mut cluster, number);
                        coverage.count("killed");
                    }
                }
                Step::Idle => cluster.advance(300),
            }
        }
        coverage.add("tunneled", cluster.tunneled);
        check_all(&mut cluster, remote, &sessions);
        Ok(())
    });
}
