//! Failover: when a gateway fails or returns, another one continues its sessions from replicated standby sessions.

mod first_reply;
mod policy_moves;
mod shard_moves;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

fn open_sessions(
    cluster: &mut Cluster,
    gateway: GatewayIndex,
    pod: &str,
    ports: std::ops::Range<u16>,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    let open = |port| {
        let request = packet(Protocol::Udp, at(&format!("{pod}:{port}")), at(REMOTE));
        let seen = cluster.pod_sends(gateway, gateway, &request);
        (request, seen)
    };
    ports.map(open).collect()
}

/// Asserts that sessions continue at their owner with their ports, received by some gateway.
fn assert_continue(
    cluster: &mut Cluster,
    receiver: GatewayIndex,
    owner: GatewayIndex,
    sessions: &[(Vec<u8>, Vec<u8>)],
) {
    for (request, seen) in sessions {
        assert_eq!(ends(&cluster.pod_sends(receiver, owner, request)), ends(seen));
    }
}

#[test]
fn sessions_of_a_failed_gateway_continue_with_their_ports() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        let sessions = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4050);
        assert_eq!(cluster.standby_sessions(1), 0, "new sessions are not replicated yet");
        cluster.advance(200);
        assert_eq!((cluster.standby_sessions(1), cluster.standby_sessions(2)), (50, 0));
        cluster.kill(0);
        for (request, seen) in &sessions {
            // The network picks any of the remaining gateways.
            let received = cluster.remote_sends(2, 1, &reply_to(seen, Protocol::Udp));
            assert_eq!(ends(&received).1, ends(request).0);
            assert_eq!(ends(&cluster.pod_sends(2, 1, request)), ends(seen));
        }
        assert_eq!((cluster.gateways[1].sessions(), cluster.standby_sessions(1)), (50, 0), "all are active");
        // New sessions get other ports of the failed gateway's blocks.
        let used: Vec<u16> = sessions.iter().map(|(_, seen)| ends(seen).0.port()).collect();
        for port in 5000..5100 {
            let seen =
                ends(&cluster.pod_sends(1, 1, &packet(Protocol::Udp, at(&format!("10.244.1.5:{port}")), at(REMOTE))))
                    .0
                    .port();
            assert!(!used.contains(&seen) && (seen / 64).is_multiple_of(3), "{seen}");
        }
        cluster.assert_delta(&[
            "egress 50, created 50",
            "egress 150, reply 50, peer_in 100, created 100, failed over 50",
            "peer_out 100",
        ]);
    }
}

#[test]
fn ended_sessions_are_removed_from_the_standby_gateway() {
    let mut cluster = three_gateways();
    open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.advance(200);
    assert_eq!(cluster.standby_sessions(1), 10);
    cluster.advance(6_000);
    assert_eq!((cluster.gateways[0].sessions(), cluster.standby_sessions(1)), (0, 0), "UDP timeout: 5 s here");
    cluster.advance(3_000);
    assert!(
        cluster
            .gateways
            .iter()
            .all(|it| it.workers[0].tables().ports.owned_blocks(vip_id(it)) == 0 || it.sessions() == 0)
    );
    cluster.assert_delta(&["egress 10, ended idle 10, created 10", "", ""]);
}

fn vip_id(gateway: &Gateway) -> vipgate_dataplane::flow::ids::VipId {
    gateway.builder.snapshot().policy.vip(0xc000_020a_u32).unwrap().ports.id
}

