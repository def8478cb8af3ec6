//! Pods on nodes of a VXLAN overlay: their packets arrive in the node's tunnel, and packets to them are sent into it.

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::observe::capture::CaptureFilter;
use vipgate_dataplane::policy::change::{Entries, PolicyChange};
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::wire::vxlan::{OuterHeaders, parse};
use vipgate_testkit::services::{CLIENTS, both_pods, service};
use vipgate_testkit::*;

pub(crate) const VNI: u32 = 0x00_1234;
/// Inner MAC addresses of the nodes' VXLAN interfaces, and the inner destination that they send to.
pub(crate) const NODE_MACS: [[u8; 6]; 2] = [[0x0e, 0, 0, 0, 0, 1], [0x0e, 0, 0, 0, 0, 2]];
const INNER_DESTINATION_MAC: [u8; 6] = [0x0e, 0, 0, 0, 0, 0xff];

pub(crate) fn local_vtep(v6: bool) -> SocketAddr {
    at(if v6 { "[fd00:20::64]:4789" } else { "10.20.0.100:4789" })
}

pub(crate) fn vtep(number: usize, v6: bool) -> SocketAddr {
    at(&if v6 { format!("[fd00:20::{number}]:4789") } else { format!("10.20.0.{number}:4789") })
}

/// Two nodes: pods .5 and .21 are on the first one, .6 on the second one.
pub(crate) fn nodes(v6: bool) -> Vec<NodeSpec> {
    let prefixes = [
        ["10.244.1.0/24", "fd00:244:1::/64"].map(|net| net.parse().unwrap()),
        ["10.244.1.6/32", "fd00:244:1::6/128"].map(|net| net.parse().unwrap()),
    ];
    let spec = |(number, prefixes): (usize, [_; 2])| NodeSpec {
        name: format!("node-{number}").into(),
        address: vtep(number, v6),
        vni: VNI,
        mac: NODE_MACS[number - 1],
        verify_mac: false,
        sends_covered_only: false,
        prefixes: prefixes.into(),
    };
    (1..).zip(prefixes).map(spec).collect()
}

pub(crate) fn network_with_nodes(v6: bool) -> NetworkSpec {
    let mut network = network();
    network.interfaces[0].addresses = vec![ip("10.244.1.1"), ip("fd00:244:1::1")];
    let net = if v6 { "fd00:20::/64" } else { "10.20.0.0/24" };
    let via = RouteTarget::Via(vec![HopSpec { interface: INSIDE, gateway: None }]);
    network.routes.push(RouteSpec { prefix: net.parse().unwrap(), target: via });
    for number in [1, 2, 9] {
        let address = vtep(number, v6).ip();
        network.neighbors.push(NeighborSpec { interface: INSIDE, address, mac: POD_MAC });
    }
    network
}

pub(crate) fn gateway(v6: bool, mut policy: PolicySet) -> Gateway {
    policy.nodes = nodes(v6);
    Gateway::with(&Setup { overlay: Some(local_vtep(v6)), ..Setup::default() }, network_with_nodes(v6), &policy)
}

/// A pod's packet in the tunnel of its node.
pub(crate) fn node_packet(from: IpAddr, to: SocketAddr, vni: u32, packet: &[u8]) -> Vec<u8> {
    let outer = OuterHeaders::new(from, to).unwrap();
    let mut frame = vec![0; outer.length()];
    outer.write(&mut frame, packet.len() as u16, vni, 7, 0);
    frame[..6].copy_from_slice(&INSIDE_MAC);
    frame.extend(packet);
    let at = outer.length();
    frame[at..at + 6].copy_from_slice(&INNER_DESTINATION_MAC);
    frame
}

