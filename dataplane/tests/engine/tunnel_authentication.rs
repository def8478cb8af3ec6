//! Tunnel authentication: forged packets with a peer's source address, and packets that a peer must not forward.

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::tunnel_metadata::{HAIRPIN_SIDE, TunnelMetadata};
use vipgate_dataplane::policy::members::{Authentication, MemberSpec};
use vipgate_dataplane::policy::spec::{HopSpec, Role, RouteTarget, VipSpec};
use vipgate_dataplane::wire::tunnel_auth::TagKey;
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

const FROM_INSIDE: TunnelMetadata = TunnelMetadata { sides: Role::Inside.sides(), hop_count: 1, requests_port: false };
const FROM_OUTSIDE: TunnelMetadata =
    TunnelMetadata { sides: Role::Outside.sides(), hop_count: 1, requests_port: false };
const FROM_AROUND: TunnelMetadata = TunnelMetadata { sides: HAIRPIN_SIDE, hop_count: 1, requests_port: false };

/// Gateway 0 receives a tunnel packet from gateway 1, tagged with this key if any; returns how many packets are sent.
fn receive_tunneled(
    cluster: &mut Cluster,
    v6: bool,
    interface: InterfaceId,
    key: Option<&TagKey>,
    inner: &[u8],
) -> usize {
    let mac = if interface == INSIDE { INSIDE_MAC } else { OUTSIDE_MAC };
    let frame = tunnel_packet(tunnel_address(1, v6), tunnel_address(0, v6), FROM_INSIDE, key, mac, inner);
    cluster.receive(0, interface, &frame).len()
}

fn request(pod: &str, remote: &str) -> Vec<u8> {
    packet(Protocol::Udp, at(pod), at(remote))
}

#[test]
fn peer_packets_are_accepted_only_on_interfaces_that_route_to_the_peer() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            let (mut cluster, request) = (Cluster::with_tunnel_family(3, &Setup::default(), v6), request(pod, remote));
            let key = tag_key((1, 1), (0, 1));
            assert_eq!(receive_tunneled(&mut cluster, v6, OUTSIDE, Some(&key), &request), 0);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&key), &request), 1);
            // With several equal routes to the peer, its packets are accepted from each of them.
            let mut network = Cluster::network(3, v6);
            let hop = |interface| HopSpec { interface, gateway: None };
            let target = &mut network.routes.last_mut().unwrap().target;
            *target = RouteTarget::Via(vec![hop(INSIDE), hop(OUTSIDE)]);
            cluster.gateways[0].set_network(network.clone());
            assert_eq!(receive_tunneled(&mut cluster, v6, OUTSIDE, Some(&key), &request), 1);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&key), &request), 1);
            // Without a route to the peer, from none.
            network.routes.last_mut().unwrap().target = RouteTarget::Unreachable;
            cluster.gateways[0].set_network(network);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&key), &request), 0);
            cluster.assert_delta(&["egress 3, peer_in 3, drop peer_unknown 2, created 1", "", ""]);
        }
    }
}

/// A gateway has replaced another one at the same address, and the view still names both.
#[test]
fn two_peers_with_one_address_are_both_authenticated() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            let (mut cluster, request) = (Cluster::with_tunnel_family(3, &Setup::default(), v6), request(pod, remote));
            let [current_key, former_key] = [1, 9].map(|number| tag_key((number, 1), (0, 1)));
            let mut view = cluster.view_of(0);
            let authentication = Authentication::Tagged {
                transmit_key: tag_key((0, 1), (9, 1)),
                receive_keys: [Some(former_key), None],
            };
            let successor = view.gateways[1].clone();
            view.gateways.push(MemberSpec {
                name: name(9),
                active: false,
                connected: false,
                authentication,
                ..successor
            });
            cluster.publish_members(0, &view);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&current_key), &request), 1);
            assert_eq!(
                receive_tunneled(&mut cluster, v6, INSIDE, Some(&former_key), &request),
                1,
                "the view still names it"
            );
            for key in [None, Some(tag_key((2, 1), (0, 1)))] {
                assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, key.as_ref(), &request), 0);
            }
            assert_eq!(receive_tunneled(&mut cluster, v6, OUTSIDE, Some(&current_key), &request), 0);
            let expected = "egress 2, peer_in 2, drop peer_unknown 1, drop peer_unauthenticated 2, created 1";
            cluster.assert_delta(&[expected, "", ""]);
            // Once the name is removed from the view, its key is invalid.
            cluster.publish_view(0);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&current_key), &request), 1);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&former_key), &request), 0);
            cluster.assert_delta(&["egress 1, peer_in 1, drop peer_unauthenticated 1", "", ""]);
        }
    }
}

