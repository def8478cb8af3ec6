//! Endpoints without a home gateway: any gateway translates them, with ports of its own shard.

use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

/// Three gateways with a policy that assigns no endpoint to a gateway.
fn three_without_home_gateways() -> Cluster {
    let mut cluster = three_gateways();
    cluster.change_policy(|set| set.endpoints.iter_mut().for_each(|endpoint| endpoint.gateway = None));
    cluster.publish_views();
    cluster
}

#[test]
fn an_endpoint_without_a_home_is_translated_by_the_receiving_gateway() {
    for (pod, remote) in POD_AND_REMOTE {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut cluster = three_without_home_gateways();
            let mut ports = vec![];
            for number in 0..3 {
                // Distinct flows, as ECMP routers spread them.
                let source = std::net::SocketAddr::new(at(pod).ip(), 4000 + number as u16);
                let seen = cluster.pod_sends(number, number, &packet(protocol, source, at(remote)));
                assert_eq!(cluster.tunneled, 0, "no packet is tunneled");
                ports.push(ends(&seen).0.port());
                assert_eq!(usize::from(ends(&seen).0.port() / 64 % 3), number, "a port of that gateway's own blocks");
                for other in 0..3 {
                    assert_eq!(
                        ends(&cluster.remote_sends(other, number, &reply_to(&seen, protocol))).1.ip(),
                        source.ip(),
                        "{protocol:?} at {other}"
                    );
                }
                assert_eq!(std::mem::take(&mut cluster.tunneled), 2, "replies are forwarded to the session's gateway");
            }
            ports.dedup();
            assert_eq!((ports.len(), cluster.drops()), (3, [].into()));
            cluster.assert_delta(&["egress 1, reply 3, peer_out 2, peer_in 2, created 1"; 3]);
        }
    }
}

#[test]
fn an_endpoint_without_a_home_is_translated_by_the_sole_owner_of_its_vip() {
    let mut cluster = three_without_home_gateways();
    for number in 0..3 {
        let source = at(&format!("10.244.1.21:400{number}"));
        cluster.pod_sends(number, 1, &packet(Protocol::Udp, source, at(REMOTE)));
    }
    assert_eq!((cluster.tunneled, cluster.drops()), (2, [].into()));
    cluster.assert_delta(&["peer_out 1", "egress 3, peer_in 2, created 3", "peer_out 1"]);
}

#[test]
fn sessions_of_an_endpoint_without_a_home_follow_their_shard() {
    for fails in [false, true] {
        for stopped in 0..3 {
            let mut cluster = three_without_home_gateways();
            let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE));
            let seen = cluster.pod_sends(stopped, stopped, &request);
            cluster.advance(200);
            let standby = (stopped + 1) % 3;
            assert_eq!(cluster.standby_sessions(standby), 1);
            if fails {
                cluster.kill(stopped);
            } else {
                cluster.members[stopped].active = false;
                cluster.publish_views();
            }
            // A draining gateway still receives the packets for a while; if it has failed, the standby gateway does.
            let receiver = if fails { standby } else { stopped };
            for _ in 0..2 {
                assert_eq!(
                    ends(&cluster.pod_sends(receiver, standby, &request)),
                    ends(&seen),
                    "gateway {stopped}, fails: {fails}"
                );
            }
            cluster.remote_sends(standby, standby, &reply_to(&seen, Protocol::Udp));
            assert_eq!(cluster.drops(), [].into());
            // New sessions open in the shard of an active gateway.
            let new = cluster.receive(receiver, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4001"), at(REMOTE)));
            assert_eq!((new.len(), cluster.drops()), (1, [].into()));
            let mut expected = [""; 3];
            (expected[stopped], expected[standby]) = match (fails, stopped) {
                (true, _) => ("egress 1, created 1", "egress 3, reply 1, created 1, failed over 1"),
                // They open at the first gateway with an active shard, not at the standby gateway.
                (false, 1) => ("egress 1, peer_out 3, created 1", "egress 2, reply 1, peer_in 2, failed over 1"),
                _ => ("egress 1, peer_out 3, created 1", "egress 3, reply 1, peer_in 3, created 1, failed over 1"),
            };
            if !fails && stopped == 1 {
                expected[0] = "egress 1, peer_in 1, created 1";
            }
            cluster.assert_delta(&expected);
        }
    }
}