/// Decapsulates the single packet sent, which must go to this node.
fn decap_at_node(sent: &[(vipgate_dataplane::flow::ids::InterfaceId, Vec<u8>)], number: usize, v6: bool) -> Vec<u8> {
    assert_eq!(sent.len(), 1);
    let (out, frame) = &sent[0];
    assert_eq!((*out, ends(frame).1, &frame[..6]), (INSIDE, vtep(number, v6), &POD_MAC[..]));
    assert_eq!(ends(frame).0.ip(), local_vtep(v6).ip());
    let inner = parse(frame).unwrap();
    assert_eq!(inner.vni, VNI);
    let packet = frame[inner.offset..].to_vec();
    assert_eq!(packet[..6], NODE_MACS[number - 1]);
    assert_eq!(packet[6] & 3, 2, "the gateway's locally administered inner MAC address");
    check_packet(&packet);
    packet
}

#[test]
fn overlay_packets_are_decapsulated_and_replies_encapsulated() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                let mut gateway = gateway(v6, policy());
                let request = packet(protocol, at(pod), at(remote));
                let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &request));
                let [(OUTSIDE, seen)] = &sent[..] else { panic!("{sent:?} {:?}", gateway.drops()) };
                check_only_translated(&request, seen);
                let reply = reply_to(seen, protocol);
                for _ in 0..2 {
                    let sent = gateway.receive(0, OUTSIDE, &reply);
                    let received = decap_at_node(&sent, 1, v6);
                    check_only_translated(&reply, &received);
                    assert_eq!(ends(&received).1, at(pod));
                }
                gateway.assert_delta("egress 1, reply 2, created 1");
            }
        }
    }
}

#[test]
fn an_uncovered_pod_reaches_only_other_pods_via_the_overlay() {
    for v6 in [false, true] {
        for (pod, other_pod, remote) in [
            ("10.244.1.7:4000", "10.244.1.6:53", "198.51.100.10:53"),
            ("[fd00:244:1::7]:4000", "[fd00:244:1::6]:53", "[2001:db8:51::10]:53"),
        ] {
            let pods = ["10.244.0.0/16", "fd00:244::/32"].map(|net| net.parse().unwrap()).into();
            let cluster = ClusterSpec { pods, others: vec![], drop_uncovered: true };
            let mut gateway = gateway(v6, PolicySet { cluster, ..policy() });
            let mut send = |to| {
                gateway.receive(
                    0,
                    INSIDE,
                    &node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &packet(Protocol::Udp, at(pod), to)),
                )
            };
            assert_eq!(send(at(remote)), []);
            assert_eq!(ends(&decap_at_node(&send(at(other_pod)), 2, v6)), (at(pod), at(other_pod)));
            gateway.assert_delta("unchanged 1, drop no_policy 1");
        }
    }
}

#[test]
fn a_capture_filter_matches_inner_and_outer_tunnel_addresses() {
    for (v6, (pod, remote)) in [false, true].into_iter().flat_map(|v6| POD_AND_REMOTE.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let request = packet(Protocol::Udp, at(pod), at(remote));
        let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &request));
        let reply = reply_to(&sent[0].1, Protocol::Udp);
        let expected = [at(pod), at(remote), vtep(1, v6), local_vtep(v6), ends(&sent[0].1).0].map(|it| (it.ip(), 1));
        for (address, count) in expected.into_iter().chain([(ip("10.244.1.6"), 0), (vtep(2, v6).ip(), 0)]) {
            gateway.capture(&CaptureFilter { nets: vec![address.into()], ..CaptureFilter::default() }, 2048, 1000);
            assert!(gateway.workers[0].io().inject(OUTSIDE, &reply));
            decap_at_node(&gateway.run(), 1, v6);
            let seen = gateway.captured();
            assert_eq!(seen.len(), count, "{address}");
            assert!(seen.iter().all(|it| it.before == reply && parse(&it.after).is_some()));
        }
        gateway.assert_delta("egress 1, reply 7, created 1");
    }
}