#[test]
fn a_returning_gateway_takes_back_its_sessions_and_those_opened_meanwhile() {
    let mut cluster = three_gateways();
    let before = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4020);
    cluster.advance(200);
    cluster.kill(0);
    let deliver_reply =
        |cluster: &mut Cluster, seen: &[u8], owner| cluster.remote_sends(2, owner, &reply_to(seen, Protocol::Udp));
    before.iter().take(10).for_each(|(_, seen)| drop(deliver_reply(&mut cluster, seen, 1)));
    let meanwhile = open_sessions(&mut cluster, 1, "10.244.1.5", 5000..5020);
    // It returns with only the sessions from before the failure, and isn't active yet.
    cluster.members[0] = MemberState { active: false, connected: true, may_open: true };
    cluster.publish_views();
    assert_eq!(cluster.full_sync(1, 0), 40, "with or without packets meanwhile");
    cluster.members[0] = MemberState { active: true, connected: true, may_open: false };
    cluster.publish_views();
    for (request, seen) in before.iter().take(10).chain(&meanwhile) {
        deliver_reply(&mut cluster, seen, 0);
        assert_eq!(ends(&cluster.pod_sends(1, 0, request)), ends(seen));
    }
    let first_packet = packet(Protocol::Udp, at("10.244.1.5:6000"), at(REMOTE));
    assert_eq!(cluster.receive(0, INSIDE, &first_packet), vec![], "not before it may open sessions");
    cluster.members[0].may_open = true;
    cluster.publish_views();
    assert_eq!(cluster.gateways[0].run().len(), 1, "then at once");
    open_sessions(&mut cluster, 0, "10.244.1.5", 6000..6001);
    cluster.assert_delta(&[
        "egress 52, reply 30, peer_in 60, created 21, failed over 30",
        "egress 20, reply 10, peer_out 30, peer_in 10, created 20, failed over 10",
        "peer_out 40",
    ]);
}

#[test]
fn a_moved_shard_includes_sessions_that_were_not_replicated_yet() {
    let mut cluster = three_gateways();
    let replicated = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4005);
    cluster.advance(200);
    let new = open_sessions(&mut cluster, 0, "10.244.1.5", 5000..5010);
    cluster.members[0] = MemberState { active: false, connected: true, may_open: false };
    cluster.publish_views();
    // The new owner doesn't have these yet, and opens none in their place; at the former owner, a packet demotes one to
    // standby.
    assert_eq!(cluster.receive(1, INSIDE, &new[0].0), vec![]);
    assert_eq!(cluster.receive(0, INSIDE, &new[1].0), vec![]);
    // The new owner's sync doesn't include them, but doesn't end them.
    cluster.full_sync(1, 0);
    assert_eq!(
        (cluster.full_sync(0, 1), cluster.full_sync(0, 1)),
        (10, 0),
        "sessions that the receiver lacks, and only once"
    );
    for (request, seen) in replicated.iter().chain(&new) {
        assert_eq!(ends(&cluster.pod_sends(2, 1, request)), ends(seen));
    }
    cluster.advance(200);
    cluster.full_sync(1, 0);
    assert_eq!((cluster.gateways[0].sessions(), cluster.standby_sessions(0)), (0, 15));
    cluster.assert_delta(&[
        "egress 15, peer_out 1, created 15",
        "egress 15, peer_in 16, failed over 15",
        "peer_out 15",
    ]);
}

/// The first shard has moved to the second gateway, which may not open sessions in it yet.
fn begin_shard_move(cluster: &mut Cluster) {
    cluster.members[0] = MemberState { active: false, connected: true, may_open: false };
    cluster.publish_views();
}

#[test]
fn new_sessions_of_a_moving_shard_wait_until_the_former_owner_has_released_it() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        begin_shard_move(&mut cluster);
        for number in 0..100 {
            let syn = tcp(at(&format!("10.244.1.5:{}", 4000 + number)), at(REMOTE), "S", number, 0);
            // Also received by the former owner, and by a third gateway.
            assert_eq!(cluster.receive(number as usize % 3, INSIDE, &syn), vec![]);
        }
        cluster.advance(500);
        assert_eq!(cluster.drops(), [].into());
        cluster.members[0].may_open = true;
        cluster.publish_views();
        let sent = cluster.gateways[1].run();
        let mut left: Vec<u32> = sent.iter().map(|(_, bytes)| sequence(bytes)).collect();
        if workers > 1 {
            left.sort_unstable();
        }
        assert_eq!(left, (0..100).collect::<Vec<_>>());
        cluster.skip_counter_check();
        assert_eq!((cluster.gateways[1].sessions(), cluster.drops()), (100, [].into()));
    }
}

