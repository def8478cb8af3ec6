//! Several gateways, one VIP: whichever of them the network picks, a packet reaches its owner, once.

use crate::support::cluster::*;
use crate::support::*;
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::ports::pool::Refused;
use vipgate_dataplane::snapshot::spec::PolicySet;

#[test]
fn a_reply_at_any_gateway_reaches_the_pod_by_way_of_its_owner() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                let mut cluster = Cluster::over(3, &Setup::default(), v6);
                let sent = cluster.arrives(0, INSIDE, &packet(protocol, at(pod), at(far)));
                let seen = only(sent, 0, OUTSIDE, &cluster);
                assert_eq!(cluster.tunnelled, 0, "its own gateway needs no other");
                for number in 0..3 {
                    let home = cluster.arrives(number, OUTSIDE, &answer_to(&seen, protocol));
                    let home = only(home, 0, INSIDE, &cluster);
                    assert_eq!(ends(&home).1, at(pod), "{protocol:?} at {number}");
                }
                assert_eq!(cluster.tunnelled, 2);
                assert_eq!(cluster.gateways[1].forwarded(Direction::PeerOut), 1);
                assert_eq!(cluster.gateways[0].forwarded(Direction::PeerIn), 2);
                assert_eq!(cluster.gateways[0].forwarded(Direction::Reply), 3);
                assert_eq!(cluster.drops(), [].into());
                cluster.assert_delta(&["egress 1, reply 3, peer_in 2, created 1", "peer_out 1", "peer_out 1"]);
            }
        }
    }
}

#[test]
fn a_pods_packet_at_another_gateway_leaves_by_its_own() {
    for (pod, far) in POD_AND_FAR {
        let mut cluster = three();
        let question = packet(Protocol::Udp, at(pod), at(far));
        let seen: Vec<_> = (0..3)
            .map(|number| {
                let sent = cluster.arrives(number, INSIDE, &question);
                ends(&only(sent, 0, OUTSIDE, &cluster)).0
            })
            .collect();
        assert!(seen.iter().all(|vip| *vip == seen[0]), "one session: {seen:?}");
        assert_eq!((cluster.gateways[0].sessions(), cluster.tunnelled), (1, 2));
        assert_eq!(seen[0].port() / 64 % 3, 0, "a port of its home's blocks");
        cluster.assert_delta(&["egress 3, peer_in 2, created 1", "peer_out 1", "peer_out 1"]);
    }
}