#[test]
fn inbound_and_untranslated_packets_are_encapsulated_to_the_node() {
    let mut set = policy();
    set.services = vec![service(&both_pods())];
    let mut gateway = gateway(false, set);
    for n in 0..20 {
        let client: SocketAddr = (at(CLIENTS[0]).ip(), 40_000 + n).into();
        let sent = gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, client, at("192.0.2.10:53")));
        let number = if ends(&sent[0].1).1 == vtep(1, false) { 1 } else { 2 };
        let received = decap_at_node(&sent, number, false);
        let backend = ends(&received).1;
        assert_eq!(backend.ip() == ip("10.244.1.6"), number == 2, "{backend} is on node {number}");
        let reply =
            node_packet(vtep(number, false).ip(), local_vtep(false), VNI, &packet(Protocol::Udp, backend, client));
        let sent = gateway.receive(0, INSIDE, &reply);
        assert_eq!(ends(&sent[0].1), (at("192.0.2.10:53"), client));
    }
    let excluded = packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.200:53"));
    let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, false).ip(), local_vtep(false), VNI, &excluded));
    assert_eq!(ends(&sent[0].1), (at("10.244.1.21:4000"), at("198.51.100.200:53")));
    let sent = gateway.receive(0, OUTSIDE, &reply_to(&sent[0].1, Protocol::Udp));
    assert_eq!(ends(&decap_at_node(&sent, 1, false)).1, at("10.244.1.21:4000"));
    gateway.assert_delta("inbound 20, service_reply 20, unchanged 2, created 20");
}

#[test]
fn node_packets_are_accepted_only_on_interfaces_that_route_to_the_node() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let (pod, remote) = POD_AND_REMOTE[0];
        let frame = node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &packet(Protocol::Udp, at(pod), at(remote)));
        let mut network = network_with_nodes(v6);
        let elsewhere = RouteTarget::Via(vec![HopSpec { interface: OUTSIDE, gateway: None }]);
        let RouteSpec { target, .. } = network.routes.last_mut().unwrap();
        let here = std::mem::replace(target, elsewhere);
        gateway.set_network(network.clone());
        assert_eq!(gateway.receive(0, INSIDE, &frame), vec![]);
        network.routes.last_mut().unwrap().target = here;
        gateway.set_network(network);
        assert_eq!(gateway.receive(0, INSIDE, &frame).len(), 1, "{:?}", gateway.drops());
        gateway.assert_delta("egress 1, drop peer_unknown 1, created 1");
    }
}

#[test]
fn packets_from_unknown_nodes_or_with_foreign_pods_are_dropped() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let (pod, remote) = POD_AND_REMOTE[0];
        let inner = packet(Protocol::Udp, at(pod), at(remote));
        let other_nodes_pod = packet(Protocol::Udp, at("10.244.1.6:4000"), at(remote));
        let [node_1, local_vtep] = [vtep(1, v6), local_vtep(v6)];
        let mut arp = inner.clone();
        arp[12..14].copy_from_slice(&[8, 6]);
        let nested = node_packet(node_1.ip(), local_vtep, VNI, &inner);
        let from_remote = packet(Protocol::Udp, at(remote), at("192.0.2.10:2000"));
        for (frame, reason) in [
            (node_packet(vtep(9, v6).ip(), local_vtep, VNI, &inner), DropReason::PeerUnknown),
            (node_packet(node_1.ip(), local_vtep, VNI + 1, &inner), DropReason::PeerUnknown),
            (node_packet(node_1.ip(), local_vtep, VNI, &other_nodes_pod), DropReason::SpoofedSource),
            (node_packet(node_1.ip(), local_vtep, VNI, &from_remote), DropReason::SpoofedSource),
            (node_packet(node_1.ip(), local_vtep, VNI, &arp), DropReason::Malformed),
            (node_packet(node_1.ip(), local_vtep, VNI, &inner[..20]), DropReason::Malformed),
            (node_packet(node_1.ip(), local_vtep, VNI, &inner)[..70].to_vec(), DropReason::Malformed),
            (node_packet(node_1.ip(), local_vtep, VNI, &nested), DropReason::SpoofedSource),
        ] {
            let before = gateway.drops().get(&reason).copied().unwrap_or(0);
            assert_eq!(gateway.receive(0, INSIDE, &frame), vec![]);
            assert_eq!(gateway.drops().get(&reason).copied(), Some(before + 1), "{reason:?}");
        }
        // Nodes are not accepted on the outside interface.
        let outside = on_link(OUTSIDE, node_packet(node_1.ip(), local_vtep, VNI, &inner));
        assert_eq!(gateway.receive(0, OUTSIDE, &outside), vec![]);
        assert_eq!(gateway.sessions(), 0);
        assert_eq!(gateway.receive(0, INSIDE, &node_packet(node_1.ip(), local_vtep, VNI, &inner)).len(), 1);
        gateway.assert_delta("egress 1, drop spoofed_source 3, drop malformed 3, drop peer_unknown 3, created 1");
    }
}

