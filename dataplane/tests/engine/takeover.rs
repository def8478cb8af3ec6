//! When a gateway dies or returns, another one goes on with its sessions, from copies of them.

mod moves;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::support::cluster::*;
use crate::support::*;
use vipgate_dataplane::counters::DropReason;

fn opened(cluster: &mut Cluster, home: Number, pod: &str, ports: std::ops::Range<u16>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let open = |port| {
        let question = packet(Protocol::Udp, at(&format!("{pod}:{port}")), at(FAR));
        let sent = cluster.arrives(home, INSIDE, &question);
        (question, only(sent, home, OUTSIDE, cluster))
    };
    ports.map(open).collect()
}

/// Sessions go on at their owner with their ports, by way of some gateway.
fn go_on(cluster: &mut Cluster, by: Number, owner: Number, sessions: &[(Vec<u8>, Vec<u8>)]) {
    for (question, seen) in sessions {
        let again = cluster.arrives(by, INSIDE, question);
        assert_eq!(ends(&only(again, owner, OUTSIDE, cluster)), ends(seen));
    }
}

#[test]
fn when_a_gateway_dies_its_sessions_go_on_elsewhere_with_their_ports() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        let sessions = opened(&mut cluster, 0, "10.244.1.5", 4000..4050);
        assert_eq!(cluster.copies(1), 0, "young ones are told nobody");
        cluster.pass(200);
        assert_eq!((cluster.copies(1), cluster.copies(2)), (50, 0));
        cluster.kill(0);
        for (question, seen) in &sessions {
            // The network picks any of those that are left.
            let home = cluster.arrives(2, OUTSIDE, &answer_to(seen, Protocol::Udp));
            let home = only(home, 1, INSIDE, &cluster);
            assert_eq!(ends(&home).1, ends(question).0);
            let again = cluster.arrives(2, INSIDE, question);
            assert_eq!(ends(&only(again, 1, OUTSIDE, &cluster)), ends(seen));
        }
        assert_eq!((cluster.gateways[1].sessions(), cluster.copies(1)), (50, 0), "all are live");
        // New ones get other ports of the dead one's blocks.
        let used: Vec<u16> = sessions.iter().map(|(_, seen)| ends(seen).0.port()).collect();
        for port in 5000..5100 {
            let sent = cluster.arrives(1, INSIDE, &packet(Protocol::Udp, at(&format!("10.244.1.5:{port}")), at(FAR)));
            let seen = ends(&only(sent, 1, OUTSIDE, &cluster)).0.port();
            assert!(!used.contains(&seen) && (seen / 64).is_multiple_of(3), "{seen}");
        }
        cluster.assert_delta(&[
            "egress 50, created 50",
            "egress 150, reply 50, peer_in 100, created 100, taken over 50",
            "peer_out 100",
        ]);
    }
}

