//! Shares that move among gateways that live: nothing of them is lost, whoever was told of it, and nothing comes back that has ended.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::Tuple;
use vipgate_dataplane::snapshot::spec::ShareSpec;

use super::*;
use crate::tally::property;

#[test]
fn a_share_that_passes_its_standby_by_takes_everything_along() {
    let pods = [("10.244.1.5", FAR), ("[fd00:244:1::5]", "[2001:db8:51::10]:443")];
    for (one_by_one, teller) in [(true, 1), (true, 0), (false, 1), (false, 0)] {
        let mut cluster = three();
        let mut open = |(pod, far), port| {
            let question = packet(Protocol::Udp, at(&format!("{pod}:{port}")), at(far));
            let sent = cluster.arrives(0, INSIDE, &question);
            (question, only(sent, 0, OUTSIDE, &cluster))
        };
        let ports = pods.into_iter().flat_map(|it| (4000..4010).map(move |port| (it, port)));
        let all: Vec<_> = ports.map(|(it, port)| open(it, port)).collect();
        cluster.pass(200);
        assert_eq!((cluster.copies(1), cluster.copies(2)), (20, 0), "only the next one is told");
        // Both stop and live; the standby told nobody of what it had for a moment.
        for number in [0, 1] {
            cluster.members[number].serving = false;
            if one_by_one {
                cluster.agree();
            }
        }
        cluster.agree();
        // That the new owner names none of them ends none.
        cluster.tell_all(2, 0);
        cluster.tell_all(2, 1);
        assert_eq!((cluster.tell_all(teller, 2), cluster.tell_all(teller, 2)), (20, 0));
        go_on(&mut cluster, 1, 2, &all);
        cluster.assert_delta(&["egress 20, created 20", "peer_out 20", "egress 20, peer_in 20, taken over 20"]);
    }
}

