//! Shards that policy moves while gateways have different policies, and what the replication between them must not
//! end: found by the model of resharding.

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::policy::spec::ShardSpec;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::query::SessionFilter;
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};
use vipgate_dataplane::worker::command::Command;

use super::*;

const POD: &str = "10.244.1.21";

/// The policy with another version, by which gateway 0 is the home of what gateway 1 has had.
fn moved() -> PolicySet {
    let mut set = shared_policy(3);
    set.version = "moved".into();
    let vip = set.vips.iter_mut().find(|vip| vip.address == ip("192.0.2.11")).unwrap();
    vip.shards = vec![ShardSpec { gateway: name(0), blocks: None, backups: vec![name(1), name(2)] }];
    let pods = set.endpoints.iter_mut().filter(|endpoint| endpoint.address == ip(POD));
    pods.for_each(|pod| pod.gateway = Some(name(0)));
    set
}

#[test]
fn a_full_sync_by_another_policy_ends_no_session() {
    let mut cluster = three_gateways();
    let sessions = open_sessions(&mut cluster, 1, POD, 4000..4010);
    cluster.advance(200);
    assert_eq!(cluster.standby_sessions(2), 10);
    cluster.gateways[1].set_policy(&moved());
    // By its policy it has nothing for gateway 2, by whose policy it is the owner.
    assert_eq!(cluster.full_sync(1, 2), 0);
    assert_eq!(cluster.standby_sessions(2), 10);
    for number in [0, 2] {
        cluster.gateways[number].set_policy(&moved());
    }
    assert_eq!(cluster.full_sync(1, 0), 10);
    assert_continue(&mut cluster, 1, 0, &sessions);
    cluster.skip_counter_check();
}

#[test]
fn a_session_of_a_former_owner_is_kept_until_the_new_one_has_it() {
    let mut cluster = three_gateways();
    cluster.full_sync(1, 2);
    cluster.gateways[0].set_policy(&moved());
    cluster.gateways[2].set_policy(&moved());
    // Gateway 1 doesn't know yet that it isn't the owner any more.
    let sessions = open_sessions(&mut cluster, 1, POD, 4000..4010);
    cluster.advance(200);
    assert_eq!(cluster.standby_sessions(2), 10);
    cluster.full_sync(0, 2);
    assert_eq!(cluster.standby_sessions(2), 10, "the owner doesn't have them");
    cluster.kill(1);
    assert_eq!(cluster.full_sync(2, 0), 10);
    assert_continue(&mut cluster, 2, 0, &sessions);
    cluster.skip_counter_check();
}

#[test]
fn only_the_next_owner_can_acknowledge_that_a_session_is_replicated() {
    let mut cluster = three_gateways();
    cluster.members[2].connected = false;
    cluster.publish_views();
    let sessions = open_sessions(&mut cluster, 1, POD, 4000..4010);
    cluster.advance(200);
    assert_eq!(
        (cluster.standby_sessions(0), cluster.standby_sessions(2)),
        (10, 0),
        "sent to the one that is connected"
    );
    cluster.members[2].connected = true;
    cluster.members[1].active = false;
    cluster.publish_views();
    assert_eq!(cluster.full_sync(1, 2), 10);
    assert_continue(&mut cluster, 0, 2, &sessions);
    cluster.skip_counter_check();
}

#[test]
fn a_session_with_a_port_that_is_quarantined_elsewhere_returns_to_its_owner() {
    let setup = Setup { range: PortRange::new(20_000, 20_000).unwrap(), ..Setup::default() };
    let mut cluster = Cluster::new(3, &setup);
    for number in [0, 2] {
        cluster.members[number].connected = false;
    }
    cluster.publish_views();
    open_sessions(&mut cluster, 1, POD, 4000..4001);
    assert_eq!(cluster.gateways[1].flush(0, SessionFilter::default()), 1);
    // The next owner never had the session, so the port is free for it.
    cluster.members[1].active = false;
    cluster.publish_views();
    let sessions = open_sessions(&mut cluster, 2, POD, 4001..4002);
    cluster
        .members
        .iter_mut()
        .for_each(|member| *member = MemberState { active: true, connected: true, may_open: true });
    cluster.publish_views();
    assert_eq!(cluster.full_sync(2, 1), 1);
    assert_continue(&mut cluster, 2, 1, &sessions);
    cluster.skip_counter_check();
}

fn tuple(source: u32, source_port: u16) -> Tuple<u32> {
    Tuple { source, destination: 0xc633_640a, source_port, destination_port: 443, protocol: 17 }
}

/// The record of a session of the pod, seen so many milliseconds ago.
fn record((pod_port, vip_port, idle_ms): (u16, u16, u32)) -> ReplicationRecord {
    ReplicationRecord::V4(FamilyRecord {
        state: RecordState::Open,
        direction: Direction::Egress,
        origin: tuple(0x0af4_0115, pod_port),
        translated: tuple(0xc000_020b, vip_port),
        directions: [DirectionRecord { idle_ms, ..DirectionRecord::default() }; 2],
    })
}

#[test]
fn of_records_that_conflict_at_the_owner_the_one_that_was_seen_last_counts() {
    let mut cluster = three_gateways();
    let source = cluster.gateways[1].builder.gateway_id(&name(0)).unwrap();
    // Each a record (the pod's port, the VIP's port, idle time), and the pair of ports that the owner has then.
    let steps = [
        ((4000, 20_000, 500), (4000, 20_000)),
        ((4000, 20_001, 900), (4000, 20_000)),
        ((4000, 20_002, 100), (4000, 20_002)),
        ((4001, 20_002, 200), (4000, 20_002)),
        ((4001, 20_002, 50), (4001, 20_002)),
    ];
    for (step, (pod_port, vip_port)) in steps {
        let (records, (reply, response)) = (vec![record(step)], bounded(1));
        cluster.gateways[1].commands[0].send(Command::ApplyRecords { records, round: 1, source, reply }).unwrap();
        cluster.gateways[1].turn();
        assert_eq!(response.try_recv().unwrap(), [], "none is rejected: {step:?}");
        assert_eq!(cluster.standby_sessions(1), 1, "{step:?}");
        let sessions = &cluster.gateways[1].workers[0].tables().sessions;
        for key in [tuple(0x0af4_0115, pod_port), tuple(0xc000_020b, vip_port).reversed()] {
            assert!(sessions.find(sessions.hash(&key), &key).is_some(), "{step:?}");
        }
    }
    cluster.skip_counter_check();
}