#[test]
fn strangers_and_nonsense_come_out_of_no_tunnel() {
    let mut cluster = three();
    let inner = packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR));
    let tunnel = |from: &str, vni: u32, inner: &[u8]| {
        let outer = vipgate_dataplane::wire::vxlan::Outer::new(ip(from), at("10.2.0.1:4790")).unwrap();
        let mut frame = vec![0; outer.length()];
        outer.write(&mut frame, inner.len() as u16, vni, 7, 0);
        frame[..6].copy_from_slice(&INSIDE_MAC);
        frame.extend(inner);
        tag_key((1, 1), (0, 1)).seal(&mut frame[outer.length()..], vni);
        frame
    };
    for (frame, reason) in [
        (tunnel("10.2.0.9", 0x76_7009, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.1", 0x76_7009, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 0x76_7029, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 7, &inner), DropReason::PeerUnknown),
        // From no side, and from an interface and around at once.
        (tunnel("10.2.0.2", 0x76_7008, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 0x76_700d, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 0x76_7009, &inner[..20]), DropReason::Malformed),
        (tunnel("10.2.0.2", 0x76_7009, &inner)[..60].to_vec(), DropReason::Malformed),
        // A tunnel in a tunnel: inside, it is a packet to the gateway, which is nobody's VIP.
        (tunnel("10.2.0.2", 0x76_7009, &tunnel("10.2.0.2", 0x76_7009, &inner)), DropReason::NoPolicy),
        // It has travelled three times, and this gateway isn't its owner: it goes nowhere else.
        (tunnel("10.2.0.2", 0x76_7019, &packet(Protocol::Udp, at("10.244.1.6:4000"), at(FAR))), DropReason::NoOwner),
    ] {
        let before = cluster.gateways[0].drops().get(&reason).copied().unwrap_or(0);
        assert_eq!(cluster.arrives(0, INSIDE, &frame), vec![]);
        if reason == DropReason::NoOwner {
            cluster.pass(1_050);
        }
        assert_eq!(cluster.gateways[0].drops().get(&reason).copied(), Some(before + 1), "{reason:?}");
    }
    let good = cluster.arrives(0, INSIDE, &tunnel("10.2.0.2", 0x76_7009, &inner));
    only(good, 0, OUTSIDE, &cluster);
    cluster.assert_delta(&[
        "egress 1, peer_in 4, drop no_policy 1, drop malformed 2, drop no_owner 1, drop peer_unknown 6, created 1",
        "",
        "",
    ]);
}

#[test]
fn what_is_too_long_for_a_tunnel_is_cut_or_its_sender_hears_how_long_it_may_be() {
    let mut cluster = three();
    let seen = cluster.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR)));
    let (vip, far) = ends(&only(seen, 0, OUTSIDE, &cluster));
    let told = cluster.arrives(1, OUTSIDE, &large_reply(far, vip, false));
    let told = only(told, 1, OUTSIDE, &cluster);
    assert_eq!((told[34], told[35], u16::from_be_bytes([told[40], told[41]])), (3, 4, 1450));
    let pieces = cluster.arrives(1, OUTSIDE, &large_reply(far, vip, true));
    let pieces: Vec<_> = pieces.into_iter().filter(|(_, out, _)| *out == INSIDE).collect();
    assert_eq!(pieces.len(), 2, "{:?}", cluster.drops());
    assert_eq!(pieces.iter().map(|(_, _, bytes)| bytes.len() - 34).sum::<usize>(), 1480);
    cluster.assert_delta(&["egress 1, reply 2, peer_in 2, created 1", "peer_out 1, drop too_big 1, answered 1", ""]);
}

/// A gateway has forgotten all its neighbours inside, which is where tunnels between gateways go, too.
fn forget_neighbours_inside(cluster: &mut Cluster, number: Number) {
    let mut network = Cluster::network(3, false);
    network.neighbours.retain(|neighbour| neighbour.interface != INSIDE);
    cluster.gateways[number].set_network(network);
}

/// It asks for this one, and the kernel finds it; what it sends then.
fn ask_for(cluster: &mut Cluster, number: Number, address: &str) -> Vec<(Number, InterfaceId, Vec<u8>)> {
    let wanted = cluster.gateways[number].questions.queue.pop().map(|it| (it.interface, it.address));
    assert_eq!(wanted, Some((INSIDE, ip(address))), "nobody is asked: {:?}", cluster.drops());
    cluster.gateways[number].set_network(Cluster::network(3, false));
    let sent = cluster.gateways[number].run();
    cluster.carry(sent.into_iter().map(|(out, bytes)| (number, out, bytes)).collect())
}

#[test]
fn what_goes_to_another_gateway_whole_or_in_pieces_waits_for_its_link_address() {
    let mut cluster = three();
    let seen = cluster.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR)));
    let seen = only(seen, 0, OUTSIDE, &cluster);
    let (vip, far) = ends(&seen);
    for (reply, count) in [(answer_to(&seen, Protocol::Udp), 1), (large_reply(far, vip, true), 2)] {
        forget_neighbours_inside(&mut cluster, 1);
        assert_eq!(cluster.arrives(1, OUTSIDE, &reply), vec![]);
        let home = ask_for(&mut cluster, 1, "10.2.0.1");
        assert!(home.iter().all(|(number, out, _)| (*number, *out) == (0, INSIDE)));
        let bytes = home.iter().map(|(_, _, bytes)| bytes.len() - 34).sum::<usize>();
        assert_eq!((home.len(), bytes), (count, reply.len() - 34));
    }
    cluster.assert_delta(&["egress 1, reply 3, peer_in 3, created 1", "peer_out 2", ""]);
}