#[test]
fn without_the_nodes_secret_mac_address_its_packets_are_dropped() {
    for v6 in [false, true] {
        let mut policy = policy();
        policy.nodes = nodes(v6);
        policy.nodes[0].verify_mac = true;
        let setup = Setup { overlay: Some(local_vtep(v6)), ..Setup::default() };
        let mut gateway = Gateway::with(&setup, network_with_nodes(v6), &policy);
        let (pod, remote) = POD_AND_REMOTE[0];
        let with_mac = |mac: [u8; 6]| {
            let mut inner = packet(Protocol::Udp, at(pod), at(remote));
            inner[6..12].copy_from_slice(&mac);
            node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &inner)
        };
        // The other node's, and one that is wrong in a single bit, first or last.
        let [mut first, mut last] = [NODE_MACS[0]; 2];
        first[0] ^= 0b100;
        last[5] ^= 1;
        for mac in [NODE_MACS[1], first, last, POD_MAC] {
            assert_eq!(gateway.receive(0, INSIDE, &with_mac(mac)), vec![]);
        }
        assert_eq!(gateway.sessions(), 0);
        assert_eq!(gateway.receive(0, INSIDE, &with_mac(NODE_MACS[0])).len(), 1);
        gateway.assert_delta("egress 1, drop peer_unauthenticated 4, created 1");
    }
}

#[test]
fn from_a_node_that_sends_covered_pods_packets_alone_nothing_uncovered_leaves() {
    for v6 in [false, true] {
        for sends_covered_only in [false, true] {
            let mut policy = policy();
            policy.nodes = nodes(v6);
            policy.nodes[0].sends_covered_only = sends_covered_only;
            let pods = vec!["10.244.0.0/16".parse().unwrap()];
            policy.cluster = ClusterSpec { pods, ..ClusterSpec::default() };
            let setup = Setup { overlay: Some(local_vtep(v6)), ..Setup::default() };
            let mut gateway = Gateway::with(&setup, network_with_nodes(v6), &policy);
            let (pod, remote) = POD_AND_REMOTE[0];
            let tunnel = |inner: &[u8]| node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, inner);
            assert_eq!(gateway.receive(0, INSIDE, &tunnel(&packet(Protocol::Udp, at(pod), at(remote)))).len(), 1);
            gateway.assert_delta("egress 1, created 1");
            // A pod whose policy this gateway doesn't know yet.
            let uncovered = packet(Protocol::Udp, at("10.244.1.77:4000"), at(remote));
            gateway.receive(0, INSIDE, &tunnel(&uncovered));
            if sends_covered_only {
                gateway.assert_delta("drop no_policy 1");
            } else {
                gateway.assert_delta("unchanged 1");
            }
        }
    }
}

