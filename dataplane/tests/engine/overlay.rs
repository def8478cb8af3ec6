//! Pods on nodes of an overlay network: their packets come in VXLAN, and what goes to them goes so, through their own node.

use std::net::{IpAddr, SocketAddr};

use crate::support::services::{CLIENTS, both_pods, service};
use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::spec::*;
use vipgate_dataplane::watch::tap::TapFilter;
use vipgate_dataplane::wire::vxlan::{Outer, parse};

const VNI: u32 = 0x00_1234;
/// The link addresses of the nodes' ends of the overlay network, and the one that they send to.
const NODES: [[u8; 6]; 2] = [[0x0e, 0, 0, 0, 0, 1], [0x0e, 0, 0, 0, 0, 2]];
const ANYBODY: [u8; 6] = [0x0e, 0, 0, 0, 0, 0xff];

fn own(v6: bool) -> SocketAddr {
    at(if v6 { "[fd00:20::64]:4789" } else { "10.20.0.100:4789" })
}

fn node(number: usize, v6: bool) -> SocketAddr {
    at(&if v6 { format!("[fd00:20::{number}]:4789") } else { format!("10.20.0.{number}:4789") })
}

/// Two nodes: pods .5 and .21 are on the first one, .6 on the second one.
fn nodes(v6: bool) -> Vec<NodeSpec> {
    let prefixes = [
        ["10.244.1.0/24", "fd00:244:1::/64"].map(|net| net.parse().unwrap()),
        ["10.244.1.6/32", "fd00:244:1::6/128"].map(|net| net.parse().unwrap()),
    ];
    let spec = |(number, prefixes): (usize, [_; 2])| NodeSpec {
        name: format!("node-{number}").into(),
        address: node(number, v6),
        vni: VNI,
        mac: NODES[number - 1],
        prefixes: prefixes.into(),
    };
    (1..).zip(prefixes).map(spec).collect()
}

fn network_with_nodes(v6: bool) -> NetworkSpec {
    let mut network = network();
    network.interfaces[0].addresses = vec![ip("10.244.1.1"), ip("fd00:244:1::1")];
    let net = if v6 { "fd00:20::/64" } else { "10.20.0.0/24" };
    let via = RouteTarget::Via(vec![HopSpec { interface: INSIDE, gateway: None }]);
    network.routes.push(RouteSpec { prefix: net.parse().unwrap(), target: via });
    for number in [1, 2, 9] {
        let address = node(number, v6).ip();
        network.neighbours.push(NeighbourSpec { interface: INSIDE, address, mac: POD_MAC });
    }
    network
}

fn gateway(v6: bool, mut policy: PolicySet) -> Gateway {
    policy.nodes = nodes(v6);
    Gateway::with(&Setup { overlay: Some(own(v6)), ..Setup::default() }, network_with_nodes(v6), &policy)
}

/// A pod's packet as its node sends it.
fn tunnel(from: IpAddr, to: SocketAddr, vni: u32, packet: &[u8]) -> Vec<u8> {
    let outer = Outer::new(from, to).unwrap();
    let mut frame = vec![0; outer.length()];
    outer.write(&mut frame, packet.len() as u16, vni, 7, 0);
    frame[..6].copy_from_slice(&INSIDE_MAC);
    frame.extend(packet);
    let at = outer.length();
    frame[at..at + 6].copy_from_slice(&ANYBODY);
    frame
}

/// What is in the one packet that goes to this node.
fn to_node(sent: &[(vipgate_dataplane::io::InterfaceId, Vec<u8>)], number: usize, v6: bool) -> Vec<u8> {
    assert_eq!(sent.len(), 1);
    let (out, frame) = &sent[0];
    assert_eq!((*out, ends(frame).1, &frame[..6]), (INSIDE, node(number, v6), &POD_MAC[..]));
    assert_eq!(ends(frame).0.ip(), own(v6).ip());
    let inner = parse(frame).unwrap();
    assert_eq!(inner.vni, VNI);
    let packet = frame[inner.at..].to_vec();
    assert_eq!(packet[..6], NODES[number - 1]);
    assert_eq!(packet[6] & 3, 2, "the gateway's own link address there");
    check_packet(&packet);
    packet
}