#[test]
fn what_has_ended_elsewhere_rests_here_too() {
    let mut cluster = three();
    opened(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.pass(200);
    assert_eq!(cluster.copies(1), 10);
    cluster.pass(6_000);
    assert_eq!((cluster.gateways[0].sessions(), cluster.copies(1)), (0, 0), "UDP is silent for 5 s");
    cluster.pass(3_000);
    assert!(
        cluster
            .gateways
            .iter()
            .all(|it| it.workers[0].tables().ports.owned_blocks(vip_id(it)) == 0 || it.sessions() == 0)
    );
    cluster.assert_delta(&["egress 10, ended idle 10, created 10", "", ""]);
}

fn vip_id(gateway: &Gateway) -> vipgate_dataplane::snapshot::policy::VipId {
    gateway.builder.snapshot().policy.vip(0xc000_020a_u32).unwrap().id
}

#[test]
fn who_returns_has_its_sessions_back_and_those_of_the_meantime() {
    let mut cluster = three();
    let before = opened(&mut cluster, 0, "10.244.1.5", 4000..4020);
    cluster.pass(200);
    cluster.kill(0);
    let far_side = |cluster: &mut Cluster, seen: &[u8], owner| {
        let home = cluster.arrives(2, OUTSIDE, &answer_to(seen, Protocol::Udp));
        only(home, owner, INSIDE, cluster)
    };
    before.iter().take(10).for_each(|(_, seen)| drop(far_side(&mut cluster, seen, 1)));
    let between = opened(&mut cluster, 1, "10.244.1.5", 5000..5020);
    // It comes back empty-handed, but for what it had when it was cut off; it serves nobody yet.
    cluster.members[0] = Standing { serving: false, linked: true, may_open: true };
    cluster.agree();
    assert_eq!(cluster.tell_all(1, 0), 40, "whether packets came for them meanwhile or not");
    cluster.members[0] = Standing { serving: true, linked: true, may_open: false };
    cluster.agree();
    for (question, seen) in before.iter().take(10).chain(&between) {
        far_side(&mut cluster, seen, 0);
        let again = cluster.arrives(1, INSIDE, question);
        assert_eq!(ends(&only(again, 0, OUTSIDE, &cluster)), ends(seen));
    }
    let early = packet(Protocol::Udp, at("10.244.1.5:6000"), at(FAR));
    assert_eq!(cluster.arrives(0, INSIDE, &early), vec![], "not before it may");
    cluster.members[0].may_open = true;
    cluster.agree();
    assert_eq!(cluster.gateways[0].run().len(), 1, "but then at once");
    opened(&mut cluster, 0, "10.244.1.5", 6000..6001);
    cluster.assert_delta(&[
        "egress 52, reply 30, peer_in 60, created 21, taken over 30",
        "egress 20, reply 10, peer_out 30, peer_in 10, created 20, taken over 10",
        "peer_out 40",
    ]);
}

#[test]
fn a_share_takes_along_what_nobody_was_told_of_it() {
    let mut cluster = three();
    let known = opened(&mut cluster, 0, "10.244.1.5", 4000..4005);
    cluster.pass(200);
    let young = opened(&mut cluster, 0, "10.244.1.5", 5000..5010);
    cluster.members[0] = Standing { serving: false, linked: true, may_open: false };
    cluster.agree();
    // Whoever has it now doesn't know these yet, and opens none in their place; one becomes a copy where it was.
    assert_eq!(cluster.arrives(1, INSIDE, &young[0].0), vec![]);
    assert_eq!(cluster.arrives(0, INSIDE, &young[1].0), vec![]);
    // That it names none of them doesn't end them.
    cluster.tell_all(1, 0);
    assert_eq!((cluster.tell_all(0, 1), cluster.tell_all(0, 1)), (10, 0), "what isn't known there, and that once");
    for (question, seen) in known.iter().chain(&young) {
        let again = cluster.arrives(2, INSIDE, question);
        assert_eq!(ends(&only(again, 1, OUTSIDE, &cluster)), ends(seen));
    }
    cluster.pass(200);
    cluster.tell_all(1, 0);
    assert_eq!((cluster.gateways[0].sessions(), cluster.copies(0)), (0, 15));
    cluster.assert_delta(&["egress 15, peer_out 1, created 15", "egress 15, peer_in 16, taken over 15", "peer_out 15"]);
}

/// The first share has moved to the second gateway, which may not open sessions in it yet.
fn moving(cluster: &mut Cluster) {
    cluster.members[0] = Standing { serving: false, linked: true, may_open: false };
    cluster.agree();
}

#[test]
fn what_begins_while_a_share_changes_hands_waits_until_the_former_owner_has_let_go() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        moving(&mut cluster);
        for number in 0..100 {
            let begin = tcp(at(&format!("10.244.1.5:{}", 4000 + number)), at(FAR), "S", number, 0);
            // Also by way of the former owner, and of one that has neither.
            assert_eq!(cluster.arrives(number as usize % 3, INSIDE, &begin), vec![]);
        }
        cluster.pass(500);
        assert_eq!(cluster.drops(), [].into());
        cluster.members[0].may_open = true;
        cluster.agree();
        let sent = cluster.gateways[1].run();
        let mut left: Vec<u32> = sent.iter().map(|(_, bytes)| sequence(bytes)).collect();
        if workers > 1 {
            left.sort_unstable();
        }
        assert_eq!(left, (0..100).collect::<Vec<_>>());
        cluster.counts_vary();
        assert_eq!((cluster.gateways[1].sessions(), cluster.drops()), (100, [].into()));
    }
}

