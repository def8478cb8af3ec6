//! ARP for a VIP of one gateway: only the owner replies, and only after the former owner has released it.

use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::worker::command::Command;
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

#[test]
fn only_the_owner_of_a_vip_replies_to_arp() {
    let mut cluster = three_gateways();
    let seen = cluster.pod_sends(2, 1, &packet(Protocol::Udp, at("10.244.1.21:4000"), at(REMOTE)));
    cluster.remote_sends(0, 1, &reply_to(&seen, Protocol::Udp));
    assert_eq!(arp_replies(&mut cluster), [0, 1, 0]);
    cluster.kill(1);
    assert_eq!(arp_replies(&mut cluster), [0, 0, 1]);
    cluster.assert_delta(&[
        "peer_out 1, drop not_ours 2",
        "egress 1, reply 1, peer_in 2, created 1, replies sent 1",
        "peer_out 1, drop not_ours 1, replies sent 1",
    ]);
}

/// Replies of each gateway to an ARP request for the VIP of one gateway; failed gateways send none.
fn arp_replies(cluster: &mut Cluster) -> [usize; 3] {
    let [router, vip] = [[192, 0, 2, 254], [192, 0, 2, 11]].map(u32::from_be_bytes);
    let frame = vipgate_dataplane::wire::arp::Arp::request(ROUTER_MAC, router, vip).frame(OUTSIDE_MAC);
    [0, 1, 2].map(|number| {
        let is_alive = cluster.members[number].connected;
        if is_alive { cluster.receive(number, OUTSIDE, &frame).len() } else { 0 }
    })
}

#[test]
fn no_gateway_replies_to_arp_before_the_former_owner_has_released_the_vip() {
    let announcements = |cluster: &mut Cluster, number: GatewayIndex| {
        let gateway = &mut cluster.gateways[number];
        gateway.commands[0].send(Command::Announce(vec![ip("192.0.2.11")])).unwrap();
        gateway.advance(3_000);
        gateway.run().len()
    };
    let mut cluster = three_gateways();
    // Another gateway owned it meanwhile, and may not have the view that returns it yet.
    cluster.members[1].may_open = false;
    cluster.publish_views();
    assert_eq!((arp_replies(&mut cluster), announcements(&mut cluster, 1)), ([0; 3], 0));
    cluster.gateways[1].commands[0].send(Command::Defend(ip("192.0.2.11"))).unwrap();
    assert_eq!(cluster.gateways[1].run(), vec![]);
    cluster.members[1].may_open = true;
    cluster.publish_views();
    assert_eq!((arp_replies(&mut cluster), announcements(&mut cluster, 1)), ([0, 1, 0], 3));
    // The standby gateway waits in the same way.
    cluster.kill(1);
    cluster.members[1].may_open = false;
    cluster.publish_views();
    assert_eq!((arp_replies(&mut cluster), announcements(&mut cluster, 2)), ([0; 3], 0));
    cluster.members[1].may_open = true;
    cluster.publish_views();
    assert_eq!((arp_replies(&mut cluster), announcements(&mut cluster, 2)), ([0, 0, 1], 3));
    cluster.assert_delta(&["drop not_ours 4", "drop not_ours 1, replies sent 4", "drop not_ours 3, replies sent 4"]);
}

#[test]
fn no_gateway_replies_to_arp_without_a_view_or_a_lease() {
    let mut cluster = three_gateways();
    for gateway in &mut cluster.gateways {
        let unresolved_view = MembersSpec { this: Some(name(1)), ..MembersSpec::default() };
        let snapshot = gateway.builder.with_members(&unresolved_view);
        gateway.publisher.publish(snapshot);
    }
    assert_eq!(arp_replies(&mut cluster), [0; 3], "no membership view yet");
    cluster.publish_views();
    cluster.gateways[1].lease.renew(cluster.gateways[1].now);
    assert_eq!(arp_replies(&mut cluster), [0; 3], "the lease has expired");
    cluster.gateways[1].lease.renew(cluster.gateways[1].now.plus(1_000));
    assert_eq!(arp_replies(&mut cluster), [0, 1, 0]);
    cluster.assert_delta(&["drop not_ours 3", "drop not_ours 2, replies sent 1", "drop not_ours 3"]);
}