#[test]
fn a_pods_packets_come_and_their_answers_go_by_its_node() {
    for v6 in [false, true] {
        for (pod, far) in POD_AND_FAR {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                let mut gateway = gateway(v6, policy());
                let question = packet(protocol, at(pod), at(far));
                let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, v6).ip(), own(v6), VNI, &question));
                let [(OUTSIDE, seen)] = &sent[..] else { panic!("{sent:?} {:?}", gateway.drops()) };
                check_only_translated(&question, seen);
                let answer = answer_to(seen, protocol);
                for _ in 0..2 {
                    let sent = gateway.arrives(0, OUTSIDE, &answer);
                    let home = to_node(&sent, 1, v6);
                    check_only_translated(&answer, &home);
                    assert_eq!(ends(&home).1, at(pod));
                }
                assert_eq!(gateway.drops(), [].into());
                gateway.assert_delta("egress 1, reply 2, created 1");
            }
        }
    }
}

#[test]
fn a_pod_that_no_policy_covers_reaches_other_pods_by_their_nodes_and_nobody_else() {
    for v6 in [false, true] {
        for (pod, mate, far) in [
            ("10.244.1.7:4000", "10.244.1.6:53", "198.51.100.10:53"),
            ("[fd00:244:1::7]:4000", "[fd00:244:1::6]:53", "[2001:db8:51::10]:53"),
        ] {
            let pods = ["10.244.0.0/16", "fd00:244::/32"].map(|net| net.parse().unwrap()).into();
            let cluster = ClusterSpec { pods, others: vec![], drop_uncovered: true };
            let mut gateway = gateway(v6, PolicySet { cluster, ..policy() });
            let mut says = |to| {
                gateway.arrives(0, INSIDE, &tunnel(node(1, v6).ip(), own(v6), VNI, &packet(Protocol::Udp, at(pod), to)))
            };
            assert_eq!(says(at(far)), []);
            assert_eq!(ends(&to_node(&says(at(mate)), 2, v6)), (at(pod), at(mate)));
            gateway.assert_delta("unchanged 1, drop no_policy 1");
        }
    }
}

#[test]
fn a_capture_of_a_pod_or_of_its_node_has_what_goes_into_the_tunnel() {
    for (v6, (pod, far)) in [false, true].into_iter().flat_map(|v6| POD_AND_FAR.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let question = packet(Protocol::Udp, at(pod), at(far));
        let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, v6).ip(), own(v6), VNI, &question));
        let answer = answer_to(&sent[0].1, Protocol::Udp);
        let wanted = [at(pod), at(far), node(1, v6), own(v6), ends(&sent[0].1).0].map(|it| (it.ip(), 1));
        for (address, count) in wanted.into_iter().chain([(ip("10.244.1.6"), 0), (node(2, v6).ip(), 0)]) {
            gateway.capture(&TapFilter { nets: vec![address.into()], ..TapFilter::default() }, 2048, 1000);
            assert!(gateway.workers[0].io().inject(OUTSIDE, &answer));
            to_node(&gateway.run(), 1, v6);
            let seen = gateway.captured();
            assert_eq!(seen.len(), count, "{address}");
            assert!(seen.iter().all(|it| it.before == answer && parse(&it.after).is_some()));
        }
        gateway.assert_delta("egress 1, reply 7, created 1");
    }
}

#[test]
fn clients_reach_backends_on_their_nodes_and_what_policy_leaves_alone_goes_there_too() {
    let mut set = policy();
    set.services = vec![service(&both_pods())];
    let mut gateway = gateway(false, set);
    for n in 0..20 {
        let client: SocketAddr = (at(CLIENTS[0]).ip(), 40_000 + n).into();
        let sent = gateway.arrives(0, OUTSIDE, &packet(Protocol::Udp, client, at("192.0.2.10:53")));
        let number = if ends(&sent[0].1).1 == node(1, false) { 1 } else { 2 };
        let home = to_node(&sent, number, false);
        let backend = ends(&home).1;
        assert_eq!(backend.ip() == ip("10.244.1.6"), number == 2, "{backend} is on node {number}");
        let answer = tunnel(node(number, false).ip(), own(false), VNI, &packet(Protocol::Udp, backend, client));
        let sent = gateway.arrives(0, INSIDE, &answer);
        assert_eq!(ends(&sent[0].1), (at("192.0.2.10:53"), client));
    }
    let excluded = packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.200:53"));
    let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, false).ip(), own(false), VNI, &excluded));
    assert_eq!(ends(&sent[0].1), (at("10.244.1.21:4000"), at("198.51.100.200:53")));
    let sent = gateway.arrives(0, OUTSIDE, &answer_to(&sent[0].1, Protocol::Udp));
    assert_eq!(ends(&to_node(&sent, 1, false)).1, at("10.244.1.21:4000"));
    assert_eq!(gateway.drops(), [].into());
    gateway.assert_delta("inbound 20, service_reply 20, unchanged 2, created 20");
}

