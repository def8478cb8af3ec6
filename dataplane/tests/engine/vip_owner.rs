//! ARP for a VIP of one gateway: only the owner answers, and only once the one before has let go.

use crate::support::cluster::*;
use crate::support::*;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::snapshot::members::MembersSpec;

#[test]
fn a_vip_of_one_gateway_is_answered_there_alone() {
    let mut cluster = three();
    let seen = cluster.arrives(2, INSIDE, &packet(Protocol::Udp, at("10.244.1.21:4000"), at(FAR)));
    let seen = only(seen, 1, OUTSIDE, &cluster);
    let home = cluster.arrives(0, OUTSIDE, &answer_to(&seen, Protocol::Udp));
    only(home, 1, INSIDE, &cluster);
    assert_eq!(answers(&mut cluster), [0, 1, 0]);
    cluster.kill(1);
    assert_eq!(answers(&mut cluster), [0, 0, 1]);
    cluster.assert_delta(&[
        "peer_out 1, drop not_ours 2",
        "egress 1, reply 1, peer_in 2, created 1, answered 1",
        "peer_out 1, drop not_ours 1, answered 1",
    ]);
}

/// How often each gateway answers when all are asked who has the VIP that is one gateway's: a dead one doesn't count.
fn answers(cluster: &mut Cluster) -> [usize; 3] {
    let question = vipgate_dataplane::wire::arp::Arp {
        operation: vipgate_dataplane::wire::arp::Operation::Request,
        sender_mac: ROUTER_MAC,
        sender: u32::from_be_bytes([192, 0, 2, 254]),
        target_mac: [0; 6],
        target: u32::from_be_bytes([192, 0, 2, 11]),
    };
    let frame = question.frame(OUTSIDE_MAC);
    [0, 1, 2].map(|number| {
        let lives = cluster.members[number].linked;
        if lives { cluster.arrives(number, OUTSIDE, &frame).len() } else { 0 }
    })
}

#[test]
fn nobody_answers_for_a_vip_before_whoever_had_it_has_let_go() {
    let announced = |cluster: &mut Cluster, number: Number| {
        let gateway = &mut cluster.gateways[number];
        gateway.commands[0].send(Command::Announce(vec![ip("192.0.2.11")])).unwrap();
        gateway.pass(3_000);
        gateway.run().len()
    };
    let mut cluster = three();
    // Another one had it while this one was away, and may not have seen the view that gives it back.
    cluster.members[1].may_open = false;
    cluster.agree();
    assert_eq!((answers(&mut cluster), announced(&mut cluster, 1)), ([0; 3], 0));
    cluster.gateways[1].commands[0].send(Command::Defend(ip("192.0.2.11"))).unwrap();
    assert_eq!(cluster.gateways[1].run(), vec![]);
    cluster.members[1].may_open = true;
    cluster.agree();
    assert_eq!((answers(&mut cluster), announced(&mut cluster, 1)), ([0, 1, 0], 3));
    // The one that stands in for it waits in the same way.
    cluster.kill(1);
    cluster.members[1].may_open = false;
    cluster.agree();
    assert_eq!((answers(&mut cluster), announced(&mut cluster, 2)), ([0; 3], 0));
    cluster.members[1].may_open = true;
    cluster.agree();
    assert_eq!((answers(&mut cluster), announced(&mut cluster, 2)), ([0, 0, 1], 3));
    cluster.assert_delta(&["drop not_ours 4", "drop not_ours 1, answered 4", "drop not_ours 3, answered 4"]);
}

#[test]
fn nobody_answers_without_a_view_or_without_a_lease() {
    let mut cluster = three();
    for gateway in &mut cluster.gateways {
        let asked = MembersSpec { this: Some(name(1)), ..MembersSpec::default() };
        let snapshot = gateway.builder.with_members(&asked);
        gateway.publisher.publish(snapshot);
    }
    assert_eq!(answers(&mut cluster), [0; 3], "nobody has said yet who serves");
    cluster.agree();
    cluster.gateways[1].lease.extend(cluster.gateways[1].now);
    assert_eq!(answers(&mut cluster), [0; 3], "the lease has ended");
    cluster.gateways[1].lease.extend(cluster.gateways[1].now.plus(1_000));
    assert_eq!(answers(&mut cluster), [0, 1, 0]);
    cluster.assert_delta(&["drop not_ours 3", "drop not_ours 2, answered 1", "drop not_ours 3"]);
}