#[test]
fn whoever_stands_in_by_a_new_policy_lacks_nothing_that_another_one_was_told_before() {
    let mut cluster = three();
    let sessions = opened(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.pass(200);
    assert_eq!((cluster.copies(1), cluster.copies(2)), (10, 0));
    cluster.change_policy(|set| {
        for share in set.vips.iter_mut().flat_map(|vip| &mut vip.shares).filter(|share| share.gateway == name(0)) {
            share.backups.reverse();
        }
    });
    // Whoever was told dies, and the owner stops before it has told the other one.
    cluster.kill(1);
    cluster.members[0].serving = false;
    cluster.agree();
    assert_eq!((cluster.tell_all(0, 2), cluster.tell_all(0, 2)), (10, 0));
    go_on(&mut cluster, 0, 2, &sessions);
    cluster.assert_delta(&["egress 10, peer_out 10, created 10", "", "egress 10, peer_in 10, taken over 10"]);
}

#[test]
fn a_share_that_policy_gives_another_home_takes_everything_along() {
    let mut cluster = three();
    let sessions = opened(&mut cluster, 1, "10.244.1.21", 4000..4010);
    cluster.pass(200);
    assert_eq!((cluster.copies(0), cluster.copies(2)), (0, 10));
    cluster.change_policy(|set| {
        let vip = set.vips.iter_mut().find(|vip| vip.address == ip("192.0.2.11")).unwrap();
        vip.shares = vec![ShareSpec { gateway: name(0), blocks: None, backups: vec![name(2), name(1)] }];
        let pods = set.endpoints.iter_mut().filter(|endpoint| endpoint.address == ip("10.244.1.21"));
        pods.for_each(|pod| pod.gateway = Some(name(0)));
    });
    assert_eq!((cluster.tell_all(0, 1), cluster.tell_all(0, 2)), (0, 0), "that it names none ends none");
    assert_eq!((cluster.tell_all(1, 0), cluster.tell_all(1, 0)), (10, 0));
    go_on(&mut cluster, 1, 0, &sessions);
    cluster.counts_vary();
}

#[test]
fn a_change_of_policy_alone_makes_nobody_tell_anything_again() {
    let mut cluster = three();
    let sessions = opened(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.pass(200);
    let epoch = |cluster: &Cluster| cluster.gateways[0].builder.snapshot().policy.members().replication_epoch();
    let before = epoch(&cluster);
    cluster.change_policy(|set| {
        let mut vip = set.vips.iter().find(|vip| vip.address == ip("192.0.2.11")).unwrap().clone();
        vip.address = ip("192.0.2.12");
        set.vips.push(vip);
        set.vips[0].reserved_ports = vec![22, 23];
    });
    assert_eq!(epoch(&cluster), before, "no session has another place");
    cluster.members[0].serving = false;
    cluster.agree();
    assert_eq!((epoch(&cluster), cluster.tell_all(0, 1)), (before, 0), "it was told as they opened");
    go_on(&mut cluster, 0, 1, &sessions);
    cluster.counts_vary();
}

/// A connection of a pod's that has opened at a gateway; its VIP's end, and its pod's.
fn connected(cluster: &mut Cluster, number: Number) -> (SocketAddr, SocketAddr) {
    let (pod, far) = (at("10.244.1.5:4000"), at(FAR));
    let seen = only(cluster.arrives(number, INSIDE, &tcp(pod, far, "S", 1000, 0)), number, OUTSIDE, cluster);
    let vip = ends(&seen).0;
    only(cluster.arrives(number, OUTSIDE, &tcp(far, vip, "SA", 5000, 1001)), number, INSIDE, cluster);
    only(cluster.arrives(number, INSIDE, &tcp(pod, far, "A", 1001, 5001)), number, OUTSIDE, cluster);
    (vip, pod)
}

/// Both sides close it.
fn close(cluster: &mut Cluster, number: Number, (vip, pod): (SocketAddr, SocketAddr)) {
    let far = at(FAR);
    only(cluster.arrives(number, INSIDE, &tcp(pod, far, "FA", 1001, 5001)), number, OUTSIDE, cluster);
    only(cluster.arrives(number, OUTSIDE, &tcp(far, vip, "FA", 5001, 1002)), number, INSIDE, cluster);
}

#[test]
fn who_was_cut_off_brings_nothing_back_that_has_ended_meanwhile() {
    let mut cluster = three();
    let connection = connected(&mut cluster, 0);
    cluster.pass(200);
    assert_eq!(cluster.copies(1), 1);
    // It lives, and hears of nothing.
    cluster.kill(0);
    close(&mut cluster, 1, connection);
    cluster.pass(7_000);
    assert_eq!((cluster.gateways[0].sessions(), cluster.gateways[1].sessions(), cluster.copies(1)), (1, 0, 0));
    cluster.members[0] = Standing { serving: false, linked: true, may_open: true };
    cluster.agree();
    assert_eq!(cluster.tell_all(0, 1), 0, "it had told whoever stands in for it");
    cluster.tell_all(1, 0);
    assert_eq!((cluster.gateways[0].sessions(), cluster.copies(0), cluster.copies(1)), (0, 0, 0));
    cluster.counts_vary();
}

#[test]
fn what_one_tells_late_undoes_nothing_that_another_one_has_told() {
    let mut cluster = three();
    cluster.members[0] = Standing { serving: false, linked: true, may_open: true };
    cluster.agree();
    let connection = connected(&mut cluster, 1);
    cluster.pass(200);
    assert_eq!((cluster.copies(0), cluster.copies(2)), (1, 1));
    // One of both doesn't hear that it closes, and tells later what it knows.
    cluster.members[2].linked = false;
    cluster.agree();
    cluster.pass(100);
    close(&mut cluster, 1, connection);
    cluster.pass(100);
    cluster.members.iter_mut().for_each(|it| (it.linked, it.serving) = (true, true));
    cluster.agree();
    assert_eq!((cluster.tell_all(1, 0), cluster.tell_all(2, 0)), (1, 1), "two had been told of it");
    only(cluster.arrives(0, INSIDE, &tcp(connection.1, at(FAR), "A", 1002, 5002)), 0, OUTSIDE, &cluster);
    assert_eq!(cluster.gateways[0].sessions(), 1);
    cluster.pass(5_000);
    assert_eq!(cluster.gateways[0].sessions(), 0, "closed: 4 s here, established would be 30 s");
    cluster.counts_vary();
}

/// What may happen to three gateways that live.
#[derive(Clone, Debug)]
enum Step {
    /// A pod opens a session, by way of some gateway.
    Opens {
        pod: usize,
        at: Number,
    },
    /// A pod goes on with one.
    GoesOn {
        which: prop::sample::Index,
        at: Number,
    },
    Time(u32),
    Stops(Number),
    /// It is told all by those who serve, and serves again.
    Serves(Number),
    /// Its links to all others break, or are made again.
    Links(Number),
    Tells(Number, Number),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2_usize, 0..3_usize).prop_map(|(pod, at)| Step::Opens { pod, at }),
        1 => (any::<prop::sample::Index>(), 0..3_usize).prop_map(|(which, at)| Step::GoesOn { which, at }),
        3 => (10..250_u32).prop_map(Step::Time),
        2 => (0..3_usize).prop_map(Step::Stops),
        2 => (0..3_usize).prop_map(Step::Serves),
        1 => (0..3_usize).prop_map(Step::Links),
        3 => (0..3_usize, 0..3_usize).prop_map(|(from, to)| Step::Tells(from, to)),
    ]
}