/// A pod of node 1 opens a UDP session; its VIP and the remote address.
fn open_session(gateway: &mut Gateway) -> (SocketAddr, SocketAddr) {
    let (pod, remote) = POD_AND_REMOTE[0];
    let request = packet(Protocol::Udp, at(pod), at(remote));
    let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, false).ip(), local_vtep(false), VNI, &request));
    ends(&sent[0].1)
}

/// The MTU in the only packet sent, an ICMP error "fragmentation needed" to outside.
fn too_big_mtu(sent: &[(vipgate_dataplane::flow::ids::InterfaceId, Vec<u8>)]) -> u16 {
    let [(OUTSIDE, error)] = sent else { panic!("{sent:?}") };
    assert_eq!((error[34], error[35]), (3, 4));
    u16::from_be_bytes([error[40], error[41]])
}

#[test]
fn packets_larger_than_the_overlay_mtu_are_fragmented_or_rejected() {
    let mut gateway = gateway(false, policy());
    let (vip, remote) = open_session(&mut gateway);
    let error = gateway.receive(0, OUTSIDE, &large_reply(remote, vip, false));
    assert_eq!(too_big_mtu(&error), 1450);
    let fragments = gateway.receive(0, OUTSIDE, &large_reply(remote, vip, true));
    let lengths: usize = fragments.iter().map(|fragment| decap_fragment(fragment, false)).sum();
    assert_eq!((fragments.len(), lengths), (2, 1480));
    gateway.assert_delta("egress 1, reply 1, drop too_big 1, created 1, replies sent 1");
}

#[test]
fn the_usable_mtu_is_limited_by_the_frame_size() {
    let mut gateway = gateway(false, policy());
    let mut jumbo_network = network_with_nodes(false);
    jumbo_network.interfaces.iter_mut().for_each(|interface| interface.mtu = 9000);
    gateway.set_network(jumbo_network);
    let (vip, remote) = open_session(&mut gateway);
    let error = gateway.receive(0, OUTSIDE, &reply_of_length(1760, remote, vip, false));
    assert_eq!(too_big_mtu(&error), 1728, "1778 less the tunnel headers");
    let fragments = gateway.receive(0, OUTSIDE, &reply_of_length(1760, remote, vip, true));
    assert!(fragments.len() == 2 && fragments.iter().all(|(_, frame)| frame.len() <= 1792));
    assert_eq!(gateway.receive(0, OUTSIDE, &reply_of_length(1728, remote, vip, false)).len(), 1);
    gateway.assert_delta("egress 1, reply 2, drop too_big 1, created 1, replies sent 1");
}

#[test]
fn jumbo_packets_are_fragmented_to_the_overlay_mtu() {
    let mut network = network_with_nodes(false);
    for interface in &mut network.interfaces {
        (interface.mtu, interface.frames) = (9000, FrameLayout::MultiBuffer);
    }
    let setup = Setup { overlay: Some(local_vtep(false)), ..Setup::default() };
    let mut gateway = Gateway::with(&setup, network, &PolicySet { nodes: nodes(false), ..policy() });
    let (vip, remote) = open_session(&mut gateway);
    let error = gateway.receive(0, OUTSIDE, &reply_of_length(9000, remote, vip, false));
    assert_eq!(too_big_mtu(&error), 8950);
    let fragments = gateway.receive(0, OUTSIDE, &reply_of_length(9000, remote, vip, true));
    let lengths: usize = fragments.iter().map(|fragment| decap_fragment(fragment, false)).sum();
    assert_eq!((fragments.len(), lengths), (2, 8980));
    assert_eq!(gateway.receive(0, OUTSIDE, &reply_of_length(8950, remote, vip, false)).len(), 1);
    gateway.assert_delta("egress 1, reply 2, drop too_big 1, created 1, replies sent 1");
}

/// Length of a tunneled fragment without its IP header.
fn decap_fragment((_, frame): &(vipgate_dataplane::flow::ids::InterfaceId, Vec<u8>), v6: bool) -> usize {
    let inner = parse(frame).unwrap();
    assert_eq!(
        (ends(frame).1, inner.vni, &frame[inner.offset..inner.offset + 6]),
        (vtep(1, v6), VNI, &NODE_MACS[0][..])
    );
    inner.length - 34
}