#[test]
fn a_node_is_believed_by_the_interface_that_leads_to_it_only() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let (pod, far) = POD_AND_FAR[0];
        let frame = tunnel(node(1, v6).ip(), own(v6), VNI, &packet(Protocol::Udp, at(pod), at(far)));
        let mut network = network_with_nodes(v6);
        let elsewhere = RouteTarget::Via(vec![HopSpec { interface: OUTSIDE, gateway: None }]);
        let RouteSpec { target, .. } = network.routes.last_mut().unwrap();
        let here = std::mem::replace(target, elsewhere);
        gateway.set_network(network.clone());
        assert_eq!(gateway.arrives(0, INSIDE, &frame), vec![]);
        network.routes.last_mut().unwrap().target = here;
        gateway.set_network(network);
        assert_eq!(gateway.arrives(0, INSIDE, &frame).len(), 1, "{:?}", gateway.drops());
        gateway.assert_delta("egress 1, drop peer_unknown 1, created 1");
    }
}

#[test]
fn only_nodes_are_believed_and_each_only_about_its_own_pods() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let (pod, far) = POD_AND_FAR[0];
        let inner = packet(Protocol::Udp, at(pod), at(far));
        let of_another = packet(Protocol::Udp, at("10.244.1.6:4000"), at(far));
        let [one, own] = [node(1, v6), own(v6)];
        let mut arp = inner.clone();
        arp[12..14].copy_from_slice(&[8, 6]);
        let nested = tunnel(one.ip(), own, VNI, &inner);
        let from_far = packet(Protocol::Udp, at(far), at("192.0.2.10:2000"));
        for (frame, reason) in [
            (tunnel(node(9, v6).ip(), own, VNI, &inner), DropReason::PeerUnknown),
            (tunnel(one.ip(), own, VNI + 1, &inner), DropReason::PeerUnknown),
            (tunnel(one.ip(), own, VNI, &of_another), DropReason::SpoofedSource),
            (tunnel(one.ip(), own, VNI, &from_far), DropReason::SpoofedSource),
            (tunnel(one.ip(), own, VNI, &arp), DropReason::Malformed),
            (tunnel(one.ip(), own, VNI, &inner[..20]), DropReason::Malformed),
            (tunnel(one.ip(), own, VNI, &inner)[..70].to_vec(), DropReason::Malformed),
            (tunnel(one.ip(), own, VNI, &nested), DropReason::SpoofedSource),
        ] {
            let before = gateway.drops().get(&reason).copied().unwrap_or(0);
            assert_eq!(gateway.arrives(0, INSIDE, &frame), vec![]);
            assert_eq!(gateway.drops().get(&reason).copied(), Some(before + 1), "{reason:?}");
        }
        // From outside, nobody is a node.
        let mut outside = tunnel(one.ip(), own, VNI, &inner);
        outside[..6].copy_from_slice(&OUTSIDE_MAC);
        assert_eq!(gateway.arrives(0, OUTSIDE, &outside), vec![]);
        assert_eq!(gateway.sessions(), 0);
        assert_eq!(gateway.arrives(0, INSIDE, &tunnel(one.ip(), own, VNI, &inner)).len(), 1);
        gateway.assert_delta("egress 1, drop spoofed_source 3, drop malformed 3, drop peer_unknown 3, created 1");
    }
}

#[test]
fn what_is_too_long_for_the_overlay_is_cut_or_its_sender_hears_how_long_it_may_be() {
    let mut gateway = gateway(false, policy());
    let (pod, far) = POD_AND_FAR[0];
    let question = packet(Protocol::Udp, at(pod), at(far));
    let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, false).ip(), own(false), VNI, &question));
    let (vip, far) = ends(&sent[0].1);
    let told = gateway.arrives(0, OUTSIDE, &large_reply(far, vip, false));
    let [(OUTSIDE, told)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((told[34], told[35], u16::from_be_bytes([told[40], told[41]])), (3, 4, 1450));
    let pieces = gateway.arrives(0, OUTSIDE, &large_reply(far, vip, true));
    let lengths: usize = pieces.iter().map(|piece| to_node_piece(piece, false)).sum();
    assert_eq!((pieces.len(), lengths), (2, 1480));
    gateway.assert_delta("egress 1, reply 1, drop too_big 1, created 1, answered 1");
}