#[test]
fn what_an_owner_says_of_a_packet_from_another_gateway_waits_for_its_neighbour() {
    let mut cluster = three();
    let mut last_hop = packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR));
    set_ttl(&mut last_hop, 1);
    forget_neighbours_inside(&mut cluster, 0);
    assert_eq!(cluster.arrives(1, INSIDE, &last_hop), vec![]);
    let told = ask_for(&mut cluster, 0, "10.244.1.5");
    let told = only(told, 0, INSIDE, &cluster);
    assert_eq!((told[34], told[35], &told[..6]), (11, 0, &POD_MAC[..]));
    cluster.assert_delta(&["peer_in 1, drop ttl 1, answered 1", "peer_out 1", ""]);
}

#[test]
fn a_clients_connection_goes_on_at_any_gateway_with_its_backend() {
    use crate::support::services::*;
    let mut cluster = three();
    let set = PolicySet { services: vec![service(&both_pods())], ..shared_policy(3) };
    cluster.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&set));
    for (client, vip) in CLIENTS.iter().zip(VIPS) {
        let (client, vip) = (at(client), (ip(vip), 80).into());
        let first = cluster.arrives(0, OUTSIDE, &tcp(client, vip, "S", 1000, 0));
        let backend = ends(&only(first, 0, INSIDE, &cluster)).1;
        for number in 0..3 {
            let answer = cluster.arrives(number, INSIDE, &tcp(backend, client, "SA", 5000, 1001));
            assert_eq!(ends(&only(answer, number, OUTSIDE, &cluster)), (vip, client));
            let more = cluster.arrives(number, OUTSIDE, &tcp(client, vip, "A", 1001, 5001));
            assert_eq!(ends(&only(more, number, INSIDE, &cluster)).1, backend, "at {number}");
        }
    }
    assert_eq!((cluster.gateways[0].sessions(), cluster.gateways[1].sessions()), (2, 0), "no state where none began");
    assert_eq!((cluster.tunnelled, cluster.drops()), (0, [].into()));
    cluster.assert_delta(&[
        "inbound 4, service_reply 2, created 2",
        "inbound 2, service_reply 2",
        "inbound 2, service_reply 2",
    ]);
}

#[test]
fn pieces_of_a_datagram_come_together_whichever_gateways_they_come_to() {
    let mut cluster = three();
    let seen = cluster.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR)));
    let (vip, far) = ends(&only(seen, 0, OUTSIDE, &cluster));
    let whole = {
        let mut frame = Vec::new();
        let (std::net::IpAddr::V4(from), std::net::IpAddr::V4(to)) = (far.ip(), vip.ip()) else { panic!() };
        let mut header =
            etherparse::Ipv4Header::new(2008, 64, etherparse::ip_number::UDP, from.octets(), to.octets()).unwrap();
        (header.dont_fragment, header.identification) = (false, 99);
        let step = etherparse::PacketBuilder::ethernet2(ROUTER_MAC, OUTSIDE_MAC);
        let step = step.ip(etherparse::IpHeaders::Ipv4(header, etherparse::Ipv4Extensions::default()));
        step.udp(far.port(), vip.port()).write(&mut frame, &[9; 2000]).unwrap();
        frame
    };
    let mut pieces = Vec::new();
    vipgate_dataplane::wire::cut::cut(&whole, 820, |headers, payload| {
        pieces.push([headers, payload].concat());
        true
    });
    assert_eq!(pieces.len(), 3);
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut home = Vec::new();
        for (at, number) in order.into_iter().zip([2, 0, 1]) {
            home.extend(cluster.arrives(number, OUTSIDE, &pieces[at]));
        }
        let home: Vec<_> = home.into_iter().filter(|(number, out, _)| (*number, *out) == (0, INSIDE)).collect();
        assert_eq!(home.len(), 3, "{order:?}: {:?}", cluster.drops());
        cluster.pass(3_000);
    }
    assert!(cluster.tunnelled <= 18, "twice each at most: {}", cluster.tunnelled);
    cluster.assert_delta(&["egress 1, reply 9, peer_in 6, created 1", "peer_out 3", "peer_out 3"]);
}