/// Removes the neighbor entry of node 1.
pub(crate) fn remove_node_1_neighbor(gateway: &mut Gateway, v6: bool) {
    let mut network = network_with_nodes(v6);
    network.neighbors.retain(|neighbor| neighbor.address != vtep(1, v6).ip());
    gateway.set_network(network);
}

/// Asserts that the neighbor entry of node 1 was requested, and resolves it.
pub(crate) fn resolve_node_1_neighbor(gateway: &mut Gateway, v6: bool) {
    let requested = gateway.resolution_requests.queue.pop().map(|it| (it.interface, it.address));
    assert_eq!(requested, Some((INSIDE, vtep(1, v6).ip())), "no resolution request: {:?}", gateway.drops());
    gateway.set_network(network_with_nodes(v6));
}

#[test]
fn a_packet_to_be_fragmented_into_a_tunnel_awaits_neighbor_resolution() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let (pod, remote) = POD_AND_REMOTE[0];
        let request = packet(Protocol::Udp, at(pod), at(remote));
        let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &request));
        let (vip, remote) = ends(&sent[0].1);
        remove_node_1_neighbor(&mut gateway, v6);
        assert_eq!(gateway.receive(0, OUTSIDE, &large_reply(remote, vip, true)), vec![]);
        // The pods' prefixes may move meanwhile: the packet was already routed to this node.
        let mut set = policy();
        set.nodes = nodes(v6).into_iter().rev().collect();
        gateway.set_policy(&set);
        resolve_node_1_neighbor(&mut gateway, v6);
        let fragments = gateway.run();
        let lengths: usize = fragments.iter().map(|fragment| decap_fragment(fragment, v6)).sum();
        assert_eq!((fragments.len(), lengths), (2, 1480));
        assert!(fragments.iter().all(|(out, frame)| *out == INSIDE && frame[..6] == POD_MAC));
        gateway.assert_delta("egress 1, reply 1, created 1");
    }
}

#[test]
fn an_icmp_error_to_an_overlay_pod_awaits_neighbor_resolution() {
    for (v6, (pod, remote)) in [false, true].into_iter().flat_map(|v6| POD_AND_REMOTE.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let mut last_hop = packet(Protocol::Udp, at(pod), at(remote));
        set_ttl(&mut last_hop, 1);
        remove_node_1_neighbor(&mut gateway, v6);
        let tunneled = node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &last_hop);
        assert_eq!(gateway.receive(0, INSIDE, &tunneled), vec![]);
        resolve_node_1_neighbor(&mut gateway, v6);
        let error = decap_at_node(&gateway.run(), 1, v6);
        let type_and_code = if at(pod).is_ipv4() { (error[34], error[35]) } else { (error[54], error[55]) };
        assert_eq!(type_and_code, if at(pod).is_ipv4() { (11, 0) } else { (3, 0) });
        gateway.assert_delta("drop ttl 1, replies sent 1");
    }
}

#[test]
fn an_icmp_error_to_an_overlay_pod_is_encapsulated() {
    for (pod, remote) in POD_AND_REMOTE {
        let mut gateway = gateway(false, policy());
        let mut last_hop = packet(Protocol::Udp, at(pod), at(remote));
        if at(pod).is_ipv4() {
            last_hop[22] = 1;
            let sum = vipgate_dataplane::wire::checksum::checksum(0, &{
                let mut header = last_hop[14..34].to_vec();
                header[10..12].fill(0);
                header
            });
            last_hop[24..26].copy_from_slice(&sum.to_be_bytes());
        } else {
            last_hop[21] = 1;
        }
        let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, false).ip(), local_vtep(false), VNI, &last_hop));
        let error = decap_at_node(&sent, 1, false);
        let type_and_code = if at(pod).is_ipv4() { (error[34], error[35]) } else { (error[54], error[55]) };
        assert_eq!(type_and_code, if at(pod).is_ipv4() { (11, 0) } else { (3, 0) });
        gateway.assert_delta("drop ttl 1, replies sent 1");
    }
}