#[test]
fn packets_of_an_unreplicated_session_wait_at_the_new_owner() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        let (pod, remote) = (at("10.244.1.5:4000"), at(REMOTE));
        let seen = cluster.pod_sends(0, 0, &tcp(pod, remote, "S", 1000, 0));
        begin_shard_move(&mut cluster);
        let reply = tcp(remote, ends(&seen).0, "SA", 5000, 1001);
        assert_eq!(cluster.receive(1, OUTSIDE, &reply), vec![]);
        assert_eq!(cluster.receive(1, INSIDE, &tcp(pod, remote, "A", 1001, 5001)), vec![]);
        assert_eq!(cluster.full_sync(0, 1), 1);
        cluster.members[0].may_open = true;
        cluster.publish_views();
        let mut sent: Vec<_> = cluster.gateways[1].run().iter().map(|(_, bytes)| ends(bytes)).collect();
        sent.sort_unstable();
        assert_eq!(sent, [(ends(&seen).0, remote), (remote, pod)]);
        assert_eq!((cluster.drops(), cluster.gateways[1].sessions()), ([].into(), 1));
        cluster.skip_counter_check();
    }
}

#[test]
fn packets_wait_for_a_moving_shard_for_at_most_a_second() {
    let mut cluster = Cluster::new(3, &Setup { frames: 1024, ..Setup::default() });
    begin_shard_move(&mut cluster);
    for port in 4000..4600 {
        let syn = tcp(at(&format!("10.244.1.5:{port}")), at(REMOTE), "S", 1, 0);
        assert_eq!(cluster.receive(1, INSIDE, &syn), vec![]);
    }
    assert_eq!(cluster.drops(), [(DropReason::NoLease, 88)].into(), "512 are queued");
    cluster.advance(950);
    assert_eq!(cluster.drops(), [(DropReason::NoLease, 88)].into());
    cluster.advance(100);
    assert_eq!(cluster.drops(), [(DropReason::NoLease, 600)].into());
    cluster.gateways[1].check_frames();
    cluster.assert_delta(&["", "drop no_lease 600", ""]);
}

#[test]
fn a_gateway_with_an_old_view_reaches_the_owner_via_the_former_one() {
    let mut cluster = three_gateways();
    cluster.members[0].active = false;
    cluster.active_since += 1;
    cluster.publish_view(0);
    cluster.publish_view(1);
    let first_packet = |port: u16| packet(Protocol::Udp, at(&format!("10.244.1.5:{port}")), at(REMOTE));
    let seen = cluster.pod_sends(2, 1, &first_packet(4000));
    assert_eq!(ends(&cluster.remote_sends(2, 1, &reply_to(&seen, Protocol::Udp))).1, at("10.244.1.5:4000"));
    assert_eq!(cluster.tunneled, 4);
    // If two gateways take each other for the owner, a packet is not forwarded again once it has come back.
    cluster.members[0].active = true;
    cluster.members[1].active = false;
    cluster.active_since += 1;
    cluster.publish_view(1);
    for port in [4001, 4002] {
        assert_eq!(cluster.receive(2, INSIDE, &first_packet(port)), vec![]);
        assert_eq!(cluster.tunneled, 3 * u64::from(port - 4001) + 7);
        if port == 4001 {
            cluster.advance(1_050);
        }
    }
    assert_eq!(cluster.drops(), [(DropReason::NoOwner, 1)].into());
    // Unless the gateway that it came back to has the last view by then.
    cluster.publish_view(0);
    assert_eq!(cluster.gateways[0].run().len(), 1);
    cluster.assert_delta(&[
        "egress 1, peer_out 4, peer_in 6, drop no_owner 1, created 1",
        "egress 1, reply 1, peer_out 2, peer_in 4, created 1",
        "peer_out 4",
    ]);
}