#[test]
fn a_link_carries_no_more_than_is_received_whatever_its_mtu() {
    let mut gateway = gateway(false, policy());
    let mut jumbo = network_with_nodes(false);
    jumbo.interfaces.iter_mut().for_each(|interface| interface.mtu = 9000);
    gateway.set_network(jumbo);
    let (pod, far) = POD_AND_FAR[0];
    let question = packet(Protocol::Udp, at(pod), at(far));
    let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, false).ip(), own(false), VNI, &question));
    let (vip, far) = ends(&sent[0].1);
    let told = gateway.arrives(0, OUTSIDE, &reply_of(1760, far, vip, false));
    let [(OUTSIDE, told)] = &told[..] else { panic!("{told:?}") };
    let mtu = u16::from_be_bytes([told[40], told[41]]);
    assert_eq!((told[34], told[35], mtu), (3, 4, 1728), "1778 without the headers of the tunnel");
    let pieces = gateway.arrives(0, OUTSIDE, &reply_of(1760, far, vip, true));
    assert!(pieces.len() == 2 && pieces.iter().all(|(_, frame)| frame.len() <= 1792));
    assert_eq!(gateway.arrives(0, OUTSIDE, &reply_of(1728, far, vip, false)).len(), 1);
    gateway.assert_delta("egress 1, reply 2, drop too_big 1, created 1, answered 1");
}

/// Bytes of a piece behind its IP header.
fn to_node_piece((_, frame): &(vipgate_dataplane::io::InterfaceId, Vec<u8>), v6: bool) -> usize {
    let inner = parse(frame).unwrap();
    assert_eq!((ends(frame).1, inner.vni, &frame[inner.at..inner.at + 6]), (node(1, v6), VNI, &NODES[0][..]));
    inner.length - 34
}

/// The link address of node 1 isn't known any more.
fn forget_node_1(gateway: &mut Gateway, v6: bool) {
    let mut network = network_with_nodes(v6);
    network.neighbours.retain(|neighbour| neighbour.address != node(1, v6).ip());
    gateway.set_network(network);
}

/// The kernel is asked for the link address of node 1, and finds it.
fn ask_for_node_1(gateway: &mut Gateway, v6: bool) {
    let wanted = gateway.questions.queue.pop().map(|it| (it.interface, it.address));
    assert_eq!(wanted, Some((INSIDE, node(1, v6).ip())), "nobody is asked: {:?}", gateway.drops());
    gateway.set_network(network_with_nodes(v6));
}

#[test]
fn what_must_be_cut_for_a_node_that_is_not_known_yet_asks_for_it_and_waits_whole() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let (pod, far) = POD_AND_FAR[0];
        let question = packet(Protocol::Udp, at(pod), at(far));
        let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, v6).ip(), own(v6), VNI, &question));
        let (vip, far) = ends(&sent[0].1);
        forget_node_1(&mut gateway, v6);
        assert_eq!(gateway.arrives(0, OUTSIDE, &large_reply(far, vip, true)), vec![]);
        // Where pods are may change meanwhile: it was on its way to this node.
        let mut set = policy();
        set.nodes = nodes(v6).into_iter().rev().collect();
        gateway.set_policy(&set);
        ask_for_node_1(&mut gateway, v6);
        let pieces = gateway.run();
        let lengths: usize = pieces.iter().map(|piece| to_node_piece(piece, v6)).sum();
        assert_eq!((pieces.len(), lengths), (2, 1480));
        assert!(pieces.iter().all(|(out, frame)| *out == INSIDE && frame[..6] == POD_MAC));
        gateway.assert_delta("egress 1, reply 1, created 1");
    }
}

#[test]
fn what_the_gateway_says_to_a_pod_waits_for_its_node() {
    for (v6, (pod, far)) in [false, true].into_iter().flat_map(|v6| POD_AND_FAR.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let mut last_hop = packet(Protocol::Udp, at(pod), at(far));
        set_ttl(&mut last_hop, 1);
        forget_node_1(&mut gateway, v6);
        let came = tunnel(node(1, v6).ip(), own(v6), VNI, &last_hop);
        assert_eq!(gateway.arrives(0, INSIDE, &came), vec![]);
        ask_for_node_1(&mut gateway, v6);
        let told = to_node(&gateway.run(), 1, v6);
        let kind = if at(pod).is_ipv4() { (told[34], told[35]) } else { (told[54], told[55]) };
        assert_eq!(kind, if at(pod).is_ipv4() { (11, 0) } else { (3, 0) });
        gateway.assert_delta("drop ttl 1, answered 1");
    }
}