#[test]
fn sessions_follow_pods_between_nodes_and_off_the_overlay() {
    let mut gateway = gateway(false, policy());
    let (pod, remote) = POD_AND_REMOTE[0];
    let request = packet(Protocol::Udp, at(pod), at(remote));
    let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, false).ip(), local_vtep(false), VNI, &request));
    let reply = reply_to(&sent[0].1, Protocol::Udp);
    decap_at_node(&gateway.receive(0, OUTSIDE, &reply), 1, false);
    let mut moved_nodes = nodes(false);
    moved_nodes[1].prefixes.push("10.244.1.5/32".parse().unwrap());
    let change = |nodes| PolicyChange { version: "2".into(), nodes, ..PolicyChange::default() };
    let names: Vec<_> = moved_nodes.iter().map(|node| node.name.clone()).collect();
    let snapshot = gateway.builder.with_change(&change(moved_nodes.into())).unwrap();
    gateway.publisher.publish(snapshot);
    decap_at_node(&gateway.receive(0, OUTSIDE, &reply), 2, false);
    let sent = gateway.receive(0, INSIDE, &node_packet(vtep(2, false).ip(), local_vtep(false), VNI, &request));
    assert_eq!(ends(&sent[0].1).0, ends(&reply).1, "the session is the same");
    let snapshot = gateway.builder.with_change(&change(Entries::default().without(names))).unwrap();
    gateway.publisher.publish(snapshot);
    let sent = gateway.receive(0, OUTSIDE, &reply);
    assert_eq!(ends(&sent[0].1).1, at(pod), "via the kernel's route");
    gateway.assert_delta("egress 2, reply 3, created 1");
}

#[test]
fn ambiguous_or_invalid_nodes_are_rejected() {
    let mut gateway = gateway(false, policy());
    let invalid = |change: fn(&mut Vec<NodeSpec>)| {
        let mut set = policy();
        set.nodes = nodes(false);
        change(&mut set.nodes);
        set
    };
    for set in [
        invalid(|nodes| nodes[1].address = nodes[0].address),
        invalid(|nodes| nodes[1].vni = 1 << 24),
        invalid(|nodes| nodes[1].mac[0] |= 1),
    ] {
        let error = gateway.builder.with_policy(&set).unwrap_err().to_string();
        assert!(error.starts_with("node node-"), "{error}");
    }
    gateway.assert_delta("");
}

#[test]
fn the_tunnel_header_carries_the_inner_traffic_class() {
    const CLASS: u8 = 0xb9;
    for (v6, (pod, remote)) in [false, true].into_iter().flat_map(|v6| POD_AND_REMOTE.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let request = packet(Protocol::Udp, at(pod), at(remote));
        let sent = gateway.receive(0, INSIDE, &node_packet(vtep(1, v6).ip(), local_vtep(v6), VNI, &request));
        let mut reply = reply_to(&sent[0].1, Protocol::Udp);
        if at(pod).is_ipv4() {
            reply[15] = CLASS;
            update_header_checksum(&mut reply);
        } else {
            (reply[14], reply[15]) = (0x60 | CLASS >> 4, CLASS << 4);
        }
        let sent = gateway.receive(0, OUTSIDE, &reply);
        decap_at_node(&sent, 1, v6);
        let outer = &sent[0].1;
        let class = if v6 { outer[14] << 4 | outer[15] >> 4 } else { outer[15] };
        assert_eq!(class, CLASS, "DSCP and ECN (RFC 6040)");
        gateway.assert_delta("egress 1, reply 1, created 1");
    }
}