#[test]
fn packets_of_a_young_connection_wait_for_it_where_its_share_has_gone() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        let (pod, far) = (at("10.244.1.5:4000"), at(FAR));
        let seen = only(cluster.arrives(0, INSIDE, &tcp(pod, far, "S", 1000, 0)), 0, OUTSIDE, &cluster);
        moving(&mut cluster);
        let answer = tcp(far, ends(&seen).0, "SA", 5000, 1001);
        assert_eq!(cluster.arrives(1, OUTSIDE, &answer), vec![]);
        assert_eq!(cluster.arrives(1, INSIDE, &tcp(pod, far, "A", 1001, 5001)), vec![]);
        assert_eq!(cluster.tell_all(0, 1), 1);
        cluster.members[0].may_open = true;
        cluster.agree();
        let mut sent: Vec<_> = cluster.gateways[1].run().iter().map(|(_, bytes)| ends(bytes)).collect();
        sent.sort_unstable();
        assert_eq!(sent, [(ends(&seen).0, far), (far, pod)]);
        assert_eq!((cluster.drops(), cluster.gateways[1].sessions()), ([].into(), 1));
        cluster.counts_vary();
    }
}

#[test]
fn nobody_waits_for_a_share_for_longer_than_a_client_does() {
    let mut cluster = Cluster::new(3, &Setup { frames: 1024, ..Setup::default() });
    moving(&mut cluster);
    for port in 4000..4600 {
        let begin = tcp(at(&format!("10.244.1.5:{port}")), at(FAR), "S", 1, 0);
        assert_eq!(cluster.arrives(1, INSIDE, &begin), vec![]);
    }
    assert_eq!(cluster.drops(), [(DropReason::NoLease, 88)].into(), "512 are kept");
    cluster.pass(950);
    assert_eq!(cluster.drops(), [(DropReason::NoLease, 88)].into());
    cluster.pass(100);
    assert_eq!(cluster.drops(), [(DropReason::NoLease, 600)].into());
    cluster.gateways[1].check_frames();
    cluster.assert_delta(&["", "drop no_lease 600", ""]);
}

#[test]
fn whoever_hears_late_who_has_a_share_sends_to_the_former_owner_which_sends_on() {
    let mut cluster = three();
    cluster.members[0].serving = false;
    cluster.since += 1;
    cluster.hear(0);
    cluster.hear(1);
    let begin = |port: u16| packet(Protocol::Udp, at(&format!("10.244.1.5:{port}")), at(FAR));
    let sent = cluster.arrives(2, INSIDE, &begin(4000));
    let seen = only(sent, 1, OUTSIDE, &cluster);
    let back = cluster.arrives(2, OUTSIDE, &answer_to(&seen, Protocol::Udp));
    assert_eq!(ends(&only(back, 1, INSIDE, &cluster)).1, at("10.244.1.5:4000"));
    assert_eq!(cluster.tunnelled, 4);
    // Where two believe so of each other, a packet ends when it has come back.
    cluster.members[0].serving = true;
    cluster.members[1].serving = false;
    cluster.since += 1;
    cluster.hear(1);
    for port in [4001, 4002] {
        assert_eq!(cluster.arrives(2, INSIDE, &begin(port)), vec![]);
        assert_eq!(cluster.tunnelled, 3 * u64::from(port - 4001) + 7);
        if port == 4001 {
            cluster.pass(1_050);
        }
    }
    assert_eq!(cluster.drops(), [(DropReason::NoOwner, 1)].into());
    // Unless that is who hears last.
    cluster.hear(0);
    assert_eq!(cluster.gateways[0].run().len(), 1);
    cluster.assert_delta(&[
        "egress 1, peer_out 4, peer_in 6, drop no_owner 1, created 1",
        "egress 1, reply 1, peer_out 2, peer_in 4, created 1",
        "peer_out 4",
    ]);
}

