//! Endpoints without a home: any gateway translates them, from ports of its own share.

use crate::support::cluster::*;
use crate::support::*;

/// Three gateways whose policy says of no endpoint which of them translates it.
fn three_without_homes() -> Cluster {
    let mut cluster = three();
    let mut set = shared_policy(3);
    set.endpoints.iter_mut().for_each(|endpoint| endpoint.gateway = None);
    cluster.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&set));
    cluster.agree();
    cluster
}

#[test]
fn an_endpoint_without_a_home_is_translated_by_whichever_gateway_gets_its_packets() {
    for (pod, far) in POD_AND_FAR {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut cluster = three_without_homes();
            let mut ports = vec![];
            for number in 0..3 {
                // Another flow each, as routers would spread them.
                let from = std::net::SocketAddr::new(at(pod).ip(), 4000 + number as u16);
                let seen = cluster.arrives(number, INSIDE, &packet(protocol, from, at(far)));
                let seen = only(seen, number, OUTSIDE, &cluster);
                assert_eq!(cluster.tunnelled, 0, "its packets travel nowhere");
                ports.push(ends(&seen).0.port());
                assert_eq!(usize::from(ends(&seen).0.port() / 64 % 3), number, "a port of that gateway's own blocks");
                for other in 0..3 {
                    let home = cluster.arrives(other, OUTSIDE, &answer_to(&seen, protocol));
                    assert_eq!(
                        ends(&only(home, number, INSIDE, &cluster)).1.ip(),
                        from.ip(),
                        "{protocol:?} at {other}"
                    );
                }
                assert_eq!(std::mem::take(&mut cluster.tunnelled), 2, "answers come back to where the session is");
            }
            ports.dedup();
            assert_eq!((ports.len(), cluster.drops()), (3, [].into()));
            cluster.assert_delta(&["egress 1, reply 3, peer_out 2, peer_in 2, created 1"; 3]);
        }
    }
}

#[test]
fn an_endpoint_without_a_home_behind_a_vip_of_one_gateway_is_that_gateways() {
    let mut cluster = three_without_homes();
    for number in 0..3 {
        let from = at(&format!("10.244.1.21:400{number}"));
        let seen = cluster.arrives(number, INSIDE, &packet(Protocol::Udp, from, at(FAR)));
        only(seen, 1, OUTSIDE, &cluster);
    }
    assert_eq!((cluster.tunnelled, cluster.drops()), (2, [].into()));
    cluster.assert_delta(&["peer_out 1", "egress 3, peer_in 2, created 3", "peer_out 1"]);
}

#[test]
fn sessions_of_an_endpoint_without_a_home_go_on_where_their_share_goes() {
    for dies in [false, true] {
        for gone in 0..3 {
            let mut cluster = three_without_homes();
            let question = packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR));
            let seen = cluster.arrives(gone, INSIDE, &question);
            let seen = only(seen, gone, OUTSIDE, &cluster);
            cluster.pass(200);
            let next = (gone + 1) % 3;
            assert_eq!(cluster.copies(next), 1);
            if dies {
                cluster.kill(gone);
            } else {
                cluster.members[gone].serving = false;
                cluster.agree();
            }
            // A gateway that drains gets its packets for a while still; of one that is dead, whoever stands in does.
            let gets = if dies { next } else { gone };
            for _ in 0..2 {
                let again = cluster.arrives(gets, INSIDE, &question);
                assert_eq!(ends(&only(again, next, OUTSIDE, &cluster)), ends(&seen), "{gone} dies: {dies}");
            }
            let home = cluster.arrives(next, OUTSIDE, &answer_to(&seen, Protocol::Udp));
            only(home, next, INSIDE, &cluster);
            assert_eq!(cluster.drops(), [].into());
            // What begins now does so in a share of who serves.
            let new = cluster.arrives(gets, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4001"), at(FAR)));
            assert_eq!((new.len(), cluster.drops()), (1, [].into()));
            let mut counted = [""; 3];
            (counted[gone], counted[next]) = match (dies, gone) {
                (true, _) => ("egress 1, created 1", "egress 3, reply 1, created 1, taken over 1"),
                // What begins goes to the first that has a share: not the one that stands in.
                (false, 1) => ("egress 1, peer_out 3, created 1", "egress 2, reply 1, peer_in 2, taken over 1"),
                _ => ("egress 1, peer_out 3, created 1", "egress 3, reply 1, peer_in 3, created 1, taken over 1"),
            };
            if !dies && gone == 1 {
                counted[0] = "egress 1, peer_in 1, created 1";
            }
            cluster.assert_delta(&counted);
        }
    }
}