#[test]
fn an_error_about_a_sessions_packet_finds_the_pod_from_any_gateway() {
    let mut cluster = three();
    let seen = cluster.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(FAR)));
    let seen = only(seen, 0, OUTSIDE, &cluster);
    let vip = ends(&seen).0;
    let mut error = Vec::new();
    let std::net::IpAddr::V4(to) = vip.ip() else { panic!() };
    etherparse::PacketBuilder::ethernet2(ROUTER_MAC, OUTSIDE_MAC)
        .ipv4([203, 0, 113, 77], to.octets(), 64)
        .icmpv4(etherparse::Icmpv4Type::TimeExceeded(etherparse::icmpv4::TimeExceededCode::TtlExceededInTransit))
        .write(&mut error, &seen[14..14 + 28])
        .unwrap();
    for number in 0..3 {
        let home = cluster.arrives(number, OUTSIDE, &error);
        let home = only(home, 0, INSIDE, &cluster);
        assert_eq!(home[30..34], [10, 244, 1, 5], "at {number}");
    }
    cluster.assert_delta(&["egress 1, reply 3, peer_in 2, created 1", "peer_out 1", "peer_out 1"]);
}

mod anything {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::tally::property;

    /// What may happen to three gateways.
    #[derive(Clone, Debug)]
    enum Step {
        /// A pod says something, which comes to some gateway.
        Pod {
            pod: u8,
            port: u8,
            to: u8,
            at: u8,
        },
        /// The far side answers what it has seen.
        Answer {
            which: prop::sample::Index,
            at: u8,
        },
        Time(u16),
        Dies(u8),
        /// It is back, is told all, and serves again.
        Returns(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..2_u8, 0..12_u8, 0..2_u8, 0..3_u8).prop_map(|(pod, port, to, at)| Step::Pod { pod, port, to, at }),
            4 => (any::<prop::sample::Index>(), 0..3_u8).prop_map(|(which, at)| Step::Answer { which, at }),
            2 => (10..900_u16).prop_map(Step::Time),
            1 => (0..3_u8).prop_map(Step::Dies),
            2 => (0..3_u8).prop_map(Step::Returns),
        ]
    }

    /// Who serves tells all others what they are to have, as after each change.
    fn all_tell_all(cluster: &mut Cluster) {
        for (from, to) in (0..9).map(|at| (at / 3, at % 3)) {
            if from != to && cluster.members[from].serving && cluster.members[to].linked {
                cluster.tell_all(from, to);
            }
        }
    }

    /// Whatever dies and comes back: an answer never reaches another pod than the one that it is for, and no two pods are seen as
    /// one while both of them talk.
    #[test]
    fn no_answer_reaches_another_pod() {
        let classes = ["sent", "sent again", "answered", "tunnelled", "died", "returned", "taken over"];
        property(ProptestConfig::with_cases(96), &prop::collection::vec(step(), 1..120), &classes, |steps, tally| {
            let mut cluster = Cluster::new(3, &Setup::default());
            cluster.counts_vary();
            // Whom the far side talks to: by what it sees, the pod, and when it heard of it last.
            let mut seen: HashMap<(String, String), (String, u32)> = HashMap::new();
            let mut order: Vec<(String, String)> = Vec::new();
            let mut clock = 0_u32;
            for step in steps {
                match step {
                    Step::Pod { pod, port, to, at: number } => {
                        let number = usize::from(number);
                        if !cluster.members[number].linked {
                            continue;
                        }
                        let pod = format!("10.244.1.{}:{}", 5 + pod, 4000 + u16::from(port));
                        let far = format!("198.51.100.10:{}", 443 + u16::from(to));
                        for (_, out, bytes) in
                            cluster.arrives(number, INSIDE, &packet(Protocol::Udp, at(&pod), at(&far)))
                        {
                            prop_assert_eq!(out, OUTSIDE);
                            let (vip, far) = ends(&bytes);
                            let key = (vip.to_string(), far.to_string());
                            if let Some((other, heard)) = seen.insert(key.clone(), (pod.clone(), clock)) {
                                let is_over = clock.wrapping_sub(heard) >= 5_000;
                                tally.count("sent again");
                                prop_assert!(other == pod || is_over, "{:?} is {} and {}", key, other, pod);
                            } else {
                                tally.count("sent");
                                order.push(key);
                            }
                        }
                    }
                    Step::Answer { which, at: number } => {
                        let number = usize::from(number);
                        if order.is_empty() || !cluster.members[number].linked {
                            continue;
                        }
                        let (vip, far) = which.get(&order).clone();
                        let pod = seen[&(vip.clone(), far.clone())].0.clone();
                        let home = cluster.arrives(number, OUTSIDE, &packet(Protocol::Udp, at(&far), at(&vip)));
                        tally.count(if home.is_empty() { "lost" } else { "answered" });
                        for (_, out, bytes) in home {
                            prop_assert_eq!(out, INSIDE);
                            prop_assert_eq!(ends(&bytes).1.to_string(), pod.clone());
                        }
                    }
                    Step::Time(ms) => {
                        cluster.pass(ms.into());
                        clock += u32::from(ms);
                    }
                    Step::Dies(number) => {
                        // What it hasn't told yet is lost with it: nothing is left untold here.
                        cluster.pass(200);
                        clock += 200;
                        let number = usize::from(number);
                        if cluster.members.iter().filter(|it| it.serving).count() > 1 {
                            tally.count("died");
                            cluster.kill(number);
                            all_tell_all(&mut cluster);
                        }
                    }
                    Step::Returns(number) => {
                        let number = usize::from(number);
                        if cluster.members[number].serving {
                            continue;
                        }
                        cluster.members[number] = Standing { serving: false, linked: true, may_open: true };
                        cluster.agree();
                        let serving: Vec<_> = (0..3).filter(|other| cluster.members[*other].serving).collect();
                        for other in serving {
                            cluster.tell_all(other, number);
                        }
                        cluster.members[number].serving = true;
                        cluster.agree();
                        all_tell_all(&mut cluster);
                        tally.count("returned");
                    }
                }
            }
            tally.add("tunnelled", cluster.tunnelled);
            let taken =
                cluster.gateways.iter().flat_map(|it| &it.workers).map(|it| it.counters().sessions_taken_over.get());
            tally.add("taken over", taken.sum());
            Ok(())
        });
    }
}