/// Opens a pod's connection by way of the first gateway, and lets others be told of it; where the remote sees it.
fn connect(cluster: &mut Cluster, pod: SocketAddr, far: SocketAddr) -> SocketAddr {
    let seen = only(cluster.arrives(0, INSIDE, &tcp(pod, far, "S", 1000, 0)), 0, OUTSIDE, cluster);
    let vip = ends(&seen).0;
    only(cluster.arrives(0, OUTSIDE, &tcp(far, vip, "SA", 5000, 1001)), 0, INSIDE, cluster);
    only(cluster.arrives(0, INSIDE, &tcp(pod, far, "A", 1001, 5001)), 0, OUTSIDE, cluster);
    cluster.pass(200);
    vip
}

#[test]
fn a_share_takes_along_that_a_connection_was_closed_while_nobody_was_told() {
    let mut cluster = three();
    let (pod, far) = (at("10.244.1.5:4000"), at(FAR));
    let vip = connect(&mut cluster, pod, far);
    let answer = |flags, sequence, ack| tcp(far, vip, flags, sequence, ack);
    assert_eq!(cluster.copies(1), 1);
    let all_linked = |cluster: &mut Cluster, linked| {
        cluster.members.iter_mut().for_each(|it| it.linked = linked);
        cluster.agree();
    };
    all_linked(&mut cluster, false);
    only(cluster.arrives(0, INSIDE, &tcp(pod, far, "FA", 1001, 5001)), 0, OUTSIDE, &cluster);
    only(cluster.arrives(0, OUTSIDE, &answer("FA", 5001, 1002)), 0, INSIDE, &cluster);
    // The share moves before the link is back; then the former owner names what has changed.
    cluster.members[0] = Standing { serving: false, linked: false, may_open: false };
    cluster.agree();
    all_linked(&mut cluster, true);
    assert_eq!(cluster.tell_all(0, 1), 1);
    only(cluster.arrives(1, INSIDE, &tcp(pod, far, "A", 1002, 5002)), 1, OUTSIDE, &cluster);
    assert_eq!(cluster.gateways[1].sessions(), 1);
    cluster.pass(5_000);
    assert_eq!(cluster.gateways[1].sessions(), 0, "closed: 4 s here, established would be 30 s");
    cluster.assert_delta(&["egress 3, reply 2, created 1", "egress 1, ended closed 1, taken over 1", ""]);
}

#[test]
fn a_connection_that_went_on_since_it_was_told_is_known_again_by_what_both_sides_say() {
    let mut cluster = three();
    let (pod, far) = (at("10.244.1.5:4000"), at(FAR));
    let vip = connect(&mut cluster, pod, far);
    let answer = |flags, sequence, ack| tcp(far, vip, flags, sequence, ack);
    cluster.kill(0);
    // Each has sent gigabytes by now. Somebody else forges the remote's segments, and a reset behind them.
    let (own, other) = (3_000_000_000, 2_000_000_000);
    let forge = |cluster: &mut Cluster| {
        only(cluster.arrives(1, OUTSIDE, &answer("PA", 700_000, 9)), 1, INSIDE, cluster);
        only(cluster.arrives(1, OUTSIDE, &answer("R", 700_000, 0)), 1, INSIDE, cluster);
    };
    forge(&mut cluster);
    only(cluster.arrives(1, INSIDE, &tcp(pod, far, "PA", own, other)), 1, OUTSIDE, &cluster);
    forge(&mut cluster);
    only(cluster.arrives(1, OUTSIDE, &answer("A", other, own)), 1, INSIDE, &cluster);
    only(cluster.arrives(1, INSIDE, &tcp(pod, far, "A", own, other)), 1, OUTSIDE, &cluster);
    forge(&mut cluster);
    cluster.pass(5_000);
    assert_eq!(cluster.gateways[1].sessions(), 1, "open: 30 s here");
    only(cluster.arrives(1, OUTSIDE, &answer("R", other, 0)), 1, INSIDE, &cluster);
    cluster.pass(5_000);
    assert_eq!(cluster.gateways[1].sessions(), 0, "reset: 4 s here");
    cluster.counts_vary();
}

