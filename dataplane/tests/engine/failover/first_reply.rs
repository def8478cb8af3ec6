//! Replication with the first reply (`FirstRecord::WithReply`): the record is queued by the turn that forwards it, and
//! nothing is sent twice.

use std::collections::HashMap;

use proptest::prelude::*;
use vipgate_coverage::property;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::session::record::ReplicationRecord;

use super::*;

const ENDS: [(&str, &str); 2] = [("10.244.1.5:4000", REMOTE), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:443")];

fn replicating_with_reply() -> Cluster {
    let mut cluster = Cluster::new(3, &Setup { first_record: FirstRecord::WithReply, ..Setup::default() });
    // Each test states which records are queued.
    cluster.skip_counter_check();
    cluster
}

/// The records that gateway 0 has queued since the last call; they are not delivered.
fn queued(cluster: &Cluster) -> Vec<ReplicationRecord> {
    let sender = &cluster.gateways[0].replication_senders[0];
    std::iter::from_fn(|| sender.pop()).map(|outgoing| outgoing.record).collect()
}

/// Advances the clock of gateway 0 only, and returns what it has queued meanwhile.
fn queued_after(cluster: &mut Cluster, ms: u32) -> Vec<ReplicationRecord> {
    cluster.gateways[0].advance(ms);
    queued(cluster)
}

#[test]
fn a_session_is_queued_by_the_turn_that_forwards_its_first_reply() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        for (pod, remote) in ENDS {
            let mut cluster = replicating_with_reply();
            let request = packet(protocol, at(pod), at(remote));
            let seen = cluster.pod_sends(0, 0, &request);
            assert_eq!(queued(&cluster), [], "not answered yet");
            let reply = reply_to(&seen, protocol);
            // Twice in one batch, as a retransmission.
            (0..2).for_each(|_| assert!(cluster.gateways[0].workers[0].io().inject(OUTSIDE, &reply)));
            let now = cluster.gateways[0].now;
            assert_eq!(cluster.gateways[0].workers[0].turn(now), 2);
            assert_eq!(queued(&cluster).len(), 1, "{protocol:?}, once, without a further turn");
            assert_eq!(cluster.gateways[0].run().len(), 2);
            assert_eq!(queued_after(&mut cluster, 900).len(), 0, "{protocol:?}: nothing has changed");
        }
    }
}

#[test]
fn a_connection_is_sent_again_only_for_its_confirmation_and_its_end() {
    for (pod, remote) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut cluster = replicating_with_reply();
        let seen = cluster.pod_sends(0, 0, &tcp(pod, remote, "S", 1000, 0));
        let vip = ends(&seen).0;
        cluster.remote_sends(0, 0, &tcp(remote, vip, "SA", 5000, 1001));
        assert_eq!(queued(&cluster).len(), 1);
        cluster.pod_sends(0, 0, &tcp(pod, remote, "A", 1001, 5001));
        assert_eq!(queued(&cluster), [], "the confirmation isn't urgent");
        assert_eq!(queued_after(&mut cluster, 200).len(), 1, "the confirmation");
        assert_eq!(queued_after(&mut cluster, 8_000).len(), 0, "no attempt to send an open connection again");
        cluster.pod_sends(0, 0, &tcp(pod, remote, "FA", 1001, 5001));
        assert_eq!(queued_after(&mut cluster, 200).len(), 1, "its end");
    }
}

#[test]
fn a_session_without_a_reply_is_sent_after_50_ms_and_at_once_when_it_is_answered() {
    let (pod, remote) = (at(ENDS[0].0), at(REMOTE));
    let mut cluster = replicating_with_reply();
    let seen = cluster.pod_sends(0, 0, &tcp(pod, remote, "S", 1000, 0));
    assert_eq!(queued_after(&mut cluster, 40).len(), 0);
    assert_eq!(queued_after(&mut cluster, 20).len(), 1);
    let syn_ack = tcp(remote, ends(&seen).0, "SA", 5000, 1001);
    cluster.remote_sends(0, 0, &syn_ack);
    assert_eq!(queued(&cluster).len(), 1);
    cluster.remote_sends(0, 0, &syn_ack);
    assert_eq!(queued(&cluster).len(), 0, "a retransmission shows nothing new");
}

#[test]
fn nothing_is_queued_while_no_peer_is_connected() {
    let mut cluster = replicating_with_reply();
    for peer in [1, 2] {
        cluster.members[peer].connected = false;
    }
    cluster.publish_views();
    let request = packet(Protocol::Udp, at(ENDS[0].0), at(REMOTE));
    let seen = cluster.pod_sends(0, 0, &request);
    let reply = reply_to(&seen, Protocol::Udp);
    cluster.remote_sends(0, 0, &reply);
    assert_eq!(queued_after(&mut cluster, 1_000), []);
}

