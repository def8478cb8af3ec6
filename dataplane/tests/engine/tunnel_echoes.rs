//! Echo requests of nodes in their tunnels: answered to known nodes, whatever else is in the batch.

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::observe::capture::CaptureFilter;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::wire::tunnel_echo::{ETHERTYPE, REPLY, REQUEST};
use vipgate_dataplane::wire::vxlan::parse;
use vipgate_testkit::*;

use crate::overlay::{
    NODE_MACS, VNI, gateway, local_vtep, network_with_nodes, node_packet, nodes, remove_node_1_neighbor,
    resolve_node_1_neighbor, vtep,
};

/// The port of the agent's socket.
const PORT: u16 = 50_000;
const NONCE: &[u8; 16] = b"0123456789abcdef";

/// An inner frame of node 1, without padding: destination set by `node_packet`.
fn echo_frame(magic: [u8; 8]) -> Vec<u8> {
    [&[0; 6][..], &NODE_MACS[0], &ETHERTYPE.to_be_bytes(), &magic, NONCE].concat()
}

/// An inner frame with a request, as an agent sends it: 60 bytes.
fn request_frame() -> Vec<u8> {
    let mut frame = echo_frame(REQUEST);
    frame.resize(60, 0xa5);
    frame
}

/// A tunnel packet with this inner frame from an agent's socket.
fn agent_packet(from: IpAddr, vni: u32, frame: &[u8]) -> Vec<u8> {
    let mut packet = node_packet(from, local_vtep(from.is_ipv6()), vni, frame);
    let udp = packet.len() - frame.len() - 16;
    packet[udp..udp + 2].copy_from_slice(&PORT.to_be_bytes());
    packet
}

/// Checks the single packet sent: the reply to this request of node 1.
fn check_reply(sent: &[(InterfaceId, Vec<u8>)], request: &[u8], v6: bool) {
    let [(INSIDE, reply)] = sent else { panic!("{sent:02x?}") };
    assert_eq!((&reply[..6], reply.len()), (&POD_MAC[..], request.len()));
    assert_eq!(ends(reply), (local_vtep(v6), SocketAddr::new(vtep(1, v6).ip(), PORT)));
    let (asked, answered) = (parse(request).unwrap(), parse(reply).unwrap());
    assert_eq!(answered, asked, "VNI and lengths");
    // Without a checksum over IPv4; over IPv6 it was checked when the packet was sent.
    assert_eq!(reply[answered.offset - 10..answered.offset - 8] == [0, 0], !v6);
    let (asked, answered) = (&request[asked.offset..], &reply[answered.offset..]);
    assert_eq!(answered[..6], NODE_MACS[0]);
    let [.., a, b, c, d] = match local_vtep(v6).ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    assert_eq!(answered[6..12], [0x0a, 0x76, a, b, c, d]);
    assert_eq!((&answered[12..14], &answered[14..22]), (&asked[12..14], &REPLY[..]));
    assert_eq!(answered[22..], asked[22..], "nonce and padding");
}

#[test]
fn a_known_node_gets_a_reply_to_its_request() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        for padding in [0, 1, 22, 1000] {
            let frame = [echo_frame(REQUEST), vec![7; padding]].concat();
            let request = agent_packet(vtep(1, v6).ip(), VNI, &frame);
            check_reply(&gateway.receive(0, INSIDE, &request), &request, v6);
            // Ethernet padding is removed.
            let padded = [&request[..], &[0; 5]].concat();
            check_reply(&gateway.receive(0, INSIDE, &padded), &request, v6);
        }
        gateway.assert_delta("replies sent 8");
    }
}

#[test]
fn a_request_that_is_not_of_a_known_node_or_not_complete_gets_no_reply() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let node_1 = vtep(1, v6).ip();
        let request = agent_packet(node_1, VNI, &request_frame());
        let other_magic = agent_packet(node_1, VNI, &echo_frame(*b"vgecho\x00\x03"));
        let mut other_mac = request.clone();
        other_mac[..6].copy_from_slice(&[0x0e, 1, 1, 1, 1, 1]);
        for (packet, reason) in [
            (agent_packet(vtep(9, v6).ip(), VNI, &request_frame()), DropReason::PeerUnknown),
            (agent_packet(node_1, VNI + 1, &request_frame()), DropReason::PeerUnknown),
            (agent_packet(node_1, VNI, &echo_frame(REPLY)), DropReason::Malformed),
            (other_magic, DropReason::Malformed),
            (agent_packet(node_1, VNI, &echo_frame(REQUEST)[..37]), DropReason::Malformed),
            (agent_packet(node_1, VNI, &echo_frame(REQUEST)[..14]), DropReason::Malformed),
            (request[..request.len() - 1].to_vec(), DropReason::Malformed),
            (other_mac, DropReason::NotOurs),
        ] {
            let before = gateway.drops().get(&reason).copied().unwrap_or(0);
            assert_eq!(gateway.receive(0, INSIDE, &packet), []);
            assert_eq!(gateway.drops().get(&reason).copied(), Some(before + 1), "{reason:?}");
        }
        // Not on the outside interface, nor on an inside one that doesn't lead to the node.
        assert_eq!(gateway.receive(0, OUTSIDE, &on_link(OUTSIDE, request.clone())), []);
        let mut network = network_with_nodes(v6);
        let elsewhere = RouteTarget::Via(vec![HopSpec { interface: OUTSIDE, gateway: None }]);
        network.routes.last_mut().unwrap().target = elsewhere;
        gateway.set_network(network);
        assert_eq!(gateway.receive(0, INSIDE, &request), []);
        gateway.assert_delta("drop malformed 5, drop peer_unknown 4, drop not_ours 1");
    }
}