/// Opens a pod's connection via the first gateway, and replicates it; returns the pod's external address and port.
fn connect(cluster: &mut Cluster, pod: SocketAddr, remote: SocketAddr) -> SocketAddr {
    let vip = cluster.connect(0, pod, remote);
    cluster.advance(200);
    vip
}

#[test]
fn a_moved_shard_includes_changes_that_were_not_replicated_yet() {
    let mut cluster = three_gateways();
    let (pod, remote) = (at("10.244.1.5:4000"), at(REMOTE));
    let vip = connect(&mut cluster, pod, remote);
    let reply = |flags, sequence, ack| tcp(remote, vip, flags, sequence, ack);
    assert_eq!(cluster.standby_sessions(1), 1);
    let all_linked = |cluster: &mut Cluster, linked| {
        cluster.members.iter_mut().for_each(|it| it.connected = linked);
        cluster.publish_views();
    };
    all_linked(&mut cluster, false);
    cluster.pod_sends(0, 0, &tcp(pod, remote, "FA", 1001, 5001));
    cluster.remote_sends(0, 0, &reply("FA", 5001, 1002));
    // The shard moves before the gateways reconnect; then the former owner sends what has changed.
    cluster.members[0] = MemberState { active: false, connected: false, may_open: false };
    cluster.publish_views();
    all_linked(&mut cluster, true);
    assert_eq!(cluster.full_sync(0, 1), 1);
    cluster.pod_sends(1, 1, &tcp(pod, remote, "A", 1002, 5002));
    assert_eq!(cluster.gateways[1].sessions(), 1);
    cluster.advance(5_000);
    assert_eq!(cluster.gateways[1].sessions(), 0, "closed: 4 s here, established would be 30 s");
    cluster.assert_delta(&["egress 3, reply 2, created 1", "egress 1, ended closed 1, failed over 1", ""]);
}

#[test]
fn a_failed_over_connection_is_resynchronized_by_both_directions() {
    let mut cluster = three_gateways();
    let (pod, remote) = (at("10.244.1.5:4000"), at(REMOTE));
    let vip = connect(&mut cluster, pod, remote);
    let reply = |flags, sequence, ack| tcp(remote, vip, flags, sequence, ack);
    cluster.kill(0);
    // Each side has sent gigabytes by now. An off-path sender forges the remote's segments, and a reset after them.
    let (own, other) = (3_000_000_000, 2_000_000_000);
    let forge = |cluster: &mut Cluster| {
        cluster.remote_sends(1, 1, &reply("PA", 700_000, 9));
        cluster.remote_sends(1, 1, &reply("R", 700_000, 0));
    };
    forge(&mut cluster);
    cluster.pod_sends(1, 1, &tcp(pod, remote, "PA", own, other));
    forge(&mut cluster);
    cluster.remote_sends(1, 1, &reply("A", other, own));
    cluster.pod_sends(1, 1, &tcp(pod, remote, "A", own, other));
    forge(&mut cluster);
    cluster.advance(5_000);
    assert_eq!(cluster.gateways[1].sessions(), 1, "open: 30 s here");
    cluster.remote_sends(1, 1, &reply("R", other, 0));
    cluster.advance(5_000);
    assert_eq!(cluster.gateways[1].sessions(), 0, "reset: 4 s here");
    cluster.skip_counter_check();
}

