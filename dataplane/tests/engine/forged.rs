//! Tunnel packets that no peer has sent, though their source address is a peer's, and some that a peer sends and none may.

use crate::support::cluster::*;
use crate::support::*;
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::members::{Authentication, MemberSpec};
use vipgate_dataplane::snapshot::spec::{AROUND, HopSpec, Role, RouteTarget, VipSpec};
use vipgate_dataplane::snapshot::tunnels::Mark;
use vipgate_dataplane::wire::tunnel_tag::TagKey;

const FROM_INSIDE: Mark = Mark { sides: Role::Inside.sides(), leg: 1 };
const FROM_OUTSIDE: Mark = Mark { sides: Role::Outside.sides(), leg: 1 };
const FROM_AROUND: Mark = Mark { sides: AROUND, leg: 1 };

/// A packet from gateway 1 to gateway 0 arrives there, with this key's tag, if with any; what leaves.
fn arrives(cluster: &mut Cluster, v6: bool, by: InterfaceId, key: Option<&TagKey>, inner: &[u8]) -> usize {
    let mac = if by == INSIDE { INSIDE_MAC } else { OUTSIDE_MAC };
    let frame = tunnelled(tunnel(1, v6), tunnel(0, v6), FROM_INSIDE, key, mac, inner);
    cluster.arrives(0, by, &frame).len()
}

fn question(pod: &str, far: &str) -> Vec<u8> {
    packet(Protocol::Udp, at(pod), at(far))
}

#[test]
fn a_peer_is_believed_by_the_interfaces_that_lead_to_it_only() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            let (mut cluster, question) = (Cluster::over(3, &Setup::default(), v6), question(pod, far));
            let key = tag_key((1, 1), (0, 1));
            assert_eq!(arrives(&mut cluster, v6, OUTSIDE, Some(&key), &question), 0);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&key), &question), 1);
            // Where several equal routes lead there, its packets may come by each of them.
            let mut network = Cluster::network(3, v6);
            let hop = |interface| HopSpec { interface, gateway: None };
            let target = &mut network.routes.last_mut().unwrap().target;
            *target = RouteTarget::Via(vec![hop(INSIDE), hop(OUTSIDE)]);
            cluster.gateways[0].set_network(network.clone());
            assert_eq!(arrives(&mut cluster, v6, OUTSIDE, Some(&key), &question), 1);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&key), &question), 1);
            // Where none leads there, by none.
            network.routes.last_mut().unwrap().target = RouteTarget::Unreachable;
            cluster.gateways[0].set_network(network);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&key), &question), 0);
            cluster.assert_delta(&["egress 3, peer_in 3, drop peer_unknown 2, created 1", "", ""]);
        }
    }
}

/// A gateway has replaced another one, whose name the view still has, with the same address.
#[test]
fn of_two_peers_with_one_address_each_is_believed_and_nobody_else() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            let (mut cluster, question) = (Cluster::over(3, &Setup::default(), v6), question(pod, far));
            let [living, gone] = [1, 9].map(|number| tag_key((number, 1), (0, 1)));
            let mut view = cluster.seen_by(0);
            let authentication = Authentication::Tagged { sent: tag_key((0, 1), (9, 1)), taken: [Some(gone), None] };
            let successor = view.gateways[1].clone();
            view.gateways.push(MemberSpec {
                name: name(9),
                serving: false,
                linked: false,
                authentication,
                ..successor
            });
            cluster.tell_members(0, &view);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&living), &question), 1);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&gone), &question), 1, "its name is in the view");
            for key in [None, Some(tag_key((2, 1), (0, 1)))] {
                assert_eq!(arrives(&mut cluster, v6, INSIDE, key.as_ref(), &question), 0);
            }
            assert_eq!(arrives(&mut cluster, v6, OUTSIDE, Some(&living), &question), 0);
            let expected = "egress 2, peer_in 2, drop peer_unknown 1, drop peer_unauthenticated 2, created 1";
            cluster.assert_delta(&[expected, "", ""]);
            // The name goes, and what it has counts no more.
            cluster.hear(0);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&living), &question), 1);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&gone), &question), 0);
            cluster.assert_delta(&["egress 1, peer_in 1, drop peer_unauthenticated 1", "", ""]);
        }
    }
}

#[test]
fn a_packet_without_its_peers_tag_is_nobodys() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            let (mut cluster, question) = (Cluster::over(3, &Setup::default(), v6), question(pod, far));
            let wrong = [
                None,
                // Guessed; the other direction's, so what this gateway itself has sent; another peer's.
                Some(TagKey::new(&[0; 16])),
                Some(tag_key((0, 1), (1, 1))),
                Some(tag_key((2, 1), (0, 1))),
                // The one of a process that has never been.
                Some(tag_key((1, 2), (0, 1))),
            ];
            for key in &wrong {
                assert_eq!(arrives(&mut cluster, v6, INSIDE, key.as_ref(), &question), 0, "{v6}");
            }
            // A tag of another packet, or of the same one with another mark.
            let key = tag_key((1, 1), (0, 1));
            let other = packet(Protocol::Udp, at("10.244.1.5:4001"), at(FAR));
            let mut frame = tunnelled(tunnel(1, v6), tunnel(0, v6), FROM_INSIDE, Some(&key), INSIDE_MAC, &question);
            let tag_at = frame.len() - question.len();
            let stolen = cluster.sent_on(1, 0, FROM_INSIDE, &other);
            let stolen_at = stolen.len() - other.len();
            let own = frame[tag_at..tag_at + 12].to_vec();
            frame[tag_at..tag_at + 12].copy_from_slice(&stolen[stolen_at..stolen_at + 12]);
            assert_eq!(cluster.arrives(0, INSIDE, &frame), vec![]);
            frame[tag_at..tag_at + 12].copy_from_slice(&own);
            frame[tag_at - 2] = (FROM_OUTSIDE.vni() & 0xff) as u8;
            assert_eq!(cluster.arrives(0, INSIDE, &frame), vec![]);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&key), &question), 1);
            cluster.assert_delta(&["egress 1, peer_in 1, drop peer_unauthenticated 7, created 1", "", ""]);
        }
    }
}