#[test]
fn ports_that_run_out_in_a_shard_are_told_apart_from_those_of_a_whole_vip() {
    let range = PortRange::new(20_032, 20_032 + 4 * 64 - 1).unwrap();
    for (pod, far, vip) in
        [("10.244.1.5", "198.51.100.10:53", "192.0.2.10"), ("fd00:244:1::5", "[2001:db8:51::10]:53", "2001:db8::10")]
    {
        let setup = Setup { range, ..Setup::default() };
        let mut cluster = Cluster::new(2, &setup);
        let pool = cluster.gateways[0].builder.snapshot().policy.vip_at(ip(vip)).unwrap().pool.clone();
        let shares = cluster.gateways[0].builder.snapshot().policy.vip_at(ip(vip)).unwrap().shares.clone();
        let own = shares.own_blocks();
        let ports = range.count_in(&own);
        assert_eq!((range.within(&own).count(), ports), (2, 128), "every other block of the range");
        for n in 0..140 {
            cluster.arrives(0, INSIDE, &packet(Protocol::Udp, (ip(pod), 1000 + n).into(), at(far)));
        }
        assert_eq!(cluster.drops(), [(DropReason::PortsExhausted, 12)].into());
        assert_eq!(pool.refused(), Refused { whole: 0, in_shard: 12 });
        assert_eq!(pool.claimed_among(&own), 2);
        cluster.assert_delta(&["egress 128, drop ports_exhausted 12, created 128", ""]);
        // The other one is gone, and its shard is this gateway's; but endpoints keep to the ports of their own.
        cluster.kill(1);
        for n in 0..5 {
            cluster.arrives(0, INSIDE, &packet(Protocol::Udp, (ip(pod), 2000 + n).into(), at(far)));
        }
        assert_eq!(pool.refused(), Refused { whole: 0, in_shard: 17 });
        cluster.counts_vary();
    }
    let mut alone = Gateway::new(&Setup { range, ..Setup::default() });
    for n in 0..260 {
        alone.arrives(0, INSIDE, &packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), at("198.51.100.10:53")));
    }
    let vip = alone.builder.snapshot().policy.vip_at(ip("192.0.2.10")).unwrap().pool.clone();
    assert_eq!(vip.refused(), Refused { whole: 4, in_shard: 0 }, "256 ports");
    alone.assert_delta("egress 256, drop ports_exhausted 4, created 256");
}