#[test]
fn with_the_default_a_reply_queues_nothing() {
    let mut cluster = three_gateways();
    cluster.skip_counter_check();
    let request = packet(Protocol::Tcp, at(ENDS[0].0), at(REMOTE));
    let seen = cluster.pod_sends(0, 0, &request);
    let reply = reply_to(&seen, Protocol::Tcp);
    cluster.remote_sends(0, 0, &reply);
    assert_eq!(queued_after(&mut cluster, 90), []);
    assert_eq!(queued_after(&mut cluster, 20).len(), 1, "at its age, 100 ms here");
}

#[test]
fn a_connection_survives_its_gateway_from_the_syn_ack_on() {
    for (pod, remote) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut cluster = replicating_with_reply();
        let seen = cluster.pod_sends(0, 0, &tcp(pod, remote, "S", 1000, 0));
        let vip = ends(&seen).0;
        cluster.remote_sends(0, 0, &tcp(remote, vip, "SA", 5000, 1001));
        cluster.replicate();
        cluster.kill(0);
        assert_eq!(ends(&cluster.pod_sends(2, 1, &tcp(pod, remote, "A", 1001, 5001))), (vip, remote));
        cluster.remote_sends(2, 1, &tcp(remote, vip, "A", 5001, 1001));
        cluster.advance(10_000);
        assert_eq!(cluster.gateways[1].sessions(), 1, "established: 30 seconds here, while opening 4");
    }
}

/// A packet of one of several sessions, or a pause.
#[derive(Clone, Copy, Debug)]
enum Step {
    Syn,
    SynAck,
    Ack,
    Fin,
    Datagram,
    Answer,
    Pause,
}

/// What a record says of its session, apart from counters and idle times.
fn content(record: &ReplicationRecord) -> (u16, String) {
    let ReplicationRecord::V4(record) = record else { panic!("IPv4 only") };
    let directions = record.directions.map(|it| (it.flags, it.sequence, it.acknowledged));
    (record.origin.source_port, format!("{:?} {directions:?}", record.state))
}

/// The packet of a step in the session of this port, and the side that it comes from.
fn packet_of(step: Step, port: u16, vip: Option<SocketAddr>) -> Option<(InterfaceId, Vec<u8>)> {
    let (pod, remote) = (at(&format!("10.244.1.5:{port}")), at(REMOTE));
    Some(match step {
        Step::Syn => (INSIDE, tcp(pod, remote, "S", 1000, 0)),
        Step::Ack => (INSIDE, tcp(pod, remote, "A", 1001, 5001)),
        Step::Fin => (INSIDE, tcp(pod, remote, "FA", 1001, 5001)),
        Step::Datagram => (INSIDE, packet(Protocol::Udp, pod, remote)),
        Step::SynAck => (OUTSIDE, tcp(remote, vip?, "SA", 5000, 1001)),
        Step::Answer => (OUTSIDE, packet(Protocol::Udp, remote, vip?)),
        Step::Pause => return None,
    })
}

/// An answered session is in the queue after the turn of its answer, and no record repeats the previous one.
#[test]
fn answered_sessions_are_queued_at_once_and_no_record_is_repeated() {
    let step = prop_oneof![
        Just(Step::Syn),
        Just(Step::SynAck),
        Just(Step::Ack),
        Just(Step::Fin),
        Just(Step::Datagram),
        Just(Step::Answer),
        Just(Step::Pause)
    ];
    let steps = proptest::collection::vec((0..3_u16, step), 1..60);
    property(ProptestConfig::with_cases(200), &steps, &["answered", "changed"], |steps, coverage| {
        let mut cluster = replicating_with_reply();
        // External addresses of TCP and UDP sessions, those that were answered, and the last record of each session.
        let (mut vips, mut answered, mut last) = (HashMap::new(), BTreeSet::new(), HashMap::new());
        for (session, step) in steps {
            let is_udp = matches!(step, Step::Datagram | Step::Answer);
            let port = 4000 + 2 * session + u16::from(is_udp);
            let mut is_answer = false;
            let vip = vips.get(&port).copied();
            if let Some((interface, bytes)) = packet_of(step, port, vip) {
                let sent = cluster.receive(0, interface, &bytes);
                match (interface, sent.first()) {
                    (INSIDE, Some((.., seen))) => drop(vips.insert(port, ends(seen).0)),
                    (_, sent) => is_answer = sent.is_some() && answered.insert(port),
                }
            } else {
                // All of them take less than a second, after which connections that don't open are sent again.
                cluster.gateways[0].advance(10);
            }
            let records = queued(&cluster);
            if is_answer {
                coverage.count("answered");
                prop_assert!(records.iter().any(|record| content(record).0 == port), "{step:?} of {port}");
            }
            for (of, content) in records.iter().map(content) {
                let previous = last.insert(of, content.clone());
                coverage.add("changed", previous.is_some().into());
                prop_assert_ne!(previous, Some(content), "a record of {} is repeated", of);
            }
        }
        Ok(())
    });
}