#[test]
fn nothing_is_lost_while_a_peer_starts_anew_and_its_old_key_counts_no_longer_than_that() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            let (mut cluster, question) = (Cluster::over(3, &Setup::default(), v6), question(pod, far));
            let [first, second, third] = [1, 2, 3].map(|start| tag_key((1, start), (0, 1)));
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&first), &question), 1);
            cluster.starts[1] = 2;
            cluster.agree();
            // What was on its way when the other process came, and what that one sends.
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&first), &question), 1);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&second), &question), 1);
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&third), &question), 0);
            cluster.starts[1] = 3;
            cluster.agree();
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&first), &question), 0, "a replay");
            assert_eq!(arrives(&mut cluster, v6, INSIDE, Some(&third), &question), 1);
            // Both ways: what this one sends has the new key, too.
            let sent = cluster.arrives(1, INSIDE, &question);
            only(sent, 0, OUTSIDE, &cluster);
            let expected = "egress 5, peer_in 5, drop peer_unauthenticated 2, created 1";
            cluster.assert_delta(&[expected, "peer_out 1", ""]);
        }
    }
}

#[test]
fn a_peer_that_shows_no_key_is_taken_in_only_where_none_is_required() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            let (mut cluster, question) = (Cluster::over(3, &Setup::default(), v6), question(pod, far));
            cluster.starts[1] = 0;
            cluster.agree();
            assert_eq!(cluster.arrives(1, INSIDE, &question), vec![]);
            cluster.required = false;
            cluster.agree();
            let seen = cluster.arrives(1, INSIDE, &question);
            let seen = only(seen, 0, OUTSIDE, &cluster);
            let home = cluster.arrives(1, OUTSIDE, &answer_to(&seen, Protocol::Udp));
            only(home, 0, INSIDE, &cluster);
            // From who shows one, nothing without is taken in either case.
            let frame = tunnelled(tunnel(2, v6), tunnel(0, v6), FROM_INSIDE, None, INSIDE_MAC, &question);
            assert_eq!(cluster.arrives(0, INSIDE, &frame), vec![]);
            let expected = "egress 1, reply 1, peer_in 2, drop peer_unauthenticated 2, created 1";
            cluster.assert_delta(&[expected, "peer_out 3", ""]);
        }
    }
}

#[test]
fn a_peer_sends_on_nothing_but_what_has_an_owner() {
    for v6 in [false, true] {
        for (pod, friend, vip, other_vip) in [
            ("10.244.1.5:4000", "198.51.100.200:53", "192.0.2.10:2000", "192.0.2.11:53"),
            ("[fd00:244:1::5]:4000", "[2001:db8:51::c8]:53", "[2001:db8::10]:2000", "[2001:db8::11]:53"),
        ] {
            let mut set = shared_policy(3);
            set.policies[0].excluded = ["198.51.100.128/25", "2001:db8:51::/64"].map(|net| net.parse().unwrap()).into();
            let v6_vip = set.vips.iter().find(|vip| vip.address == ip("2001:db8::10")).cloned().unwrap();
            set.vips.push(VipSpec { address: ip("2001:db8::11"), ..v6_vip });
            let mut cluster = Cluster::over(3, &Setup::default(), v6);
            cluster.gateways[0].set_policy(&set);
            for (mark, source, destination) in [
                // Whom policy excludes: neither reaches the pod, nor leaves with the pod's address.
                (FROM_OUTSIDE, friend, pod),
                (FROM_INSIDE, pod, friend),
                // A pod is not outside, and a VIP neither inside nor outside.
                (FROM_OUTSIDE, pod, vip),
                (FROM_OUTSIDE, other_vip, vip),
                (FROM_INSIDE, other_vip, friend),
                // What comes around comes from a VIP.
                (FROM_AROUND, friend, vip),
                (FROM_AROUND, pod, vip),
            ] {
                for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                    let inner = packet(protocol, at(source), at(destination));
                    let frame = cluster.sent_on(1, 0, mark, &inner);
                    assert_eq!(cluster.arrives(0, INSIDE, &frame), vec![], "{mark:?} {source} -> {destination}");
                }
            }
            cluster.assert_delta(&["peer_in 21, drop spoofed_source 21", "", ""]);
            // As it comes in here, it is routed unchanged.
            let sent = cluster.arrives(0, INSIDE, &packet(Protocol::Udp, at(pod), at(friend)));
            only(sent, 0, OUTSIDE, &cluster);
            cluster.assert_delta(&["unchanged 1", "", ""]);
        }
    }
}

#[test]
fn pieces_in_a_tunnel_have_tags_too() {
    for v6 in [false, true] {
        let mut cluster = Cluster::over(3, &Setup::default(), v6);
        let seen = cluster.arrives(0, INSIDE, &question("10.244.1.5:4000", FAR));
        let (vip, far) = ends(&only(seen, 0, OUTSIDE, &cluster));
        let home = cluster.arrives(1, OUTSIDE, &large_reply(far, vip, true));
        assert_eq!(home.len(), 2, "{:?}", cluster.drops());
        cluster.assert_delta(&["egress 1, reply 2, peer_in 2, created 1", "peer_out 1", ""]);
        assert_eq!(cluster.gateways[0].forwarded(Direction::PeerIn), 2);
        assert_eq!(cluster.gateways[0].drops().get(&DropReason::PeerUnauthenticated), None);
    }
}
