//! Tunnel packets of others, with the addresses of a node or of a gateway: they lack the node's secret MAC address.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use vipgate_lab::Host;
use vipgate_lab::reflector::query_http;
use vipgate_tests::cluster::{Captures, L2_VIPS, SERVER, TUNNEL_PORT};

use crate::scenario::{NODE_ADDRESS, Scenario};

/// That of all nodes without a secret.
const KNOWN_MAC: [u8; 6] = [0x0a, 0x76, 0x6e, 0x6f, 0x64, 0x65];
/// Tunnel address of a gateway, and the MAC address that it derives from it: everybody knows both.
const GATEWAY_ADDRESS: &str = "10.4.1.1";
const GATEWAY_MAC: [u8; 6] = [0x0a, 0x76, 10, 4, 1, 1];
/// Of the forged datagrams.
const PORT: u16 = 7711;
const COUNT: u32 = 20;

/// A tunnel packet with these inner MAC addresses (destination, source) and a datagram.
fn tunnel_packet([to_mac, from_mac]: [[u8; 6]; 2], [from, to]: [&str; 2]) -> Vec<u8> {
    let octets = |address: &str| match address.parse() {
        Ok(IpAddr::V4(v4)) => v4.octets(),
        other => panic!("{other:?}"),
    };
    let payload = b"forged";
    let udp_length = 8 + payload.len() as u16;
    let udp = [5000, PORT, udp_length, 0].map(u16::to_be_bytes).concat();
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp_length).to_be_bytes());
    ip.extend([0, 1, 0, 0, 64, 17, 0, 0]);
    ip.extend([octets(from), octets(to)].concat());
    let sum = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    [&[8, 0, 0, 0, 0, 0, 7, 0][..], &to_mac, &from_mac, &[8, 0], &ip, &udp, payload].concat()
}

/// Sends the packet from a host that has taken another one's address.
fn send_as(host: &Host, address: &str, to: &str, packet: Vec<u8>) {
    host.addresses("lo", &[&format!("{address}/32")]).unwrap();
    let (from, to): (SocketAddr, SocketAddr) =
        (format!("{address}:0").parse().unwrap(), format!("{to}:{TUNNEL_PORT}").parse().unwrap());
    let send = move || {
        let socket = UdpSocket::bind(from)?;
        (0..COUNT).try_for_each(|_| socket.send_to(&packet, to).map(drop))
    };
    host.run(send).join().unwrap().unwrap();
    host.ip(&["address", "del", &format!("{address}/32"), "dev", "lo"]).unwrap();
}

/// The MAC address of the node's tunnel device.
fn secret_mac(scenario: &Scenario) -> [u8; 6] {
    let text = scenario.node.host.output(&["cat", "/sys/class/net/vipgate0/address"]).unwrap();
    let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// How many datagrams arrive at an interface while something is done.
fn arriving(scenario: &Scenario, place: (&Host, String), filter: &str, act: impl FnOnce()) -> usize {
    let filter = format!("udp dst port {PORT}{filter}");
    let arrived = Captures::start(scenario.cluster.folder.path(), "arrived", &[place], &filter);
    act();
    arrived.end().len()
}

#[test]
fn a_gateway_takes_no_packet_with_a_nodes_address_without_its_secret() {
    let scenario = Scenario::start("node-forged");
    let mac = secret_mac(&scenario);
    assert_ne!(mac, KNOWN_MAC);
    let cluster = &scenario.cluster;
    cluster.accounting.expect_exactly([("peer_unauthenticated", 2 * u64::from(COUNT))]);
    let pod = scenario.covered().addresses[0].clone();
    let send = |from_mac| {
        let packet = tunnel_packet([[2; 6], from_mac], [&pod, SERVER[0]]);
        send_as(&scenario.neighbor_host, NODE_ADDRESS, GATEWAY_ADDRESS, packet);
    };
    let at_server = || (&cluster.server, "eth0".to_owned());
    let rejected = || cluster.gateways[0].metric("vipgate_drops_total", "reason=\"peer_unauthenticated\"");
    let before = rejected();
    let mut guess = mac;
    guess[5] ^= 1;
    let forged = arriving(&scenario, at_server(), "", || [KNOWN_MAC, guess].into_iter().for_each(send));
    assert_eq!(forged, 0, "{}", scenario.evidence());
    assert!((rejected() - before - f64::from(2 * COUNT)).abs() < 0.5, "{}", scenario.evidence());
    // With the secret the same packet is accepted: the attack is one that would work.
    let with_secret = arriving(&scenario, at_server(), &format!(" and src host {}", L2_VIPS[0]), || send(mac));
    assert_eq!(with_secret, COUNT as usize, "{}", scenario.evidence());
    assert_eq!(query_http(&scenario.covered().host, SERVER[0].parse().unwrap()).unwrap(), L2_VIPS[0]);
}

#[test]
fn a_node_takes_no_packet_with_a_gateways_address_without_its_secret() {
    let scenario = Scenario::start("node-forged2");
    let mac = secret_mac(&scenario);
    let pod = scenario.covered();
    // As if a remote had answered.
    let send = |to_mac| {
        let packet = tunnel_packet([to_mac, GATEWAY_MAC], [SERVER[0], &pod.addresses[0]]);
        send_as(&scenario.neighbor_host, GATEWAY_ADDRESS, NODE_ADDRESS, packet);
    };
    let at_pod = || (&pod.host, "eth0".to_owned());
    let mut guess = mac;
    guess[0] ^= 0b100;
    let guesses = [KNOWN_MAC, guess, [0xff; 6], [1, 0, 0x5e, 0, 0, 1]];
    assert_eq!(arriving(&scenario, at_pod(), "", || guesses.into_iter().for_each(send)), 0, "{}", scenario.evidence());
    assert_eq!(arriving(&scenario, at_pod(), "", || send(mac)), COUNT as usize, "{}", scenario.evidence());
}