/// Whether whoever has a session's share knows the session.
fn is_known(cluster: &Cluster, question: &[u8]) -> bool {
    let (source, destination) = ends(question);
    let (IpAddr::V4(from), IpAddr::V4(to)) = (source.ip(), destination.ip()) else { panic!("IPv4") };
    let home = usize::from(from.octets()[3] != 5);
    let owner = (0..3).map(|step| (home + step) % 3).find(|number| cluster.members[*number].serving).unwrap();
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

fn tell(cluster: &mut Cluster, from: Number, to: Number) -> usize {
    let is_linked = from != to && cluster.members[from].linked && cluster.members[to].linked;
    if is_linked { cluster.tell_all(from, to) } else { 0 }
}

/// Whoever stops, returns or is cut off while all live, and whoever had told whom by then: when all have told all, every session goes on
/// with its port.
#[test]
fn no_session_is_lost_while_its_gateways_live() {
    let classes = ["opened", "went on", "stopped", "returned", "cut off", "told", "taken over"];
    let steps = prop::collection::vec(step(), 1..60);
    property(ProptestConfig::with_cases(256), &steps, &classes, |steps, tally| {
        let timeouts = Timeouts { udp: 60_000, ..Setup::default().timeouts };
        let mut cluster = Cluster::new(3, &Setup { timeouts, ..Setup::default() });
        cluster.counts_vary();
        let mut sessions: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Opens { pod, at: number } => {
                    // Each to its own far side: so no port is taken, whatever an owner doesn't know yet.
                    let n = sessions.len();
                    let pod = format!("10.244.1.{}:{}", 5 + pod, 4000 + n);
                    let question = packet(Protocol::Udp, at(&pod), at(&format!("198.51.100.10:{}", 1000 + n)));
                    let sent = cluster.arrives(number, INSIDE, &question);
                    prop_assert_eq!(sent.len(), 1);
                    sessions.extend(sent.into_iter().map(|(_, _, seen)| (question.clone(), seen)));
                    tally.count("opened");
                }
                Step::GoesOn { which, at: number } => {
                    // One that its owner doesn't know yet would begin anew there: in life, that may not open any until it does.
                    let known =
                        (!sessions.is_empty()).then(|| which.get(&sessions)).filter(|it| is_known(&cluster, &it.0));
                    let Some((question, seen)) = known else { continue };
                    let again = cluster.arrives(number, INSIDE, question);
                    prop_assert_eq!(again.len(), 1, "{:?}", cluster.drops());
                    prop_assert_eq!(ends(&again[0].2), ends(seen));
                    tally.count("went on");
                }
                Step::Time(ms) => cluster.pass(ms),
                Step::Stops(number) => {
                    let serving = cluster.members.iter().filter(|it| it.serving).count();
                    if cluster.members[number].serving && serving > 1 {
                        cluster.members[number].serving = false;
                        cluster.agree();
                        tally.count("stopped");
                    }
                }
                Step::Serves(number) => {
                    if cluster.members[number].serving || !cluster.members[number].linked {
                        continue;
                    }
                    let serving: Vec<_> = (0..3).filter(|other| cluster.members[*other].serving).collect();
                    for other in serving {
                        tell(&mut cluster, other, number);
                    }
                    cluster.members[number].serving = true;
                    cluster.agree();
                    tally.count("returned");
                }
                Step::Links(number) => {
                    cluster.members[number].linked = !cluster.members[number].linked;
                    cluster.agree();
                    // A link begins with everything.
                    for other in 0..3 {
                        tell(&mut cluster, number, other);
                        tell(&mut cluster, other, number);
                    }
                    tally.count("cut off");
                }
                Step::Tells(from, to) => tally.add("told", tell(&mut cluster, from, to) as u64),
            }
        }
        cluster.members.iter_mut().for_each(|it| it.linked = true);
        cluster.agree();
        for pair in (0..27).map(|n| n % 9) {
            tell(&mut cluster, pair / 3, pair % 3);
        }
        for (number, (question, seen)) in sessions.iter().enumerate() {
            let again = cluster.arrives(number % 3, INSIDE, question);
            prop_assert_eq!(again.len(), 1, "{:?}", cluster.drops());
            prop_assert_eq!(ends(&again[0].2), ends(seen), "session {}", number);
        }
        let taken =
            cluster.gateways.iter().flat_map(|it| &it.workers).map(|it| it.counters().sessions_taken_over.get());
        tally.add("taken over", taken.sum());
        Ok(())
    });
}