#[test]
fn whoever_could_have_a_share_next_is_told() {
    let mut cluster = three();
    // One comes, and doesn't serve yet: it may be the next, or not.
    cluster.members[1].serving = false;
    cluster.agree();
    opened(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.pass(200);
    assert_eq!((cluster.copies(1), cluster.copies(2)), (10, 10));
    cluster.members[1].linked = false;
    cluster.agree();
    opened(&mut cluster, 0, "10.244.1.5", 5000..5005);
    cluster.pass(200);
    assert_eq!((cluster.copies(1), cluster.copies(2)), (10, 15));
    // Its link is there before workers have heard of it.
    assert_eq!((cluster.tell_all(0, 1), cluster.tell_all(0, 2)), (15, 15));
    assert_eq!(cluster.copies(1), 15);
    cluster.members[1] = Standing { serving: true, linked: true, may_open: true };
    cluster.agree();
    assert_eq!((cluster.tell_all(0, 1), cluster.tell_all(0, 2)), (15, 0), "only the next");
    assert_eq!((cluster.copies(1), cluster.copies(2)), (15, 0));
    cluster.assert_delta(&["egress 15, created 15", "", ""]);
}

#[test]
fn without_a_lease_only_what_others_know_goes_on() {
    let mut cluster = three();
    let known = opened(&mut cluster, 0, "10.244.1.5", 4000..4005);
    cluster.pass(200);
    let young = opened(&mut cluster, 0, "10.244.1.5", 5000..5005);
    let now = cluster.gateways[0].now;
    cluster.gateways[0].lease.extend(now.plus(10));
    cluster.pass(50);
    for (question, _) in &known {
        only(cluster.arrives(0, INSIDE, question), 0, OUTSIDE, &cluster);
    }
    for (question, _) in &young {
        assert_eq!(cluster.arrives(0, INSIDE, question), vec![]);
    }
    assert_eq!(cluster.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:6000"), at(FAR))), vec![]);
    assert_eq!(cluster.gateways[0].drops(), [(DropReason::NoLease, 6)].into());
    // It stands still for a while: whatever was true before may not be any more.
    cluster.gateways[0].now = cluster.gateways[0].now.plus(1_000);
    assert_eq!(cluster.arrives(0, INSIDE, &known[0].0), vec![]);
    let now = cluster.gateways[0].now;
    cluster.gateways[0].lease.extend(now.plus(1_000));
    only(cluster.arrives(0, INSIDE, &known[0].0), 0, OUTSIDE, &cluster);
    cluster.assert_delta(&["egress 16, drop no_lease 7, created 10", "", ""]);
}

/// The ports that these were seen with.
fn seen_ports(sessions: &[(Vec<u8>, Vec<u8>)]) -> BTreeSet<u16> {
    sessions.iter().map(|(_, seen)| ends(seen).0.port()).collect()
}

#[test]
fn ports_of_sessions_that_nobody_was_told_of_are_not_given_out_again() {
    let mut cluster = Cluster::new(3, &Setup { reserve: Some(0), ..Setup::default() });
    // As if each of these died before it has told anybody of its sessions, and came back knowing nothing of them.
    cluster.deaf = true;
    let mut lost = BTreeSet::new();
    for (round, home) in [0, 1, 0, 1, 0].into_iter().enumerate() {
        cluster.members[0].serving = home == 0;
        cluster.agree();
        let first = 4_000 + 1_000 * round as u16;
        let ports = seen_ports(&opened(&mut cluster, home, "10.244.1.5", first..first + 400));
        assert_eq!(ports.len(), 400, "each to the same far side");
        assert!(ports.is_disjoint(&lost), "in round {round}");
        lost.extend(ports);
        cluster.pass(9_000);
    }
    // Where a stripe is full there are still all others: an eighth of this share are 2688 ports.
    let many = opened(&mut cluster, 0, "10.244.1.5", 20_000..24_000);
    assert_eq!(seen_ports(&many).len(), 4_000);
    cluster.assert_delta(&[
        "egress 5200, ended idle 1200, created 5200",
        "egress 800, ended idle 800, created 800",
        "",
    ]);
}

#[test]
fn also_where_many_talk_to_one_far_side_ports_are_not_given_out_again() {
    let mut cluster = three();
    cluster.deaf = true;
    let mut lost: Vec<BTreeSet<u16>> = Vec::new();
    for (round, home) in [0, 1, 0, 1].into_iter().enumerate() {
        cluster.members[0].serving = home == 0;
        cluster.agree();
        let first = 10_000 + 10_000 * round as u16;
        // Two in three of a stripe: of the last ones every eleventh finds all that it tries in use.
        let ports = seen_ports(&opened(&mut cluster, home, "10.244.1.5", first..first + 1_800));
        assert_eq!(ports.len(), 1_800, "each to the same far side");
        for (before, lost) in lost.iter().enumerate() {
            assert!(ports.is_disjoint(lost), "rounds {before} and {round}");
        }
        lost.push(ports);
        cluster.pass(9_000);
    }
    cluster.assert_delta(&[
        "egress 3600, ended idle 3600, created 3600",
        "egress 3600, ended idle 3600, created 3600",
        "",
    ]);
}

#[test]
fn what_a_former_process_left_gives_way_to_what_the_owner_tells() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        let lost = opened(&mut cluster, 0, "10.244.1.5", 4000..4050);
        // It died before it told anybody; it comes back with the tables that it left.
        cluster.kill(0);
        let anew = opened(&mut cluster, 1, "10.244.1.5", 4000..4050);
        assert!(seen_ports(&lost).is_disjoint(&seen_ports(&anew)));
        cluster.members[0] = Standing { serving: false, linked: true, may_open: true };
        cluster.agree();
        cluster.tell_all(0, 1);
        assert_eq!(cluster.gateways[1].sessions(), 50, "what it told of its own changes nothing");
        assert_eq!(cluster.tell_all(1, 0), 50);
        assert_eq!((cluster.gateways[0].sessions(), cluster.copies(0)), (0, 50));
        cluster.members[0].serving = true;
        cluster.agree();
        go_on(&mut cluster, 2, 0, &anew);
        cluster.assert_delta(&[
            "egress 100, peer_in 50, created 50, taken over 50",
            "egress 50, created 50",
            "peer_out 50",
        ]);
    }
}

#[test]
fn a_round_that_began_before_a_share_moved_ends_nothing_in_it() {
    let mut cluster = three();
    cluster.kill(0);
    let sessions = opened(&mut cluster, 1, "10.244.1.5", 4000..4010);
    cluster.members[0] = Standing { serving: false, linked: true, may_open: true };
    cluster.agree();
    let began_by = cluster.since;
    // It has all, and serves; what it said of its own before that reaches the other one only now.
    cluster.tell_all(1, 0);
    cluster.members[0].serving = true;
    cluster.agree();
    assert!(!cluster.forget_unnamed(0, 1, began_by), "all must be told again");
    cluster.kill(0);
    go_on(&mut cluster, 2, 1, &sessions);
    cluster.assert_delta(&["", "egress 20, peer_in 10, created 10", "peer_out 10"]);
}