#[test]
fn packets_without_a_valid_tag_are_dropped() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            let (mut cluster, request) = (Cluster::with_tunnel_family(3, &Setup::default(), v6), request(pod, remote));
            let invalid_keys = [
                None,
                // A guessed key; the key of the other direction, as in a reflected packet; another peer's.
                Some(TagKey::new(&[0; 16])),
                Some(tag_key((0, 1), (1, 1))),
                Some(tag_key((2, 1), (0, 1))),
                // The key of a process that never existed.
                Some(tag_key((1, 2), (0, 1))),
            ];
            for key in &invalid_keys {
                assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, key.as_ref(), &request), 0, "{v6}");
            }
            // The tag of another packet, or of the same one with other metadata.
            let key = tag_key((1, 1), (0, 1));
            let other = packet(Protocol::Udp, at("10.244.1.5:4001"), at(REMOTE));
            let mut frame = tunnel_packet(
                tunnel_address(1, v6),
                tunnel_address(0, v6),
                FROM_INSIDE,
                Some(&key),
                INSIDE_MAC,
                &request,
            );
            let tag_at = frame.len() - request.len();
            let other_frame = cluster.peer_packet(1, 0, FROM_INSIDE, &other);
            let other_tag_at = other_frame.len() - other.len();
            let own_tag = frame[tag_at..tag_at + 12].to_vec();
            frame[tag_at..tag_at + 12].copy_from_slice(&other_frame[other_tag_at..other_tag_at + 12]);
            assert_eq!(cluster.receive(0, INSIDE, &frame), vec![]);
            frame[tag_at..tag_at + 12].copy_from_slice(&own_tag);
            frame[tag_at - 2] = (FROM_OUTSIDE.vni() & 0xff) as u8;
            assert_eq!(cluster.receive(0, INSIDE, &frame), vec![]);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&key), &request), 1);
            cluster.assert_delta(&["egress 1, peer_in 1, drop peer_unauthenticated 7, created 1", "", ""]);
        }
    }
}

#[test]
fn a_restarted_peers_former_key_is_valid_until_its_next_start() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            let (mut cluster, request) = (Cluster::with_tunnel_family(3, &Setup::default(), v6), request(pod, remote));
            let [first, second, third] = [1, 2, 3].map(|start| tag_key((1, start), (0, 1)));
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&first), &request), 1);
            cluster.process_starts[1] = 2;
            cluster.publish_views();
            // Packets in flight from the former process, and those of the new one.
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&first), &request), 1);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&second), &request), 1);
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&third), &request), 0);
            cluster.process_starts[1] = 3;
            cluster.publish_views();
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&first), &request), 0, "a replayed packet");
            assert_eq!(receive_tunneled(&mut cluster, v6, INSIDE, Some(&third), &request), 1);
            // In the other direction, this gateway sends with the new key, too.
            cluster.pod_sends(1, 0, &request);
            let expected = "egress 5, peer_in 5, drop peer_unauthenticated 2, created 1";
            cluster.assert_delta(&[expected, "peer_out 1", ""]);
        }
    }
}