#[test]
fn sessions_are_replicated_to_every_possible_next_owner() {
    let mut cluster = three_gateways();
    // A gateway joins, and isn't active yet: it may become the next owner, or not.
    cluster.members[1].active = false;
    cluster.publish_views();
    open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4010);
    cluster.advance(200);
    assert_eq!((cluster.standby_sessions(1), cluster.standby_sessions(2)), (10, 10));
    cluster.members[1].connected = false;
    cluster.publish_views();
    open_sessions(&mut cluster, 0, "10.244.1.5", 5000..5005);
    cluster.advance(200);
    assert_eq!((cluster.standby_sessions(1), cluster.standby_sessions(2)), (10, 15));
    // It reconnects before its workers have the new view.
    assert_eq!((cluster.full_sync(0, 1), cluster.full_sync(0, 2)), (15, 15));
    assert_eq!(cluster.standby_sessions(1), 15);
    cluster.members[1] = MemberState { active: true, connected: true, may_open: true };
    cluster.publish_views();
    assert_eq!((cluster.full_sync(0, 1), cluster.full_sync(0, 2)), (15, 0), "only the next owner");
    assert_eq!((cluster.standby_sessions(1), cluster.standby_sessions(2)), (15, 0));
    cluster.assert_delta(&["egress 15, created 15", "", ""]);
}

#[test]
fn without_a_lease_only_replicated_sessions_continue() {
    let mut cluster = three_gateways();
    let replicated = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4005);
    cluster.advance(200);
    let new = open_sessions(&mut cluster, 0, "10.244.1.5", 5000..5005);
    let now = cluster.gateways[0].now;
    cluster.gateways[0].lease.renew(now.plus(10));
    cluster.advance(50);
    for (request, _) in &replicated {
        cluster.pod_sends(0, 0, request);
    }
    for (request, _) in &new {
        assert_eq!(cluster.receive(0, INSIDE, request), vec![]);
    }
    assert_eq!(cluster.receive(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:6000"), at(REMOTE))), vec![]);
    assert_eq!(cluster.gateways[0].drops(), [(DropReason::NoLease, 6)].into());
    // The gateway is suspended for a while: its state may be outdated.
    cluster.gateways[0].now = cluster.gateways[0].now.plus(1_000);
    assert_eq!(cluster.receive(0, INSIDE, &replicated[0].0), vec![]);
    let now = cluster.gateways[0].now;
    cluster.gateways[0].lease.renew(now.plus(1_000));
    cluster.pod_sends(0, 0, &replicated[0].0);
    cluster.assert_delta(&["egress 16, drop no_lease 7, created 10", "", ""]);
}

#[test]
fn packets_that_arrive_while_a_worker_is_stopped_find_the_lease_expired() {
    let mut cluster = three_gateways();
    let sessions = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4001);
    cluster.advance(200);
    let gateway = &mut cluster.gateways[0];
    let before = gateway.now;
    gateway.lease.renew(before.plus(10));
    let counters = gateway.workers[0].counters().clone();
    let received = counters.received.get();
    assert!(gateway.workers[0].io().inject(INSIDE, &sessions[0].0));
    // The turn has begun while the lease was valid; the machine is suspended before its packets are received.
    let clock = || if counters.received.get() == received { before } else { before.plus(1_000) };
    assert_eq!(gateway.workers[0].turn(clock), 1);
    gateway.now = before.plus(1_000);
    assert_eq!(gateway.run(), vec![]);
    cluster.assert_delta(&["egress 1, drop no_lease 1, created 1", "", ""]);
}

/// External ports of these sessions.
fn external_ports(sessions: &[(Vec<u8>, Vec<u8>)]) -> BTreeSet<u16> {
    sessions.iter().map(|(_, seen)| ends(seen).0.port()).collect()
}