#[test]
fn a_request_among_other_packets_changes_nothing_for_them() {
    for (v6, (pod, remote)) in [false, true].into_iter().flat_map(|v6| POD_AND_REMOTE.map(|ends| (v6, ends))) {
        let mut gateway = gateway(v6, policy());
        let node_1 = vtep(1, v6).ip();
        let inner = packet(Protocol::Udp, at(pod), at(remote));
        let tunneled = node_packet(node_1, local_vtep(v6), VNI, &inner);
        let request = agent_packet(node_1, VNI, &request_frame());
        let unknown = agent_packet(vtep(9, v6).ip(), VNI, &request_frame());
        for batch in [[&tunneled, &request, &inner, &unknown, &request, &tunneled], [&request; 6]] {
            for received in batch {
                assert!(gateway.workers[0].io().inject(INSIDE, received));
            }
            let allocations = allocation_counter::measure(|| gateway.turn());
            assert_eq!(allocations.count_total, 0);
            let sent = gateway.run();
            let (replies, forwarded): (Vec<_>, Vec<_>) = sent.into_iter().partition(|(out, _)| *out == INSIDE);
            let requests = batch.iter().filter(|it| **it == &request).count();
            assert_eq!((replies.len(), forwarded.len()), (requests, if requests == 2 { 3 } else { 0 }));
            for reply in replies.chunks(1) {
                check_reply(reply, &request, v6);
            }
            for (_, seen) in &forwarded {
                check_only_translated(&inner, seen);
            }
        }
        gateway.assert_delta("egress 3, drop peer_unknown 1, created 1, replies sent 8");
    }
}

#[test]
fn a_reply_awaits_neighbor_resolution() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        remove_node_1_neighbor(&mut gateway, v6);
        let request = agent_packet(vtep(1, v6).ip(), VNI, &request_frame());
        assert_eq!(gateway.receive(0, INSIDE, &request), []);
        resolve_node_1_neighbor(&mut gateway, v6);
        check_reply(&gateway.run(), &request, v6);
        gateway.assert_delta("replies sent 1");
    }
}

#[test]
fn a_reply_longer_than_the_link_carries_is_not_sent() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let overhead = if v6 { 70 } else { 50 };
        for (length, is_sent) in [(1514 - overhead, true), (1515 - overhead, false)] {
            let mut frame = echo_frame(REQUEST);
            frame.resize(length, 0);
            let request = agent_packet(vtep(1, v6).ip(), VNI, &frame);
            let sent = gateway.receive(0, INSIDE, &request);
            if is_sent { check_reply(&sent, &request, v6) } else { assert_eq!(sent, []) }
        }
        gateway.assert_delta("drop too_big 1, replies sent 1");
    }
}

/// A reply says that the gateway forwards packets.
#[test]
fn a_gateway_without_a_lease_replies_until_it_stops_forwarding() {
    let mut gateway = gateway(false, policy());
    gateway.lease.renew(gateway.now.plus(10));
    gateway.now = gateway.now.plus(20);
    let request = agent_packet(vtep(1, false).ip(), VNI, &request_frame());
    check_reply(&gateway.receive(0, INSIDE, &request), &request, false);
    gateway.now = gateway.now.plus(300_000);
    assert_eq!(gateway.receive(0, INSIDE, &request), []);
    gateway.assert_delta("drop no_lease 1, replies sent 1");
}

#[test]
fn a_capture_shows_request_and_reply() {
    for v6 in [false, true] {
        let mut gateway = gateway(v6, policy());
        let request = agent_packet(vtep(1, v6).ip(), VNI, &request_frame());
        for (address, count) in [(vtep(1, v6).ip(), 1), (vtep(2, v6).ip(), 0)] {
            gateway.capture(&CaptureFilter { nets: vec![address.into()], ..CaptureFilter::default() }, 2048, 1000);
            assert!(gateway.workers[0].io().inject(INSIDE, &request));
            let sent = gateway.run();
            check_reply(&sent, &request, v6);
            let seen = gateway.captured();
            assert_eq!(seen.len(), count, "{address}");
            for packet in seen {
                // Of a packet that was replaced by a reply, 128 bytes are known.
                assert_eq!(packet.before, request[..request.len().min(128)]);
                assert_eq!(usize::from(packet.before_length), request.len());
                assert_eq!((packet.after, packet.verdict), (sent[0].1.clone(), Verdict::Reply(INSIDE)));
            }
        }
        gateway.assert_delta("replies sent 2");
    }
}

#[test]
fn a_request_without_the_nodes_secret_mac_address_gets_no_reply() {
    let mut policy = policy();
    policy.nodes = nodes(false);
    policy.nodes[0].verify_mac = true;
    let setup = Setup { overlay: Some(local_vtep(false)), ..Setup::default() };
    let mut gateway = Gateway::with(&setup, network_with_nodes(false), &policy);
    let request = agent_packet(vtep(1, false).ip(), VNI, &request_frame());
    let mut other = request_frame();
    other[6..12].copy_from_slice(&NODE_MACS[1]);
    assert_eq!(gateway.receive(0, INSIDE, &agent_packet(vtep(1, false).ip(), VNI, &other)), vec![]);
    check_reply(&gateway.receive(0, INSIDE, &request), &request, false);
    gateway.assert_delta("drop peer_unauthenticated 1, replies sent 1");
}