#[test]
fn a_peer_without_a_key_is_accepted_only_if_none_is_required() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            let (mut cluster, request) = (Cluster::with_tunnel_family(3, &Setup::default(), v6), request(pod, remote));
            cluster.process_starts[1] = 0;
            cluster.publish_views();
            assert_eq!(cluster.receive(1, INSIDE, &request), vec![]);
            cluster.requires_authentication = false;
            cluster.publish_views();
            let seen = cluster.pod_sends(1, 0, &request);
            cluster.remote_sends(1, 0, &reply_to(&seen, Protocol::Udp));
            // A peer with a key must tag its packets in either case.
            let frame =
                tunnel_packet(tunnel_address(2, v6), tunnel_address(0, v6), FROM_INSIDE, None, INSIDE_MAC, &request);
            assert_eq!(cluster.receive(0, INSIDE, &frame), vec![]);
            let expected = "egress 1, reply 1, peer_in 2, drop peer_unauthenticated 2, created 1";
            cluster.assert_delta(&[expected, "peer_out 3", ""]);
        }
    }
}

#[test]
fn peers_forward_only_packets_that_have_an_owner() {
    for v6 in [false, true] {
        for (pod, excluded, vip, other_vip) in [
            ("10.244.1.5:4000", "198.51.100.200:53", "192.0.2.10:2000", "192.0.2.11:53"),
            ("[fd00:244:1::5]:4000", "[2001:db8:51::c8]:53", "[2001:db8::10]:2000", "[2001:db8::11]:53"),
        ] {
            let mut set = shared_policy(3);
            set.policies[0].excluded = ["198.51.100.128/25", "2001:db8:51::/64"].map(|net| net.parse().unwrap()).into();
            let v6_vip = set.vips.iter().find(|vip| vip.address == ip("2001:db8::10")).cloned().unwrap();
            set.vips.push(VipSpec { address: ip("2001:db8::11"), ..v6_vip });
            let mut cluster = Cluster::with_tunnel_family(3, &Setup::default(), v6);
            cluster.gateways[0].set_policy(&set);
            for (mark, source, destination) in [
                // Excluded destinations: such a packet neither reaches the pod, nor leaves with the pod's address.
                (FROM_OUTSIDE, excluded, pod),
                (FROM_INSIDE, pod, excluded),
                // A pod is not outside, and a VIP neither inside nor outside.
                (FROM_OUTSIDE, pod, vip),
                (FROM_OUTSIDE, other_vip, vip),
                (FROM_INSIDE, other_vip, excluded),
                // Hairpinned packets come from a VIP.
                (FROM_AROUND, excluded, vip),
                (FROM_AROUND, pod, vip),
            ] {
                for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                    let inner = packet(protocol, at(source), at(destination));
                    let frame = cluster.peer_packet(1, 0, mark, &inner);
                    assert_eq!(cluster.receive(0, INSIDE, &frame), vec![], "{mark:?} {source} -> {destination}");
                }
            }
            cluster.assert_delta(&["peer_in 21, drop spoofed_source 21", "", ""]);
            // Received directly here, it is routed unchanged.
            cluster.pod_sends(0, 0, &packet(Protocol::Udp, at(pod), at(excluded)));
            cluster.assert_delta(&["unchanged 1", "", ""]);
        }
    }
}

#[test]
fn fragments_in_a_tunnel_have_tags() {
    for v6 in [false, true] {
        let mut cluster = Cluster::with_tunnel_family(3, &Setup::default(), v6);
        let (vip, remote) = ends(&cluster.pod_sends(0, 0, &request("10.244.1.5:4000", REMOTE)));
        let received = cluster.receive(1, OUTSIDE, &large_reply(remote, vip, true));
        assert_eq!(received.len(), 2, "{:?}", cluster.drops());
        cluster.assert_delta(&["egress 1, reply 2, peer_in 2, created 1", "peer_out 1", ""]);
        assert_eq!(cluster.gateways[0].forwarded(Direction::PeerIn), 2);
        assert_eq!(cluster.gateways[0].drops().get(&DropReason::PeerUnauthenticated), None);
    }
}