#[test]
fn ports_of_unreplicated_sessions_are_not_reused_after_failover() {
    let mut cluster = Cluster::new(3, &Setup { reserve: Some(0), ..Setup::default() });
    // As if each gateway failed before it replicated its sessions, and returned without them.
    cluster.drops_replication = true;
    let mut lost = BTreeSet::new();
    for (round, home) in [0, 1, 0, 1, 0].into_iter().enumerate() {
        cluster.members[0].active = home == 0;
        cluster.publish_views();
        let first = 4_000 + 1_000 * round as u16;
        let ports = external_ports(&open_sessions(&mut cluster, home, "10.244.1.5", first..first + 400));
        assert_eq!(ports.len(), 400, "all to the same remote");
        assert!(ports.is_disjoint(&lost), "in round {round}");
        lost.extend(ports);
        cluster.advance(9_000);
    }
    // When a stripe is exhausted, all other ports are used: an eighth of this shard are 2688 ports.
    let many = open_sessions(&mut cluster, 0, "10.244.1.5", 20_000..24_000);
    assert_eq!(external_ports(&many).len(), 4_000);
    cluster.assert_delta(&[
        "egress 5200, ended idle 1200, created 5200",
        "egress 800, ended idle 800, created 800",
        "",
    ]);
}

#[test]
fn ports_toward_a_busy_remote_are_not_reused_after_failover() {
    let mut cluster = three_gateways();
    cluster.drops_replication = true;
    let mut lost: Vec<BTreeSet<u16>> = Vec::new();
    for (round, home) in [0, 1, 0, 1].into_iter().enumerate() {
        cluster.members[0].active = home == 0;
        cluster.publish_views();
        let first = 10_000 + 10_000 * round as u16;
        // Two thirds of a stripe are in use: one in eleven of the last searches finds all the ports that it tries in
        // use.
        let ports = external_ports(&open_sessions(&mut cluster, home, "10.244.1.5", first..first + 1_800));
        assert_eq!(ports.len(), 1_800, "all to the same remote");
        for (before, lost) in lost.iter().enumerate() {
            assert!(ports.is_disjoint(lost), "rounds {before} and {round}");
        }
        lost.push(ports);
        cluster.advance(9_000);
    }
    cluster.assert_delta(&[
        "egress 3600, ended idle 3600, created 3600",
        "egress 3600, ended idle 3600, created 3600",
        "",
    ]);
}

#[test]
fn restored_sessions_are_replaced_by_the_owners_records() {
    for workers in [1, 2] {
        let mut cluster = Cluster::new(3, &Setup { workers, ..Setup::default() });
        let lost = open_sessions(&mut cluster, 0, "10.244.1.5", 4000..4050);
        // It failed before it replicated anything; it returns with its former tables.
        cluster.kill(0);
        let reopened = open_sessions(&mut cluster, 1, "10.244.1.5", 4000..4050);
        assert!(external_ports(&lost).is_disjoint(&external_ports(&reopened)));
        cluster.members[0] = MemberState { active: false, connected: true, may_open: true };
        cluster.publish_views();
        cluster.full_sync(0, 1);
        assert_eq!(cluster.gateways[1].sessions(), 50, "its own records change nothing");
        assert_eq!(cluster.full_sync(1, 0), 50);
        assert_eq!((cluster.gateways[0].sessions(), cluster.standby_sessions(0)), (0, 50));
        cluster.members[0].active = true;
        cluster.publish_views();
        assert_continue(&mut cluster, 2, 0, &reopened);
        cluster.assert_delta(&[
            "egress 100, peer_in 50, created 50, failed over 50",
            "egress 50, created 50",
            "peer_out 50",
        ]);
    }
}

#[test]
fn a_sync_round_from_before_a_shard_move_ends_no_session() {
    let mut cluster = three_gateways();
    cluster.kill(0);
    let sessions = open_sessions(&mut cluster, 1, "10.244.1.5", 4000..4010);
    cluster.members[0] = MemberState { active: false, connected: true, may_open: true };
    cluster.publish_views();
    let round_view = cluster.active_since;
    // It has a full sync and is active; its own records from before that reach the other gateway only now.
    cluster.full_sync(1, 0);
    cluster.members[0].active = true;
    cluster.publish_views();
    assert!(!cluster.purge_stale(0, 1, round_view), "a new sync is required");
    cluster.kill(0);
    assert_continue(&mut cluster, 2, 1, &sessions);
    cluster.assert_delta(&["", "egress 20, peer_in 10, created 10", "peer_out 10"]);
}