#[test]
fn a_pod_hears_what_the_gateway_says_by_its_node() {
    for (pod, far) in POD_AND_FAR {
        let mut gateway = gateway(false, policy());
        let mut last_hop = packet(Protocol::Udp, at(pod), at(far));
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
        let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, false).ip(), own(false), VNI, &last_hop));
        let told = to_node(&sent, 1, false);
        let kind = if at(pod).is_ipv4() { (told[34], told[35]) } else { (told[54], told[55]) };
        assert_eq!(kind, if at(pod).is_ipv4() { (11, 0) } else { (3, 0) });
        assert_eq!(gateway.drops(), [(DropReason::Ttl, 1)].into());
        gateway.assert_delta("drop ttl 1, answered 1");
    }
}

#[test]
fn pods_move_from_node_to_node_and_off_the_overlay() {
    let mut gateway = gateway(false, policy());
    let (pod, far) = POD_AND_FAR[0];
    let question = packet(Protocol::Udp, at(pod), at(far));
    let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, false).ip(), own(false), VNI, &question));
    let answer = answer_to(&sent[0].1, Protocol::Udp);
    to_node(&gateway.arrives(0, OUTSIDE, &answer), 1, false);
    let mut moved = nodes(false);
    moved[1].prefixes.push("10.244.1.5/32".parse().unwrap());
    let change = |nodes| PolicyChange { version: "2".into(), nodes: Some(nodes), ..PolicyChange::default() };
    let snapshot = gateway.builder.with_change(&change(moved)).unwrap();
    gateway.publisher.publish(snapshot);
    to_node(&gateway.arrives(0, OUTSIDE, &answer), 2, false);
    let sent = gateway.arrives(0, INSIDE, &tunnel(node(2, false).ip(), own(false), VNI, &question));
    assert_eq!(ends(&sent[0].1).0, ends(&answer).1, "its session is the same");
    let snapshot = gateway.builder.with_change(&change(Vec::new())).unwrap();
    gateway.publisher.publish(snapshot);
    let sent = gateway.arrives(0, OUTSIDE, &answer);
    assert_eq!(ends(&sent[0].1).1, at(pod), "by the kernel's own route");
    gateway.assert_delta("egress 2, reply 3, created 1");
}

#[test]
fn nodes_that_cannot_be_told_apart_are_refused() {
    let mut gateway = gateway(false, policy());
    let refused = |change: fn(&mut Vec<NodeSpec>)| {
        let mut set = policy();
        set.nodes = nodes(false);
        change(&mut set.nodes);
        set
    };
    for set in [
        refused(|nodes| nodes[1].name = nodes[0].name.clone()),
        refused(|nodes| nodes[1].address = nodes[0].address),
        refused(|nodes| nodes[1].vni = 1 << 24),
        refused(|nodes| nodes[1].mac[0] |= 1),
    ] {
        let error = gateway.builder.with_policy(&set).unwrap_err().to_string();
        assert!(error.starts_with("node node-"), "{error}");
    }
    gateway.assert_delta("");
}

#[test]
fn the_tunnel_carries_the_traffic_class_of_what_is_in_it() {
    const CLASS: u8 = 0xb9;
    for (v6, (pod, far)) in [false, true].into_iter().flat_map(|v6| POD_AND_FAR.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let question = packet(Protocol::Udp, at(pod), at(far));
        let sent = gateway.arrives(0, INSIDE, &tunnel(node(1, v6).ip(), own(v6), VNI, &question));
        let mut answer = answer_to(&sent[0].1, Protocol::Udp);
        if at(pod).is_ipv4() {
            answer[15] = CLASS;
            seal_header(&mut answer);
        } else {
            (answer[14], answer[15]) = (0x60 | CLASS >> 4, CLASS << 4);
        }
        let sent = gateway.arrives(0, OUTSIDE, &answer);
        to_node(&sent, 1, v6);
        let outer = &sent[0].1;
        let class = if v6 { outer[14] << 4 | outer[15] >> 4 } else { outer[15] };
        assert_eq!(class, CLASS, "DSCP and ECN (RFC 6040)");
        gateway.assert_delta("egress 1, reply 1, created 1");
    }
}
